"""Prepares the images of prompts in the process that asks for them, without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from milepost.engine.media.expanding import expanded
from milepost.engine.media.facts import ImageFacts
from milepost.engine.media.given import Given
from milepost.engine.media.kept import KeptImages, key_of
from milepost.engine.media.process import PreparedPicture
from milepost.engine.media.urls import MediaRules, is_remote, load, load_here
from milepost.engine.prompts import Prompt
from milepost.engine.validation import check_num_images


class Embedded:
    """Puts images into prompts for an engine in this process. `facts` is None if it takes no
    images."""

    def __init__(self, facts: ImageFacts | None, rules: MediaRules, max_images: int) -> None:
        self.text = facts.text if facts is not None else ""
        self._facts = facts
        self._rules = rules
        self._kept = KeptImages()
        self._max_images = max_images if facts is not None else 0

    def check(self, images: Sequence[Given]) -> None:
        """Raises InvalidPromptError for more images than a prompt may have."""
        check_num_images(len(images), self._max_images)

    def put_in(self, prompt: Prompt, images: Sequence[Given]) -> Prompt:
        """Returns the prompt with its images. Raises InvalidPromptError."""
        self.check(images)
        if self._facts is None or not images:
            return prompt
        return expanded(prompt, [self._prepare(each) for each in images], self._facts.token_id)

    def _prepare(self, given: Given) -> PreparedPicture:
        assert self._facts is not None, "images are refused before"
        if is_remote(given):
            # The caller's thread may run an event loop already.
            with ThreadPoolExecutor(1) as thread:
                data = thread.submit(asyncio.run, load(given, self._rules)).result()
        else:
            data = load_here(given, self._rules)
        max_pixels = self._facts.low_pixels if given.is_low else None
        if not isinstance(data, bytes):
            return PreparedPicture.of(data, self._facts.settings, max_pixels)
        found = self._kept.get(key := key_of(data, max_pixels))
        if found is None:
            found = PreparedPicture.of(data, self._facts.settings, max_pixels)
            self._kept.put(key, found)
        return found
