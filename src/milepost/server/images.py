"""Images and videos of chat requests: prepared apart, and put into the rendered prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from milepost.engine.media import (
    Given,
    ImageFacts,
    Media,
    MediaRules,
    Preparer,
    check_media,
    facts_for,
)
from milepost.engine.processes import EngineClient
from milepost.engine.text import ChatPrompt


class ChatImages:
    """Prepares the images and videos of chats for a client's engine. `close` it at the end."""

    def __init__(self, client: EngineClient) -> None:
        self._max_images = client.limits.max_images
        self._facts: ImageFacts | None = client.info.images
        self._preparer: Preparer | None = None
        if self._facts is not None:
            rules = MediaRules.of(client.config)
            self._preparer = Preparer(rules, client.limits.max_model_len)

    async def prepare(
        self, given: Sequence[Given], kwargs: Mapping[str, Any] | None
    ) -> Media | None:
        """Returns images and videos as a prompt with these `mm_processor_kwargs` has them; None if
        there are none. Raises InvalidRequestError."""
        facts = facts_for(self._facts, kwargs)
        check_media(given, facts, self._max_images)
        if not given or facts is None:
            return None
        assert self._preparer is not None, "a model with facts has one"
        return Media(facts, await self._preparer.prepare(given, facts))

    async def close(self) -> None:
        """Ends the processes that prepare images."""
        if self._preparer is not None:
            await self._preparer.close()


def put_in(prompt: ChatPrompt, media: Media) -> ChatPrompt:
    """Returns a rendered conversation with its images and videos. Raises InvalidPromptError."""
    found = media.into(prompt.token_ids)
    return replace(
        prompt,
        token_ids=found.token_ids,
        marks=tuple(map(found.moved, prompt.marks)),
        breakpoints=tuple(map(found.moved, prompt.breakpoints)),
        pictures=found.pictures,
        pixels=found.pixels,
    )
