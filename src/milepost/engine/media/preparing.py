"""Prepares the images of requests, a few at a time, and remembers what it has prepared.

An agent sends all screenshots of its conversation again with every turn. Each is decoded once: what
came of it is kept by a hash of its bytes, the ones used last, up to a number of bytes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from milepost.engine.media.expanding import expanded
from milepost.engine.media.facts import ImageFacts
from milepost.engine.media.given import Given
from milepost.engine.media.process import PreparedPicture, PreparingProcess, Unprepared
from milepost.engine.media.urls import MediaRules, load
from milepost.engine.prompts import Prompt

NUM_PROCESSES = 2
MAX_LOADING = 32
"""Images that are fetched at a time."""
MAX_BYTES = 2**30
"""Bytes of prepared images that are kept."""


@dataclass(slots=True)
class _Kept:
    """Prepared images by what they were made of."""

    max_bytes: int
    num_bytes: int = 0
    images: OrderedDict[bytes, PreparedPicture] = field(default_factory=OrderedDict)

    def get(self, key: bytes) -> PreparedPicture | None:
        if key in self.images:
            self.images.move_to_end(key)
        return self.images.get(key)

    def put(self, key: bytes, image: PreparedPicture) -> None:
        if key in self.images:
            return
        self.images[key] = image
        self.num_bytes += len(image.record.rows)
        while self.num_bytes > self.max_bytes:
            _, old = self.images.popitem(last=False)
            self.num_bytes -= len(old.record.rows)


class Preparer:
    """For one model. `close` it at the end."""

    def __init__(self, facts: ImageFacts, rules: MediaRules, *, max_bytes: int = MAX_BYTES) -> None:
        self.facts = facts
        self._rules = rules
        self._kept = _Kept(max_bytes)
        self._loading = asyncio.Semaphore(MAX_LOADING)
        self._all = [PreparingProcess() for _ in range(NUM_PROCESSES)]
        self._idle: asyncio.LifoQueue[PreparingProcess] = asyncio.LifoQueue()
        for each in self._all:
            self._idle.put_nowait(each)

    async def prepare(self, images: Sequence[Given]) -> list[PreparedPicture]:
        """Loads and prepares images. Raises InvalidPromptError, naming the first that fails."""
        tasks = [asyncio.ensure_future(self._prepare(each)) for each in images]
        try:
            found: list[PreparedPicture] = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return found

    async def put_in(self, prompt: Prompt, images: Sequence[Given]) -> Prompt:
        """Returns the prompt with its images. Raises InvalidPromptError."""
        return expanded(prompt, await self.prepare(images), self.facts.token_id)

    async def _prepare(self, given: Given) -> PreparedPicture:
        max_pixels = self.facts.low_pixels if given.is_low else None
        async with self._loading:
            data = await load(given, self._rules)
        if not isinstance(data, bytes):  # an image of Pillow's has been decoded
            make = partial(PreparedPicture.of, data, self.facts.settings, max_pixels)
            return await asyncio.to_thread(make)
        key = blake2b(data, digest_size=32, salt=b"low" if given.is_low else b"").digest()
        found = self._kept.get(key)
        if found is not None:
            return found
        process = await self._idle.get()
        try:
            found = await process.prepare(Unprepared(data, self.facts.settings, max_pixels))
        finally:
            self._idle.put_nowait(process)
        self._kept.put(key, found)
        return found

    async def close(self) -> None:
        for each in self._all:
            await each.close()
