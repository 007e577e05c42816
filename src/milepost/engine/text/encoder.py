"""Tokenizes texts and conversations, and does everything else that needs a tokenizer.

Work runs in threads, and for conversations and long texts in processes (`process`). A text that
is certainly too long for the model is refused before it is tokenized.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from milepost.engine import heap
from milepost.engine.prompts import Prompt
from milepost.engine.text import chat
from milepost.engine.text.conversations import Unrendered, content_of
from milepost.engine.text.lanes import MAX_SHORT, Lanes
from milepost.engine.text.lengths import FewestTokens
from milepost.engine.text.process import Encoded, Text, Texts
from milepost.errors import InvalidPromptError, InvalidRequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

GIVE_BACK_S = 1.0
"""Delay after a long text until free memory is returned to the system."""
MAX_GROWTH, MAX_ADDED = 4, 2**24
"""A chat template may write this many characters for each character of the conversation, plus a
constant."""


class Encoder:
    """A model's tokenizer, if it has one, for all requests."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        max_model_len: int,
        *,
        special: re.Pattern[str] | None = None,
        template_timeout_s: float = 10.0,
    ) -> None:
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._special = special
        self._template_timeout_s = template_timeout_s
        self._lanes = Lanes(tokenizer, None if special is None else special.pattern)
        self._fewest_tokens: FewestTokens | None = None
        self._giving_back: asyncio.TimerHandle | None = None
        self._starting: asyncio.Future[None] | None = None

    async def with_tokenizer(
        self, work: Callable[[PreTrainedTokenizerBase], T], size: int = 0
    ) -> T:
        """Runs `work` in a thread with a tokenizer; `size` is the length of its text. Raises
        InvalidRequestError for bad text."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "there is no tokenizer (--skip-tokenizer-init): use token ids"
            )
        try:
            return await self._lanes.run(work, size)
        except UnicodeError as error:
            raise _no_unicode(error) from error
        finally:
            if size > MAX_SHORT:
                self._give_back_soon()

    async def encode(
        self, texts: Sequence[str], *, is_cut: bool, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Returns token ids of texts. A text may be longer than the model accepts only if it is cut
        later (`is_cut`). Raises InvalidRequestError."""

        def here(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
            encode = partial(tokenizer.encode, add_special_tokens=add_special_tokens)
            return [list(encode(text)) for text in texts]

        size = sum(map(len, texts))
        result = await self._encode_here(here, texts, size, is_cut=is_cut)
        if result is not None:
            return result
        encoded = await self._encode_in_process(
            [Text(text) for text in texts], is_cut=is_cut, add_special_tokens=add_special_tokens
        )
        return [one.token_ids for one in encoded]

    async def _encode_here(
        self,
        work: Callable[[PreTrainedTokenizerBase], T],
        texts: Sequence[str],
        size: int,
        *,
        is_cut: bool,
    ) -> T | None:
        """Returns the result of `work` in a thread, or None for texts that are encoded in another
        process. Checks their lengths unless they are cut later."""
        is_apart = size > MAX_SHORT and self._lanes.can_be_stopped

        def checked(tokenizer: PreTrainedTokenizerBase) -> T | None:
            for text in () if is_cut else texts:
                self.check(text)
            return None if is_apart else work(tokenizer)

        return await self.with_tokenizer(checked, size)

    def start(self) -> None:
        """Starts the process that renders conversations in the background; otherwise the first
        conversation waits a second for it."""
        if self.tokenizer is not None and self._lanes.can_render:
            self._starting = asyncio.ensure_future(self._render_one())

    async def _render_one(self) -> None:
        with contextlib.suppress(InvalidRequestError):
            await self.encode_chat([{"role": "user", "content": ""}], 0, {}, is_cut=True)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        size: int,
        options: Mapping[str, Any],
        *,
        is_cut: bool,
    ) -> Prompt:
        """Returns token ids and marks of a conversation, whose texts have `size` characters.
        `options` are those of `chat.compose`; `is_cut` as in `encode`. Raises
        InvalidRequestError."""
        if self.tokenizer is None or not self._lanes.can_render:
            composed = await self.with_tokenizer(
                lambda tokenizer: chat.compose(
                    tokenizer,
                    messages,
                    special=self._special,
                    check=None if is_cut else self.check,
                    **options,
                ),
                size,
            )
            return await self._encode_composed(composed, is_cut=is_cut)
        asked = Unrendered(
            content=await _beside(size, lambda: content_of(messages, **options)),
            max_chars=MAX_GROWTH * size + MAX_ADDED,
            max_tokenized=MAX_SHORT,
            limit_s=self._template_timeout_s,
        )
        rendered, prompt = await self._lanes.render(asked, size)
        if rendered.refusal:
            raise InvalidRequestError(rendered.refusal)
        if prompt is not None:
            return prompt
        return await self._encode_composed(rendered.composed, is_cut=is_cut)

    async def _encode_composed(self, composed: chat.Composed, *, is_cut: bool) -> Prompt:
        here, pieces = partial(chat.tokenized, composed=composed), composed.pieces
        prompt = await self._encode_here(here, ["".join(pieces)], composed.length, is_cut=is_cut)
        if prompt is not None:
            return prompt
        texts = list(map(Text, pieces, composed.places()))
        encoded = await self._encode_in_process(texts, is_cut=is_cut, add_special_tokens=False)
        return composed.prompt([(one.token_ids, one.counts) for one in encoded])

    async def _encode_in_process(
        self, texts: Sequence[Text], *, is_cut: bool, add_special_tokens: bool
    ) -> list[Encoded]:
        """Returns the tokens of long texts. With `is_cut` they may be too long for the model."""
        limit = None if is_cut else self._max_model_len - 1
        asked = Texts(list(texts), add_special_tokens, limit)
        try:
            encoded = await self._lanes.encode(asked)
        except UnicodeError as error:
            raise _no_unicode(error) from error
        finally:
            self._give_back_soon()
        longest = max((one.num_tokens for one in encoded), default=0)
        if limit is not None and longest > limit:
            raise self._too_long(f"{longest} tokens")
        return encoded

    def check(self, text: str) -> None:
        """Raises InvalidPromptError for a text that has too many tokens however it is tokenized."""
        limit = self._max_model_len
        if len(text) < limit:
            return
        if self._fewest_tokens is None:
            self._fewest_tokens = FewestTokens(self.tokenizer)
        least = self._fewest_tokens(text)
        if least >= limit:
            raise self._too_long(f"{least} tokens or more")

    def _too_long(self, length: str) -> InvalidPromptError:
        limit = self._max_model_len
        return InvalidPromptError(
            f"the prompt has {length}, and max_model_len={limit} leaves no room for an answer: "
            f"shorten it to {limit - 1} or raise max_model_len",
            is_too_long=True,
        )

    def _give_back_soon(self) -> None:
        """Schedules the return of free memory after a long text; nothing else returns it."""
        if self._giving_back is None:
            loop = asyncio.get_running_loop()
            self._giving_back = loop.call_later(GIVE_BACK_S, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = None
        threading.Thread(target=heap.give_back, daemon=True).start()

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self._lanes.close()
        if self._giving_back is not None:
            self._giving_back.cancel()


def _no_unicode(error: UnicodeError) -> InvalidRequestError:
    return InvalidRequestError(f"the text is not valid Unicode: {error}")


async def _beside(size: int, work: Callable[[], T]) -> T:
    """Returns the result of `work`, run in a thread if its size would delay the event loop."""
    return work() if size <= MAX_SHORT else await asyncio.to_thread(work)
