"""Limits on connections before a request is known: bytes of headers, time, number.

uvicorn's own protocol limits none of these. Here the size of a head, the time it may take and the
number of connections are limited, and the limit of open files is raised to what the system allows.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from milepost.server.errors import HttpError, body_of, json_response

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 2**16
"""Of a request line with its headers; what frames a body in chunks may take so much more, and as
much as the body itself."""
MAX_PIPELINED = 32
"""Requests that a client may send ahead on one connection."""
RESERVED_FILES = 64
"""Descriptors for what is no connection."""


def raise_file_limit() -> int:
    """Raise the number of files that this process may have open; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.warning("the limit of open files stays at %d: %s", soft, error)
            return soft
    logger.info("open files: %d", wanted)
    return wanted


def protocol(*, max_connections: int, head_timeout_s: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol within these bounds."""
    options = {"max_connections": max_connections, "head_timeout_s": head_timeout_s}
    return type("BoundedProtocol", (_BoundedProtocol,), options)


class _BoundedProtocol(HttpToolsProtocol):
    max_connections: int
    head_timeout_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._body_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            self._refuse(503, f"{self.max_connections} connections are open: try again later")
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes - self._body_bytes > MAX_HEAD_BYTES + self._body_bytes:
            self._refuse(431, f"the headers have more than {MAX_HEAD_BYTES} bytes")
        elif len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._head_bytes = self._body_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """One that has sent nothing is closed without a word, as after the last response."""
        if self._head_bytes:
            limit = self.head_timeout_s
            self._refuse(408, f"the headers were not there within {limit:g} seconds")
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer outside of any request, and close."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = json_response(body_of(HttpError(status, message))).body
            head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + bytes(body))
        logger.info("a connection is closed: %s", message)
        self.transport.close()


_REASONS: dict[int, Any] = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
