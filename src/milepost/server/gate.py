"""What every request passes before the application: the key, the size of the body, the access log.

Plain ASGI, so that streams pass unbuffered. The record of a request lives in its scope: handlers
add what they know (`request.scope["milepost.record"]`), and it is written when the response ends.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from milepost.server.anthropic.errors import body_for
from milepost.server.config import ServerConfig
from milepost.server.errors import ClientGoneError, HttpError, message_of, response_of
from milepost.server.ui import page

logger = logging.getLogger(__name__)
access = logging.getLogger("milepost.access")

OPEN_PATHS = frozenset(("/health", *page.FILES))
"""Served without a key: a load balancer can ask, and the page can ask for the key."""

ADMIN_PATHS = frozenset(("/metrics", "/reset_prefix_cache", "/sleep", "/wake_up", page.STATE_PATH))
"""Opened by the admin keys alone, if there are any."""

QUIET_PATHS = frozenset((*page.FILES, page.STATE_PATH))
"""Not logged while all goes well: a page that is open asks every second."""


class Gate:
    """Wraps the application."""

    def __init__(self, app: Any, config: ServerConfig, api_keys: Sequence[str]) -> None:
        self._app = app
        self._config = config
        self._keys = [key.encode() for key in api_keys]
        self._admin_keys = [key.encode() for key in config.admin_key or ()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(send, time.monotonic())
        scope["milepost.record"] = exchange.record
        scope["milepost.arrival"] = exchange.arrival
        scope["milepost.send"] = exchange.send
        scope["milepost.headers"] = exchange.headers
        scope.setdefault("milepost.abort", aborter(send))
        scope["milepost.path"] = scope["path"]
        if self._config.root_path:
            scope = {**scope, **_rooted(scope["path"], self._config.root_path)}
        if self._config.enable_request_id_headers:
            own = _header(scope, b"x-request-id") or uuid.uuid4().hex.encode()
            exchange.headers.append((b"x-request-id", own))
        try:
            self._check_key(scope)
            self._check_length(scope)
            await self._app(scope, self._limited(receive), exchange.send)
        except ClientGoneError:
            pass  # the record says so
        except Exception as error:  # noqa: BLE001 - the last place where one can be answered
            await self._fail(error, scope, receive, exchange)
        finally:
            is_quiet = exchange.status == 200 and scope["milepost.path"] in QUIET_PATHS
            if self._config.access_log and not is_quiet:
                access.info("%s", json.dumps(exchange.line(scope), ensure_ascii=True))

    def _check_key(self, scope: Any) -> None:
        is_admin = bool(self._admin_keys) and scope["milepost.path"] in ADMIN_PATHS
        keys = self._admin_keys if is_admin else [*self._keys, *self._admin_keys]
        if not (self._keys or is_admin) or scope["milepost.path"] in OPEN_PATHS:
            return
        kind, _, key = _header(scope, b"authorization").partition(b" ")
        given = [key.strip()] if kind.lower() == b"bearer" else []
        given.append(_header(scope, b"x-api-key"))
        matches = [hmac.compare_digest(one, own) for one in given for own in keys]
        if True not in matches:
            raise HttpError(
                401, "send a valid key as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            )

    def _check_length(self, scope: Any) -> None:
        length = _header(scope, b"content-length")
        if length.isdigit() and (len(length) > 18 or int(length) > self._config.max_request_bytes):
            raise self._too_large()

    def _limited(self, receive: Any) -> Any:
        """`receive` for bodies that come without a length."""
        num_bytes, is_whole = 0, False

        async def limited() -> Any:
            nonlocal num_bytes, is_whole
            try:
                async with asyncio.timeout(None if is_whole else self._config.body_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise HttpError(
                    408, f"no more of the body came for {self._config.body_timeout_s:g} seconds"
                ) from None
            is_whole = is_whole or not message.get("more_body")
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._config.max_request_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> HttpError:
        most = self._config.max_request_bytes
        return HttpError(413, f"the body is larger than the {most} bytes allowed here")

    async def _fail(self, error: Exception, scope: Any, receive: Any, exchange: _Exchange) -> None:
        response = response_of(error, body_for(scope["milepost.path"], error))
        exchange.record["error"] = message_of(error)
        if response.status_code == 500:
            logger.exception("a request failed", exc_info=error)
        if exchange.status is None:
            await response(scope, receive, exchange.send)
        elif not exchange.is_complete:
            scope["milepost.abort"]()  # half a response is out: the client must see that it broke


class _Exchange:
    """One request and what became of it."""

    def __init__(self, send: Any, arrival: float) -> None:
        self._send = send
        self.arrival = arrival
        self.status: int | None = None
        self.is_complete = False
        self.record: dict[str, Any] = {}
        self.headers: list[tuple[bytes, bytes]] = []
        """Go out with the response, besides its own."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.headers:
                message = {**message, "headers": [*message["headers"], *self.headers]}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.is_complete = True

    def line(self, scope: Any) -> dict[str, Any]:
        """The access log's line."""
        client = scope.get("client")
        return {
            "time": round(time.time(), 3),
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": self.status,
            "duration_s": round(time.monotonic() - self.arrival, 4),
            **self.record,
        }


def _header(scope: Any, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _rooted(path: str, root: str) -> dict[str, Any]:
    """The path with and without the root, whether the proxy in front has cut it off or not: what is
    guarded by its path is what the application serves.
    """
    if path == root or path.startswith(f"{root}/"):
        path = path[len(root) :] or "/"
    return {"root_path": root, "path": root + path, "milepost.path": path}


def aborter(send: Any) -> Callable[[], None]:
    """Drops the connection at once. ASGI has no word for it, so this asks uvicorn's transport."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    return getattr(transport, "abort", lambda: None)
