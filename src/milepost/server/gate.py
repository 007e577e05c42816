"""Handles every request before the application: its path, its caller, the size of its body, the
access log.

Plain ASGI, so streams pass unbuffered. The record of a request lives in its scope: handlers add
what they know (`request.scope["milepost.record"]`), and it is written when the response ends. The
gate identifies the caller; the route (`callers`) decides whether that caller is admitted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware

from milepost import logs
from milepost.logs import RequestIds
from milepost.server import tracing
from milepost.server.callers import Keys, check_site, header
from milepost.server.config import ServerConfig
from milepost.server.connections import Incoming
from milepost.server.errors import ClientGoneError, HttpError, body_for, message_of, response_of
from milepost.server.tracing import TraceContext
from milepost.server.vllm_metrics import HttpMetrics

if TYPE_CHECKING:
    from milepost.server.spans import Tracing

logger = logging.getLogger(__name__)
access = logging.getLogger("milepost.access")

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters, which no path of ours and no model's name contains. Logs take some for ends
of lines."""
_REQUEST_ID = re.compile(rb"[!-~]{1,256}")


class Gate:
    """Wraps the application. Successful requests for `quiet_paths` are not logged; `metrics` counts
    all requests, and `tracing` makes the spans of those that generate."""

    def __init__(
        self,
        app: Any,
        config: ServerConfig,
        keys: Keys,
        metrics: HttpMetrics,
        tracing: Tracing | None = None,
        quiet_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._metrics = metrics
        self._tracing = tracing
        self._quiet_paths = quiet_paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":  # no route accepts one
            await send({"type": "websocket.close", "code": 1008})
            return
        incoming = scope.setdefault("milepost.incoming", Incoming(is_whole=True))
        exchange = _Exchange(send, time.monotonic(), incoming)
        scope["milepost.record"] = exchange.record
        scope["milepost.arrival"] = exchange.arrival
        scope["milepost.send"] = exchange.send
        scope["milepost.headers"] = exchange.headers
        scope["milepost.abort"] = incoming.abort
        scope["milepost.write_timeout_s"] = self._config.write_timeout_s
        scope["milepost.caller"] = self._keys.caller(scope["headers"])
        asked, method = scope["path"], scope["method"]
        scope = {**scope, **_routed(asked, self._config.root_path or scope.get("root_path", ""))}
        if method == "HEAD":  # uvicorn leaves the body out
            scope["method"] = "GET"
        context = self._trace(scope)
        ids = _ids(scope["headers"], context)
        if self._config.enable_request_id_headers:
            exchange.headers.append((b"x-request-id", ids.request_id.encode()))
        with logs.of_request(ids):
            await self._pass_on((method, asked), scope, receive, exchange)

    async def _pass_on(
        self, asked: tuple[str, str], scope: Any, receive: Any, exchange: _Exchange
    ) -> None:
        """Lets the application answer a request; counts and logs it, as it was `asked`."""
        method, path = asked
        try:
            _check_path(path)
            if not self._keys.are_required:
                check_site(scope, self._config)
            await self._app(scope, self._limited(receive, scope), exchange.send)
        except ClientGoneError:
            pass  # it is in the record
        except Exception as error:  # noqa: BLE001 - last chance to answer
            await self._fail(error, scope, receive, exchange)
        finally:
            self._metrics.finished(
                scope,
                status=exchange.status,
                seconds=time.monotonic() - exchange.arrival,
                request_bytes=_length(scope["headers"]),
                response_bytes=exchange.num_bytes,
            )
            if scope["milepost.span"] is not None:
                scope["milepost.span"].end(scope, exchange.status)
            is_quiet = exchange.status == 200 and scope["milepost.path"] in self._quiet_paths
            if self._config.access_log and not is_quiet:
                line = exchange.line({**scope, "method": method, "path": path})
                words = method, path, exchange.status
                access.info("%s %s %s", *words, extra={"fields": line})

    def _trace(self, scope: Any) -> TraceContext | None:
        """Begins a request's span, if it has one. Returns the span that it is part of: its own, or
        else its client's."""
        context, span = tracing.read(scope["headers"]), None
        if self._tracing is not None:
            path, arrival = scope["milepost.path"], scope["milepost.arrival"]
            span = self._tracing.begin(scope["method"], path, arrival, context)
        scope["milepost.span"] = span
        scope["milepost.trace"] = found = context if span is None else span.context
        return found

    def _limited(self, receive: Any, scope: Any) -> Any:
        """Returns `receive` within the limits on bodies. The declared length is checked before
        anything is read. A body also arrives within a request's time, however short its pauses."""
        incoming: Incoming = scope["milepost.incoming"]
        pause_s, whole_s = self._config.body_timeout_s, self._config.request_timeout_s
        num_bytes, is_taken = 0, False

        async def limited() -> Any:
            nonlocal num_bytes, is_taken
            if not num_bytes:
                self._check_length(scope)
            left_s = scope["milepost.arrival"] + whole_s - time.monotonic()
            try:
                async with asyncio.timeout(None if is_taken else min(pause_s, left_s)):
                    message = await receive()
            except TimeoutError:
                why = f"no more of the body arrived for {pause_s:g} seconds"
                if left_s < pause_s:
                    why = f"the body did not arrive within {whole_s:g} seconds"
                raise HttpError(408, why) from None
            if incoming.problem is not None and not is_taken:
                raise incoming.problem
            is_taken = is_taken or not message.get("more_body")
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._config.max_request_bytes:
                raise self._too_large()
            return message

        return limited

    def _check_length(self, scope: Any) -> None:
        length = header(scope["headers"], b"content-length")
        if length.isdigit() and (len(length) > 18 or int(length) > self._config.max_request_bytes):
            raise self._too_large()

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
            scope["milepost.abort"]()  # the client must notice that its response is incomplete


class _Exchange:
    """One request and its response."""

    def __init__(self, send: Any, arrival: float, incoming: Incoming) -> None:
        self._send = send
        self._incoming = incoming
        self.arrival = arrival
        self.status: int | None = None
        self.num_bytes = 0
        """Content length of the response; 0 for a stream."""
        self.is_complete = False
        self.record: dict[str, Any] = {}
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers to add to the response."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.num_bytes = _length(message["headers"])
            if not self._incoming.is_whole:  # the rest is not read: close the connection
                self.headers.append((b"connection", b"close"))
            if self.headers:
                message = {**message, "headers": [*message["headers"], *self.headers]}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.is_complete = True

    def line(self, scope: Any) -> dict[str, Any]:
        """Returns the line of the access log."""
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


def _length(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Returns the content length that headers declare; 0 for none, and for one of no length."""
    length = header(headers, b"content-length")
    return int(length) if length.isdigit() and len(length) <= 18 else 0


def _ids(headers: Sequence[tuple[bytes, bytes]], context: TraceContext | None) -> RequestIds:
    """Returns the ids of a request. A valid `X-Request-Id` of the client is kept."""
    given = header(headers, b"x-request-id")
    request_id = given.decode("ascii") if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()
    if context is None:
        return RequestIds(request_id=request_id)
    return RequestIds(request_id=request_id, trace_id=context.trace_id, span_id=context.span_id)


def _check_path(path: str) -> None:
    """Raises HttpError 400 for control characters."""
    found = _CONTROL.search(path)
    if found is not None:
        raise HttpError(400, f"the path has the control character {found.group()!r}: leave it out")


def _routed(path: str, root: str) -> dict[str, Any]:
    """Returns the path with and without the root, whether or not the proxy in front removed it.
    Slashes at the end are ignored, and several in a row are one: base addresses often end with one.
    """
    path = "/" + "/".join(filter(None, path.split("/")))
    if root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :] or "/"
    return {"root_path": root, "path": root + path, "milepost.path": path}


EXPOSED = ("x-milepost-ignored", "x-request-id", "retry-after")


def with_cors(app: Any, config: ServerConfig) -> Any:
    """Returns the application with cross-origin requests allowed as configured. It wraps everything
    else: a browser's preflight request has no key, and its pages read errors too."""
    if not config.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods or (),
        allow_headers=config.allowed_headers or (),
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED,
    )
