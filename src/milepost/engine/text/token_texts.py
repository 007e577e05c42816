"""The texts of tokens, shared by the answers of one engine.

Where a token is a string of bytes, a text is the bytes of its tokens in a row. So a token of whole
characters reads the same whatever is around it, and is decoded once for all answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
"""The character shown for bytes that are not a whole character (yet)."""

Decode = Callable[[list[int]], str]


class TokenTexts:
    """The texts of one tokenizer's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._is_raw = _is_raw(tokenizer)
        self.special_ids = frozenset(
            id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self.are_bytes = self._is_raw and _spells_bytes(tokenizer)
        """Whether tokens are strings of bytes."""
        self._whole: dict[int, str] = {}
        self._alone: dict[int, str] = {}

    def decode(self, *, skip_special_tokens: bool) -> Decode:
        """Decodes token ids, bypassing the tokenizer's Python layer if that makes no difference."""
        tokenizer = self._tokenizer
        decode: Any = tokenizer.backend_tokenizer.decode if self._is_raw else tokenizer.decode
        return lambda token_ids: decode(token_ids, skip_special_tokens=skip_special_tokens)

    def alone(self, token_id: int) -> str:
        """Returns the text of a token by itself, special or not."""
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = str(self._tokenizer.decode([token_id]))
        return text

    def whole(self, token_id: int) -> str | None:
        """Returns the text of a token, special or not, if it is whole characters whatever stands
        beside it; None if that isn't known.
        """
        text = self._whole.get(token_id)
        if text is None and self.are_bytes:
            text = self._tokenizer.backend_tokenizer.decode([token_id], skip_special_tokens=False)
            if INCOMPLETE not in text:
                self._whole[token_id] = text
        return None if text is None or INCOMPLETE in text else text


def text_of(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """Returns the text of many tokens, special ones included, as `tokenizer.decode` does. Other
    threads can run meanwhile, unless the tokenizer's Python layer makes a difference."""
    if not _is_raw(tokenizer):
        return str(tokenizer.decode(token_ids))
    # Of the calls that decode, only this one releases the interpreter lock.
    (text,) = tokenizer.backend_tokenizer.decode_batch([token_ids], skip_special_tokens=False)
    return str(text)


def _is_raw(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's Python layer makes no difference to texts."""
    return tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces


def _spells_bytes(tokenizer: PreTrainedTokenizerBase) -> bool:
    from tokenizers.decoders import ByteLevel  # with transformers, which takes seconds

    return isinstance(tokenizer.backend_tokenizer.decoder, ByteLevel)
