"""Prepares the images and videos of prompts in the process that asks for them, without an event
loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from milepost.engine.media.facts import ImageFacts
from milepost.engine.media.filling import Media, check_media
from milepost.engine.media.given import Given
from milepost.engine.media.kept import KeptImages
from milepost.engine.media.prepared import Prepared, Unprepared, sources_of
from milepost.engine.media.requested import facts_for
from milepost.engine.media.urls import MediaRules, is_remote, load, load_here


class Embedded:
    """Prepares images and videos for an engine in this process. `facts` is None if it takes
    none."""

    def __init__(self, facts: ImageFacts | None, rules: MediaRules, max_images: int) -> None:
        self._facts = facts
        self._rules = rules
        self._kept: KeptImages[Prepared] = KeptImages()
        self._max_images = max_images if facts is not None else 0

    def prepare(self, given: Sequence[Given], kwargs: Any = None) -> Media | None:
        """Returns images and videos for a prompt with these `mm_processor_kwargs`; None if there
        are none. Raises InvalidRequestError."""
        facts = facts_for(self._facts, kwargs)
        check_media(given, facts, self._max_images)
        if facts is None or not given:
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
