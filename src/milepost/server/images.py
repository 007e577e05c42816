"""Images and videos of chat requests: prepared apart, and put into the rendered prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from milepost.engine.media import Given, ImageFacts, Media, MediaRules, Preparer, check_media
from milepost.engine.processes import EngineClient
from milepost.engine.text import ChatPrompt


class ChatImages:
    """Prepares the images and videos of chats for a client's engine. `close` it at the end."""

    def __init__(self, client: EngineClient) -> None:
        self._max_images = client.limits.max_images
        self._facts: ImageFacts | None = client.info.images
        self._preparer: Preparer | None = None
        if self._facts is not None:
            self._preparer = Preparer(
                self._facts, MediaRules.of(client.config), client.limits.max_model_len
            )

    async def prepare(self, given: Sequence[Given]) -> Media | None:
        """Returns images and videos as a prompt has them; None if there are none. Raises
        InvalidPromptError."""
        check_media(given, self._facts, self._max_images)
        if not given or self._facts is None:
            return None
        assert self._preparer is not None, "a model with facts has one"
        return Media(self._facts, await self._preparer.prepare(given))

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
