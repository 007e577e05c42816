"""A server without a socket, in a process of its own with its engine beside it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from milepost.cache.tree import Chain
from milepost.config import EngineConfig
from milepost.engine.processes import EngineClient
from milepost.errors import MilepostError
from milepost.kv_config import KVEventsConfig
from milepost.ray.router import Wanted
from milepost.server import app as http
from milepost.server.config import ServerConfig
from milepost.server.errors import HttpError
from milepost.server.loading import load
from milepost.server.rendering import prompt_of
from milepost.server.service import Service
from milepost.zeromq import bound

EVENT_BYTES = 2**26
"""Largest number of bytes of a message from the replica's own engine, which names at most about
2,048 pages with their tokens.
"""
KEY_BYTES = 8
"""Bytes of a page's digest that the router compares."""


class Replica:
    """A server without a socket."""

    async def _begin(self, options: Mapping[str, Any]) -> None:
        self._open = contextlib.AsyncExitStack()
        """Resources opened so far. Ray may end a replica at any time, even while it loads."""
        folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="milepost-"))
        endpoint = f"ipc://{Path(folder) / 'events'}"
        events = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, hashes="bytes")
        config = ServerConfig(access_log=False, ui=False)
        engine = EngineConfig(**options, kv_events_config=events)
        self._client = EngineClient(engine, max_waiting=config.max_waiting)
        self._open.push_async_callback(self._client.close)
        context = zmq.asyncio.Context()
        self._open.callback(context.term)
        self._socket = bound(context.socket(zmq.SUB), max_bytes=EVENT_BYTES, max_queued=1)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # a missed event is missed for good
        self._open.callback(self._socket.close, linger=0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._service: Service = await load(config, engine, self._client)
        self._open.push_async_callback(self._service.close)
        self._app = http.build(self._service)
        self._pages: dict[str, set[bytes]] = {}
        self._begun: set[str] = set()
        """Requests whose answers have begun and are not over."""
        self._open.callback(asyncio.create_task(self._follow()).cancel)

    __init__: Any = _begin
    """Ray awaits it."""

    async def look(self, path: str, body: bytes) -> Wanted:
        """Returns a request as the router sees it, as far as it is known."""
        try:
            prompt = await prompt_of(self._service, path, body)
        except (ValueError, MilepostError, HttpError):
            return Wanted()  # the replica that serves it reports the error
        if prompt is None:
            return Wanted(uuid.uuid4().hex)
        info = self._client.info
        chain = Chain(
            prompt.token_ids, info.page_size, prompt.cache_salt, info.identity, prompt.pictures
        )
        keys = tuple(digest[:KEY_BYTES] for digest in chain.full_digests())
        return Wanted(uuid.uuid4().hex, keys, len(prompt.token_ids), info.page_size)

    async def ask(
        self, scope: dict[str, Any], body: bytes, asked: Wanted | None = None
    ) -> AsyncIterator[Any]:
        """Yields status and headers of the response, then its body piece by piece."""
        number = asked.number if asked is not None else ""
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        received, gone = [{"type": "http.request", "body": body}], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app({**scope, "app": None}, receive, sent.put)
            finally:
                await sent.put(None)

        serving = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message.get("body"):
                    self._begun.add(number)
                    yield bytes(message["body"])
            await serving
        finally:
            self._begun.discard(number)
            gone.set()
            await asyncio.wait([serving])

    def record_routing_stats(self) -> dict[str, Any]:
        pages = frozenset().union(*self._pages.values())
        return {"pages": pages, "begun": frozenset(self._begun)}

    async def check_health(self) -> None:
        if self._client.death is not None:
            raise RuntimeError(self._client.death)

    async def __del__(self) -> None:
        await self._open.aclose()

    async def _follow(self) -> None:
        """Follows the events that say which pages a checkpoint makes usable."""
        while True:
            _, _, payload = await self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "AllBlocksCleared":
                    self._pages.clear()
                    continue
                keys = {key[:KEY_BYTES] for key in event["block_hashes"]}
                there = self._pages.setdefault(event["medium"], set())
                if event["type"] == "BlockStored":
                    there |= keys
                else:
                    there -= keys
