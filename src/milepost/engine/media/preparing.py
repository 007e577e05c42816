"""Prepares the images and videos of requests in processes of their own, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from milepost.engine.media.facts import ImageFacts
from milepost.engine.media.given import Given
from milepost.engine.media.kept import KeptImages
from milepost.engine.media.prepared import Prepared, Unprepared, sources_of
from milepost.engine.media.process import PreparingProcess
from milepost.engine.media.urls import MediaRules, load
from milepost.errors import InvalidPromptError

NUM_PROCESSES = 2
MAX_LOADING = 32
"""Number of images that are fetched at a time."""


class Preparer:
    """Prepares images for one model. The images of a request together have fewer than `max_tokens`
    tokens. `close` it at the end."""

    def __init__(self, rules: MediaRules, max_tokens: int) -> None:
        self._rules = rules
        self._max_tokens = max_tokens
        self._kept: KeptImages[Prepared] = KeptImages()
        self._loading = asyncio.Semaphore(MAX_LOADING)
        self._all = [PreparingProcess() for _ in range(NUM_PROCESSES)]
        self._idle: asyncio.LifoQueue[PreparingProcess] = asyncio.LifoQueue()
        for each in self._all:
            self._idle.put_nowait(each)

    async def prepare(self, images: Sequence[Given], facts: ImageFacts) -> list[Prepared]:
        """Loads and prepares images of a request with these facts. Raises InvalidPromptError for an
        image that fails, and as soon as there are too many for one prompt."""
        tasks = [asyncio.ensure_future(self._prepare(each, facts)) for each in images]
        num_tokens = 0
        try:
            for done in asyncio.as_completed(tasks):
                num_tokens += (await done).num_tokens
                if num_tokens >= self._max_tokens:
                    raise InvalidPromptError(
                        f"images of {num_tokens} tokens or more, and max_model_len="
                        f"{self._max_tokens}: send fewer or smaller ones",
                        is_too_long=True,
                    )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks]

    async def _prepare(self, given: Given, facts: ImageFacts) -> Prepared:
        async with self._loading:
            loaded = [await load(each, self._rules) for each in sources_of(given)]
        asked = Unprepared.of(given, loaded, facts)
        key = await asyncio.to_thread(asked.find_key)
        if key is None:  # images of Pillow's have been decoded
            return await asyncio.to_thread(asked.prepared)
        found = self._kept.get(key)
        if found is not None:
            return found
        process = await self._idle.get()
        try:
            found = await process.prepare(asked)
        finally:
            self._idle.put_nowait(process)
        self._kept.put(key, found)
        return found

    async def close(self) -> None:
        for each in self._all:
            await each.close()
