"""Tokenizes texts and conversations, and does whatever else needs a tokenizer.

Work runs in threads, and for long texts in a process (`tokenizing`). A text that is certainly too
long for the model is refused before it is tokenized.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from milepost.engine import chat, heap
from milepost.engine.lengths import FewestTokens
from milepost.engine.text_process import Encoded, Text, Texts
from milepost.errors import InvalidRequestError
from milepost.server.errors import HttpError
from milepost.server.logprobs import TokenBytes
from milepost.server.tokenizing import MAX_SHORT, Lanes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

TOO_LONG = "context_length_exceeded"
GIVE_BACK_S = 1.0
"""After a long text, until free memory goes back to the system."""


class Encoder:
    """A model's tokenizer, if it has one, for all requests."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._lanes = Lanes(tokenizer)
        self._fewest_tokens: FewestTokens | None = None
        self._token_bytes: TokenBytes | None = None
        self._giving_back: asyncio.TimerHandle | None = None

    async def with_tokenizer(
        self, work: Callable[[PreTrainedTokenizerBase], T], size: int = 0
    ) -> T:
        """Run `work` in a thread with a tokenizer; `size` is the length of its text.

        Raises InvalidRequestError for bad text.
        """
        if self._tokenizer is None:
            raise InvalidRequestError(
                "this server has no tokenizer (--skip-tokenizer-init): use token ids"
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
        """Token ids of texts, none of which can be longer than the model takes, unless they are cut
        to its length. Raises InvalidRequestError."""
        size = sum(map(len, texts))
        is_apart = size > MAX_SHORT and self._lanes.can_be_stopped

        def work(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
            if not is_cut:
                for text in texts:
                    self.check(text)
            if is_apart:
                return []
            return [
                list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
                for text in texts
            ]

        found = await self.with_tokenizer(work, size)
        if not is_apart:
            return found
        encoded = await self._encode_apart(
            [Text(text) for text in texts], is_cut=is_cut, add_special_tokens=add_special_tokens
        )
        return [one.token_ids for one in encoded]

    async def encode_chat(
        self,
        compose: Callable[[PreTrainedTokenizerBase], chat.Composed],
        size: int,
        *,
        is_cut: bool,
    ) -> chat.ChatPrompt:
        """Token ids and marks of the conversation that `compose` renders, whose texts have `size`
        characters; `is_cut` as in `encode`."""
        is_stopped = self._lanes.can_be_stopped

        def work(tokenizer: PreTrainedTokenizerBase) -> chat.Composed | chat.ChatPrompt:
            composed = compose(tokenizer)
            if is_stopped and composed.length > MAX_SHORT:
                return composed
            return chat.tokenized(tokenizer, composed)

        found = await self.with_tokenizer(work, size)
        if isinstance(found, chat.ChatPrompt):
            return found
        texts = map(Text, found.pieces, found.places())
        encoded = await self._encode_apart(list(texts), is_cut=is_cut, add_special_tokens=False)
        return found.prompt([(one.token_ids, one.counts) for one in encoded])

    async def _encode_apart(
        self, texts: Sequence[Text], *, is_cut: bool, add_special_tokens: bool
    ) -> list[Encoded]:
        """Tokens of long texts, of which none may be too long unless they are cut."""
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

    async def token_bytes(self) -> TokenBytes:
        """The bytes of the vocabulary, read when first asked for. Raises as `with_tokenizer`."""
        if self._token_bytes is None:
            self._token_bytes = await self.with_tokenizer(TokenBytes)
        return self._token_bytes

    def check(self, text: str) -> None:
        """Raise HttpError 400 for a text that has too many tokens whichever way it is cut into
        them."""
        limit = self._max_model_len
        if len(text) < limit:
            return
        if self._fewest_tokens is None:
            self._fewest_tokens = FewestTokens(self._tokenizer)
        least = self._fewest_tokens(text)
        if least >= limit:
            raise self._too_long(f"{least} tokens or more")

    def _too_long(self, length: str) -> HttpError:
        limit = self._max_model_len
        return HttpError(
            400,
            f"the prompt has {length}, and max_model_len={limit} leaves no room for an answer: "
            f"shorten it to {limit - 1} or raise max_model_len",
            code=TOO_LONG,
        )

    def _give_back_soon(self) -> None:
        """A long text leaves free memory behind, which nothing else would return."""
        if self._giving_back is None:
            loop = asyncio.get_running_loop()
            self._giving_back = loop.call_later(GIVE_BACK_S, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = None
        threading.Thread(target=heap.give_back, daemon=True).start()

    async def close(self) -> None:
        await self._lanes.close()
        if self._giving_back is not None:
            self._giving_back.cancel()


def _no_unicode(error: UnicodeError) -> InvalidRequestError:
    return InvalidRequestError(f"the text is not valid Unicode: {error}")
