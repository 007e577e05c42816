"""Images of chat requests: found in the messages, prepared apart, put into the rendered prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from milepost.engine.media import Given, ImageFacts, MediaRules, Preparer, expand, images_of
from milepost.engine.processes import EngineClient
from milepost.engine.text import ChatPrompt
from milepost.engine.validation import check_num_images


class ChatImages:
    """Prepares the images of chats for a client's engine. `close` it at the end."""

    def __init__(self, client: EngineClient) -> None:
        self._max_images = client.limits.max_images
        self._facts: ImageFacts | None = client.info.images
        self._preparer: Preparer | None = None
        if self._facts is not None:
            self._preparer = Preparer(
                self._facts, MediaRules.of(client.config), client.limits.max_model_len
            )

    @property
    def text(self) -> str:
        """The text that stands for an image in a rendered conversation."""
        return self._facts.text if self._facts is not None else ""

    def of(self, messages: Sequence[Any]) -> tuple[Sequence[Any], list[Given]]:
        """Returns messages without their images, and those. Raises InvalidPromptError for more than
        a prompt may have."""
        told, images = images_of(messages)
        check_num_images(len(images), self._max_images)
        return told, images

    async def put_in(self, prompt: ChatPrompt, images: Sequence[Given]) -> ChatPrompt:
        """Returns a rendered conversation with its images. Raises InvalidPromptError."""
        if not images:
            return prompt
        assert self._preparer is not None, "images are refused without a tower"
        prepared = await self._preparer.prepare(images)
        found = expand(prompt.token_ids, prepared, self._preparer.facts.token_id)
        return replace(
            prompt,
            token_ids=found.token_ids,
            marks=tuple(map(found.moved, prompt.marks)),
            breakpoints=tuple(map(found.moved, prompt.breakpoints)),
            pictures=found.pictures,
            pixels=found.pixels,
        )

    async def close(self) -> None:
        """Ends the processes that prepare images."""
        if self._preparer is not None:
            await self._preparer.close()
