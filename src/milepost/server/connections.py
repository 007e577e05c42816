"""Limits on connections before a request is known: bytes of headers, time, number.

uvicorn's own protocol limits none of these. This one does, and raises the limit of open files to
what the system allows.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from milepost.errors import ConfigError
from milepost.server import http1
from milepost.server.errors import HttpError, body_of, json_response
from milepost.server.http1 import Lingering, ReaderWatch

logger = logging.getLogger(__name__)

MAX_PIPELINED = 32
"""Requests that a client may send ahead on one connection."""
LINGER_S = 5.0
LINGER_BYTES = 2**24
"""Limits in seconds and bytes on what a client may go on sending after it was refused."""
RESERVED_FILES = 64
"""Descriptors reserved for other uses than connections."""
FEW_FILES = 256
"""Limit of open files below which the log says that it limits connections."""


@dataclass(slots=True, kw_only=True, eq=False)
class Incoming:
    """Tells the gate how far a request has arrived."""

    is_whole: bool = False
    """Whether the whole body has arrived."""
    problem: HttpError | None = None
    """The error for which the rest of the body cannot be read."""
    abort: Callable[[], None] = lambda: None
    """Drops the connection at once."""


def raise_file_limit() -> int:
    """Raises this process's limit of open files, and returns the limit. Raises ConfigError if it
    leaves no connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.warning("the limit of open files stays at %d: %s", soft, error)
            wanted = soft
    if wanted <= RESERVED_FILES:
        raise ConfigError(
            f"open files: {wanted}, and a server needs more than {RESERVED_FILES} beside its "
            f"connections: raise `ulimit -n` to {FEW_FILES} or more"
        )
    logger.info("open files: %d", wanted)
    if wanted < FEW_FILES:
        logger.warning("open files: %d; other connections get 503: raise `ulimit -n`", wanted)
    return wanted


def protocol(
    *, max_connections: int, head_timeout_s: float, write_timeout_s: float = 30.0
) -> type[HttpToolsProtocol]:
    """Returns uvicorn's protocol within these limits."""
    options = {"max_connections": max_connections, "head_timeout_s": head_timeout_s}
    options["write_timeout_s"] = write_timeout_s
    return type("BoundedProtocol", (_BoundedProtocol,), options)


class _BoundedProtocol(HttpToolsProtocol):
    max_connections: int
    head_timeout_s: float
    write_timeout_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        closing = self._lingering = Lingering(transport, self._is_receiving, self._linger)
        self._watch = ReaderWatch(transport, self.write_timeout_s)
        super().connection_made(closing)  # type: ignore[arg-type]
        self._head_bytes = 0
        self._body_bytes = 0
        self._left_bytes = LINGER_BYTES
        self._incoming = Incoming(is_whole=True)
        self._refusal: HttpError | None = None
        self._is_broken = False
        self._is_body_alone = self._is_half_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        if len(self.connections) > self.max_connections:
            message = f"{self.max_connections} connections are open: try again later"
            self._answer(HttpError(503, message))
            transport.close()
            return
        self._wait_for_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._watch.stop()
        self._incoming.is_whole = True
        self.pipeline.clear()
        super().connection_lost(exc)  # tells the request that arrived last
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection of a client that closed its side of it, as `nc -N` does, until its
        requests are answered. Requests that generate are aborted, since a client that left looks
        the same. TLS closes both sides at once."""
        if self.cycle is None or self.cycle.response_complete or self._is_receiving():
            return False
        if self._is_broken or self.scheme == "https":
            return False
        self._is_half_closed = True
        if self._running is not None:
            self._running.message_event.set()
        self.cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        if self._is_broken or self.transport.is_closing():
            self._drop(data)
            return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._head_bytes - self._body_bytes > http1.MAX_HEAD_BYTES + self._body_bytes:
            self._break(http1.head_too_large())
        elif len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))

    def _stay(self, data: bytes) -> None:
        """Reads on in HTTP/1.1 after a request for another protocol, such as Java's client sends
        (`Upgrade: h2c`). The parser stops at the end of its head, so another one reads the rest."""
        framing = (b"content-length", b"transfer-encoding")
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] in framing]
        self.parser = httptools.HttpRequestParser(self)
        self._is_body_alone = True
        self._feed(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(lines))
        self._is_body_alone = False
        if not self._is_broken:
            self._feed(data)

    def on_message_begin(self) -> None:
        if not self._is_body_alone:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_body_alone:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_body_alone:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_body_alone:
            return
        self._stop_waiting()
        self._head_bytes = self._body_bytes = 0
        self._check_head()
        incoming = Incoming(abort=self.transport.abort)
        self.scope["milepost.incoming"] = incoming  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._incoming = incoming

    def _check_head(self) -> None:
        """Refuses a head that cannot be served; any exception ends the parser."""
        problem = http1.problem_of(self.parser.get_http_version(), self.url, self.headers)
        if problem is not None:
            self._break(problem)
            raise ValueError(problem.detail)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        app = http1.until_half_closed(app, cycle, lambda: self._is_half_closed)
        if cycle.scope["http_version"] == "1.0":
            app = http1.without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else the body is still to be read
            self._incoming.is_whole = True
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            if self._refusal is not None:
                self._refuse(self._refusal)
            elif not self._incoming.is_whole:
                self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's is shorter
        self._break(
            HttpError(400, "this is not valid HTTP: check headers, lengths and chunk sizes")
        )

    # --- what cannot be read on -------------------------------------------------------------------

    def _break(self, error: HttpError) -> None:
        """Stops reading. The client is told in the response to the request that was arriving, or
        else after the requests before it are answered."""
        if self._is_broken:
            return
        self._is_broken = True
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(error)
        elif self._is_receiving():
            self._incoming.problem = error
            self.cycle.message_event.set()
        else:
            self._refusal = error

    def _refuse(self, error: HttpError) -> None:
        """Answers outside of any request, and closes."""
        self._stop_waiting()
        if not self.transport.is_closing():
            self._answer(error)
            self._linger()

    def _answer(self, error: HttpError) -> None:
        status = error.status_code
        body = json_response(body_of(error)).body
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        head += "content-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + bytes(body))
        logger.info("a connection is closed: %s", error.detail)

    def _drop(self, data: bytes) -> None:
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            self.transport.abort()

    # --- time -------------------------------------------------------------------------------------

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """Refuses a head that took too long. A connection that sent nothing is closed without an
        answer, as after the last response."""
        if not self._head_bytes:
            self.transport.close()
            return
        limit = self.head_timeout_s
        self._refuse(HttpError(408, f"the headers did not arrive within {limit:g} seconds"))

    def _is_receiving(self) -> bool:
        """Returns whether a request's body is still arriving."""
        return not self._incoming.is_whole

    def _linger(self) -> None:
        """Closes once the client has had time to read its answer."""
        self._stop_waiting()
        self._lingering.finish()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)
