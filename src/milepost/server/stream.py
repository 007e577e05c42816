"""Sends events as they come, and notices clients that left or do not read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from milepost.errors import MilepostError
from milepost.server.errors import ClientGoneError, body_of, json_response, message_of

T = TypeVar("T")
Send = Callable[[Any], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
encoded = msgspec.json.Encoder().encode


def event(body: Any) -> bytes:
    """Returns a server-sent event with a JSON body."""
    return b"data: " + encoded(body) + b"\n\n"


def named_event(name: str, body: Any) -> bytes:
    """Returns a server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + event(body)


def _failure(error: Exception) -> bytes:
    return event(body_of(error))


class EventStream(Response):
    """A text/event-stream of `events`. A MilepostError becomes the last event.

    However it ends (the last event, a client that left or that reads nothing for
    `write_timeout_s`), the iterator is closed and `close` is called before it returns.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        *,
        write_timeout_s: float,
        failed: Callable[[Exception], bytes],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
        )
        self._events = events
        self._close = close
        self._failed = failed
        self._write_timeout_s = write_timeout_s
        self._writes_since: float | None = None

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        try:
            async with _until_gone(self._send_all(scope, send), receive) as (sending, leaving):
                await self._wait_for_any(sending, leaving)
                if sending.done():
                    await sending
                    return
                scope["milepost.record"]["client_gone"] = True
                scope["milepost.abort"]()
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]
            self._close()

    async def _wait_for_any(self, *tasks: asyncio.Future[None]) -> None:
        """Returns when a task is done, or a write has taken too long.

        Checks the clock from time to time: a timer per write would cost as much as the write.
        """
        while (left := self._time_left()) > 0 and not any(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _time_left(self) -> float:
        """Returns the seconds until the current write counts as stuck."""
        spent = 0.0 if self._writes_since is None else time.monotonic() - self._writes_since
        return self._write_timeout_s - spent

    async def _send_all(self, scope: Any, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await self._write(send, start)
        send = scope["milepost.send"]  # middleware only needs the start of a response
        try:
            async for chunk in self._events:
                await self._write(send, _body(chunk, more=True))
        except MilepostError as error:
            scope["milepost.record"]["error"] = message_of(error)
            await self._write(send, _body(self._failed(error), more=True))
        await self._write(send, _body(b"", more=False))

    async def _write(self, send: Send, message: Any) -> None:
        self._writes_since = time.monotonic()
        await send(message)
        self._writes_since = None


def _body(chunk: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": more}


class ResponseWriter(Protocol):
    """Writes one response."""

    id: str

    def events(self) -> AsyncIterator[bytes]: ...

    async def whole(self) -> dict[str, Any]: ...


async def send(
    writer: ResponseWriter,
    http: Request,
    close: Callable[[], None],
    *,
    is_stream: bool | None,
    failed: Callable[[Exception], bytes] = _failure,
) -> Response:
    """Returns the response of a writer, as a whole or as a stream. `close` is called at its end."""
    http.scope["milepost.record"]["id"] = writer.id
    if is_stream:
        limit_s = http.scope["milepost.write_timeout_s"]
        return EventStream(writer.events(), close, write_timeout_s=limit_s, failed=failed)
    try:
        return json_response(await writer.whole())
    finally:
        close()


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`, and cancels it if the client leaves. Raises ClientGoneError."""
    async with _until_gone(work, request.receive) as (working, leaving):
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            request.scope["milepost.record"]["client_gone"] = True
            raise ClientGoneError
        return await working


@asynccontextmanager
async def _until_gone(
    work: Awaitable[T], receive: Any
) -> AsyncIterator[tuple[asyncio.Future[T], asyncio.Future[None]]]:
    """Yields the running work, and a future that is done when the client has gone. Both are
    cancelled at the end."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        yield working, leaving
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Any) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
