"""Reads prompts and conversations, with their images, for an engine in this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from milepost.checks import check_unicode
from milepost.engine.loop import Engine
from milepost.engine.media import Embedded, MediaRules, images_in, images_of
from milepost.engine.options import ChatOptions, compose_options
from milepost.engine.prompts import (
    ChatMessages,
    Prompt,
    PromptLike,
    encoding,
    read_prompt,
    rendered_prompt,
)
from milepost.engine.text import chat
from milepost.errors import InvalidRequestError


class PromptReader:
    """Several threads may use one; their texts are tokenized one after the other, since not every
    tokenizer serves two threads at once."""

    def __init__(self, engine: Engine) -> None:
        self._tokenizer, self._config = engine.tokenizer, engine.config
        rules = MediaRules.of(engine.config)
        self._images = Embedded(engine.images, rules, engine.limits.max_images)
        self._tokenizing = threading.Lock()

    def plain(self, prompt: PromptLike, sizes: Mapping[str, Any] | None = None) -> Prompt:
        """Reads a prompt; `sizes` are its `mm_processor_kwargs` if it has none itself. Raises
        InvalidRequestError."""
        rest, images, own_sizes = images_in(prompt)
        media = self._images.prepare(images, sizes if own_sizes is None else own_sizes)
        with self._tokenizing:
            if media is not None:
                rest = media.into_plain(rest, encoding(self._tokenizer))
            found = read_prompt(rest, self._tokenizer)
        return found if media is None else media.put_in(found)

    def numbered(
        self, index: int, prompt: PromptLike, sizes: Mapping[str, Any] | None = None
    ) -> Prompt:
        """Reads a prompt of several, like `plain`. Raises InvalidRequestError, naming its index."""
        try:
            return self.plain(prompt, sizes)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompt {index}: {error}") from error

    def conversation(self, messages: ChatMessages, options: ChatOptions) -> Prompt:
        """Renders a conversation. Raises InvalidRequestError."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "chat needs a tokenizer, and skip_tokenizer_init=True loaded none"
            )
        plain, images = images_of(messages)
        media = self._images.prepare(images, options.get("mm_processor_kwargs"))
        given = {**compose_options(options), "image_texts": [] if media is None else media.texts}
        composed = chat.compose(tokenizer, plain, check=check_unicode, **given)
        with self._tokenizing:
            rendered = chat.tokenized(tokenizer, composed)
        most = self._config.max_cache_marks
        prompt = rendered_prompt(rendered, most, options.get("cache_salt"))
        return prompt if media is None else media.put_in(prompt)
