"""Prepares the images and videos of requests: a `Preparer` in processes of their own, a few at a
time, and an `Embedded` in the process that asks, without an event loop.

An agent sends all screenshots of its conversation again with every turn, so both remember images:
each is decoded once, and its pixels go to the engine once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from milepost.config import EngineConfig
from milepost.engine.media.facts import ImageFacts
from milepost.engine.media.filling import Media, facts_to_prepare
from milepost.engine.media.given import Given
from milepost.engine.media.prepared import Prepared, Unprepared, sources_of
from milepost.engine.media.process import PreparingProcess
from milepost.engine.media.urls import MediaRules, is_remote, load, load_here
from milepost.engine.validation import Limits
from milepost.errors import InvalidPromptError

NUM_PROCESSES = 2
MAX_LOADING = 32
"""Number of images that are fetched at a time."""


class Preparer:
    """Prepares images and videos for one model. `facts` is None if it takes none. The images of a
    request together have fewer than `max_tokens` tokens. `close` it at the end."""

    def __init__(
        self, facts: ImageFacts | None, rules: MediaRules, *, max_images: int, max_tokens: int
    ) -> None:
        self._facts = facts
        self._rules = rules
        self._max_images = max_images
        self._max_tokens = max_tokens
        self._kept: KeptImages[Prepared] = KeptImages()
        self._loading = asyncio.Semaphore(MAX_LOADING)
        self._all = [PreparingProcess() for _ in range(NUM_PROCESSES)]
        self._idle: asyncio.LifoQueue[PreparingProcess] = asyncio.LifoQueue()
        for each in self._all:
            self._idle.put_nowait(each)

    @staticmethod
    def of(config: EngineConfig, facts: ImageFacts | None, limits: Limits) -> Preparer:
        """Returns one for an engine with this configuration and these limits."""
        return Preparer(
            facts,
            MediaRules.of(config),
            max_images=limits.max_images,
            max_tokens=limits.max_model_len,
        )

    async def prepare(self, given: Sequence[Given], kwargs: object = None) -> Media | None:
        """Returns images and videos for a prompt with these `mm_processor_kwargs`; None if there
        are none. Raises InvalidRequestError, also for an image that fails, and as soon as there are
        too many for one prompt."""
        facts = facts_to_prepare(self._facts, given, kwargs, self._max_images)
        if facts is None:
            return None
        tasks = [asyncio.ensure_future(self._prepare(each, facts)) for each in given]
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
        return Media(facts, [task.result() for task in tasks])

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


class Embedded:
    """Prepares images and videos for an engine in this process. `facts` is None if it takes
    none."""

    def __init__(self, facts: ImageFacts | None, rules: MediaRules, max_images: int) -> None:
        self._facts = facts
        self._rules = rules
        self._kept: KeptImages[Prepared] = KeptImages()
        self._max_images = max_images

    def prepare(self, given: Sequence[Given], kwargs: Any = None) -> Media | None:
        """Returns images and videos for a prompt with these `mm_processor_kwargs`; None if there
        are none. Raises InvalidRequestError."""
        facts = facts_to_prepare(self._facts, given, kwargs, self._max_images)
        if facts is None:
            return None
        return Media(facts, [self._prepare(each, facts) for each in given])

    def _prepare(self, given: Given, facts: ImageFacts) -> Prepared:
        loaded = [self._load(each) for each in sources_of(given)]
        asked = Unprepared.of(given, loaded, facts)
        key = asked.find_key()
        if key is None:
            return asked.prepared()
        found = self._kept.get(key)
        if found is None:
            found = asked.prepared()
            self._kept.put(key, found)
        return found

    def _load(self, given: Given) -> Any:
        if not is_remote(given):
            return load_here(given, self._rules)
        # The caller's thread may run an event loop already.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, load(given, self._rules)).result()


class Sized(Protocol):
    """An image of that many bytes."""

    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=Sized)

MAX_BYTES = 2**30
"""Number of bytes of prepared images to keep."""


class KeptImages(Generic[T]):
    """Images by key, the ones used last, up to a number of bytes. The same calls in the same order
    keep the same images. Several threads may use one."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._images: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> T | None:
        """Returns an image, if it is kept."""
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def put(self, key: bytes, image: T) -> None:
        """Keeps an image, and forgets those that were not used for longest."""
        with self._lock:
            if key in self._images:
                return
            self._images[key] = image
            self.num_bytes += image.num_bytes
            while self.num_bytes > self._max_bytes:
                _, old = self._images.popitem(last=False)
                self.num_bytes -= old.num_bytes
