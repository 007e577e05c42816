"""Prepares the images of requests in processes of their own, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from milepost.engine.media.expanding import expanded
from milepost.engine.media.facts import ImageFacts
from milepost.engine.media.given import Given
from milepost.engine.media.kept import KeptImages, key_of
from milepost.engine.media.process import PreparedPicture, PreparingProcess, Unprepared
from milepost.engine.media.urls import MediaRules, load
from milepost.engine.prompts import Prompt
from milepost.errors import InvalidPromptError

NUM_PROCESSES = 2
MAX_LOADING = 32
"""Number of images that are fetched at a time."""


class Preparer:
    """Prepares images for one model. The images of a request together have fewer than `max_tokens`
    tokens. `close` it at the end."""

    def __init__(self, facts: ImageFacts, rules: MediaRules, max_tokens: int) -> None:
        self.facts = facts
        self._rules = rules
        self._max_tokens = max_tokens
        self._kept = KeptImages()
        self._loading = asyncio.Semaphore(MAX_LOADING)
        self._all = [PreparingProcess() for _ in range(NUM_PROCESSES)]
        self._idle: asyncio.LifoQueue[PreparingProcess] = asyncio.LifoQueue()
        for each in self._all:
            self._idle.put_nowait(each)

    async def prepare(self, images: Sequence[Given]) -> list[PreparedPicture]:
        """Loads and prepares images. Raises InvalidPromptError for an image that fails, and as soon
        as they are too many for one prompt."""
        tasks = [asyncio.ensure_future(self._prepare(each)) for each in images]
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
        key = key_of(data, max_pixels)
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
