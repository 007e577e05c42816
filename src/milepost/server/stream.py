"""Sends events as they come, and notices clients that left or do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from milepost.errors import MilepostError
from milepost.server.errors import body_of, message_of

T = TypeVar("T")
Send = Callable[[Any], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()


class ClientGoneError(Exception):
    """Nobody waits for the response any more."""


def event(body: Any) -> bytes:
    """A server-sent event with a JSON body."""
    return b"data: " + _ENCODER.encode(body) + b"\n\n"


class EventStream(Response):
    """A text/event-stream of `events`. An error of ours on the way becomes the last event.

    Whatever ends it (the last event, a client that left, one that reads nothing for
    `write_timeout_s`), the iterator is closed and `close` is called before it returns.
    """

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], *, write_timeout_s: float
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
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(scope, send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                scope["milepost.record"]["client_gone"] = True
                return
            await sending
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._events.aclose()  # type: ignore[attr-defined]
            self._close()

    async def _send_all(self, scope: Any, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await self._write(send, start)
            try:
                async for chunk in self._events:
                    await self._write(send, _body(chunk, more=True))
            except MilepostError as error:
                scope["milepost.record"]["error"] = message_of(error)
                await self._write(send, _body(event(body_of(error)), more=True))
            await self._write(send, _body(b"", more=False))
        except TimeoutError:
            scope["milepost.record"]["client_gone"] = True
            scope["milepost.abort"]()

    async def _write(self, send: Send, message: Any) -> None:
        """Raises TimeoutError if the client's side stays full."""
        async with asyncio.timeout(self._write_timeout_s):
            await send(message)


def _body(chunk: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": more}


async def unless_disconnected(request: Request, work: Awaitable[T], close: Callable[[], None]) -> T:
    """The result of `work`, which is cancelled if the client leaves. Raises ClientGoneError.

    `close` is called before it returns.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            request.scope["milepost.record"]["client_gone"] = True
            raise ClientGoneError
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        close()


async def _disconnect(receive: Any) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
