"""Follows HTTP/1 where uvicorn does not: checks heads, sends no chunks to clients of HTTP/1.0,
answers clients that closed their side of the connection, closes connections so that clients which
are still sending can read their answer, and drops clients that read none."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from milepost.server.errors import HttpError

MAX_HEAD_BYTES = 2**16
"""Limit of a request line with its headers. The framing of a chunked body may take as much again,
and as much as the body itself."""


def problem_of(
    version: str, url: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> HttpError | None:
    """Returns the error of a head that cannot be served, although the parser accepts it."""
    if len(url) + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES:
        return head_too_large()
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        return HttpError(400, f"{len(hosts)} Host headers: HTTP/1.1 needs one (RFC 9112)")
    # Bodies that are not in chunks at last are refused by the parser. Of others it would take the
    # chunks for the body.
    given = [value.strip() for name, value in headers if name == b"transfer-encoding"]
    codings = b", ".join(given).lower()
    if codings != b"chunked" and codings.endswith(b"chunked"):
        named = codings[:100].decode("latin-1")
        return HttpError(501, f"transfer-encoding {named!r}: use chunked alone")
    return None


def head_too_large() -> HttpError:
    return HttpError(431, f"the headers have more than {MAX_HEAD_BYTES} bytes")


GONE = {"type": "http.disconnect"}


def until_half_closed(
    app: Any, cycle: RequestResponseCycle, is_half_closed: Callable[[], bool]
) -> Any:
    """Wraps the application so that a request whose client closed its side of the connection is
    told that the client left, although the answer can still be sent."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def received() -> Any:
            message: Any = GONE
            if cycle.body or not is_half_closed():
                message = await receive()
            return GONE if is_half_closed() and not message.get("body") else message

        await app(scope, received, send)

    return answer


def without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """Wraps the application for a client of HTTP/1.0, which knows no chunks: a body without a
    declared length ends with the connection."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        has_length = False

        async def unframed(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding = False
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, unframed)

    return answer


class Lingering:
    """A transport for clients that may still be sending when it is closed.

    A socket that is closed with unread bytes is reset, and the reset may reach the client before it
    has read its answer. So such a connection is read for a while longer (RFC 9112, section 9.6).
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        is_receiving: Callable[[], bool],
        linger: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._is_receiving, self._linger = is_receiving, linger
        self._is_finished = False
        self.write, self.abort = transport.write, transport.abort

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._is_finished or self._transport.is_closing()

    def close(self) -> None:
        """Closes at once, or after a while if the client is still sending."""
        if self._is_receiving() and not self.is_closing():
            self._linger()
        else:
            self._transport.close()

    def finish(self) -> None:
        """Lets nothing more be written."""
        self._is_finished = True
        if self._transport.can_write_eof():
            self._transport.write_eof()


class ReaderWatch:
    """Drops a client that reads nothing of its pending output for `limit_s`. That output was
    written at once, so it only shrinks while the client reads."""

    def __init__(self, transport: asyncio.Transport, limit_s: float) -> None:
        self._transport, self._limit_s = transport, limit_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self, num_left: float = math.inf) -> None:
        before, num_left = num_left, self._transport.get_write_buffer_size()
        if num_left >= before:
            self._transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limit_s, self.start, num_left)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
