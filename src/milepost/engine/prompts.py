"""Checks what a caller passes as a prompt, and turns it into token ids. Nothing is queued before
all is checked.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams, check_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptLike = str | list[int] | Mapping[str, Any]
"""Text, or a list of token ids, or {"prompt": text} or {"prompt_token_ids": [...]}, with
"cache_salt" and "cache_marks" if wanted.
"""

_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "cache_marks")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt, to be checked by `check_prompt`."""

    token_ids: Sequence[int]
    text: str | None = None
    """None if it came as token ids."""
    cache_salt: str = ""
    cache_marks: tuple[int, ...] = ()
    kv_transfer_params: dict[str, Any] | None = None
    """What it has to do with other engines."""

    @cached_property
    def packed(self) -> array[int]:
        """The token ids as the cache keeps them, made once. Raises OverflowError or TypeError for
        what cannot be one."""
        return array("I", self.token_ids)


def read_prompt(prompt: PromptLike, tokenizer: PreTrainedTokenizerBase | None) -> Prompt:
    """Token ids, salt and marks of a prompt. Raises InvalidRequestError naming what is wrong."""
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    elif isinstance(prompt, list):
        prompt = {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping):
        raise InvalidRequestError(
            f"prompt of type {type(prompt).__name__}: use a string, a list of token ids, or a dict "
            "with 'prompt' or 'prompt_token_ids'"
        )
    unknown = [key for key in prompt if key not in _KEYS]
    if unknown:
        raise InvalidRequestError(f"prompt key {unknown[0]!r}: use {', '.join(_KEYS)}")
    text = prompt.get("prompt")
    token_ids = prompt.get("prompt_token_ids")
    if (text is None) == (token_ids is None):
        raise InvalidRequestError("a prompt needs either 'prompt' or 'prompt_token_ids', not both")
    if token_ids is None:
        token_ids = _tokenize(text, tokenizer)
    return Prompt(
        token_ids=_read_list("prompt_token_ids", token_ids),
        text=text,
        cache_salt=_read_salt(prompt.get("cache_salt")),
        cache_marks=_read_marks(prompt.get("cache_marks")),
    )


def check_prompt(
    prompt: Prompt, *, vocab_size: int, max_model_len: int, max_cache_marks: int
) -> None:
    """Raise InvalidRequestError for a prompt that this engine cannot serve."""
    length = len(prompt.token_ids)
    if not length:
        raise InvalidRequestError("the prompt is empty: use one token or more")
    if not _are_ids(prompt, vocab_size):
        _refuse_first(prompt.token_ids, vocab_size)
    if length >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {length} tokens, and max_model_len={max_model_len} leaves no room for "
            f"an answer: shorten it to {max_model_len - 1} or raise max_model_len"
        )
    _check_marks(prompt.cache_marks, length, max_cache_marks)


MAX_SCORES = 2**20
"""Log-probabilities that one request may ask for of its prompt."""


def check_scores(prompt: Prompt, params: SamplingParams) -> None:
    """Raise InvalidRequestError if the prompt's log-probabilities are too many to hold."""
    if params.prompt_logprobs is None:
        return
    num = len(prompt.token_ids) * (params.prompt_logprobs + 1)
    if num > MAX_SCORES:
        raise InvalidRequestError(
            f"prompt_logprobs={params.prompt_logprobs}: with {len(prompt.token_ids)} prompt tokens "
            f"these are {num}: use fewer, {MAX_SCORES} at most in all"
        )


def _are_ids(prompt: Prompt, vocab_size: int) -> bool:
    """Whether all are integers within the vocabulary; looks at long prompts fast."""
    try:
        # Packs nothing but integers, and truth values as 0 and 1.
        ids = np.frombuffer(prompt.packed, dtype=np.uint32)
    except (OverflowError, TypeError):
        return False
    low = np.flatnonzero(ids <= 1).tolist()
    has_truths = any(isinstance(prompt.token_ids[index], bool | np.bool) for index in low)
    return not has_truths and int(ids.max()) < vocab_size


def _refuse_first(token_ids: Sequence[Any], vocab_size: int) -> None:
    """Raise for the first that is no token id."""
    for index, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InvalidRequestError(f"prompt_token_ids[{index}]={token!r}: use integers")
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"prompt_token_ids[{index}]={token}: the vocabulary has {vocab_size} tokens, "
                f"use ids from 0 to {vocab_size - 1}"
            )


def _check_marks(marks: Sequence[int], length: int, max_marks: int) -> None:
    if len(marks) > max_marks:
        raise InvalidRequestError(
            f"{len(marks)} cache_marks: use {max_marks} or fewer (max_cache_marks)"
        )
    for mark in marks:
        if isinstance(mark, bool) or not isinstance(mark, int) or not 0 < mark <= length:
            raise InvalidRequestError(
                f"cache_marks has {mark!r}: use token positions from 1 to {length}, the prompt's "
                "length"
            )


def _tokenize(text: object, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if not isinstance(text, str):
        raise InvalidRequestError(f"prompt of type {type(text).__name__}: use a string")
    if tokenizer is None:
        raise InvalidRequestError(
            "a text prompt needs a tokenizer, and skip_tokenizer_init=True loaded none: pass "
            "{'prompt_token_ids': [...]}"
        )
    check_unicode(text)
    return list(tokenizer.encode(text))


def _read_list(name: str, value: Any) -> list[Any]:
    # An array's or a tensor's own numbers are no plain integers.
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, str | bytes) or not isinstance(plain, Iterable):
        raise InvalidRequestError(f"{name}={value!r}: use a list of integers")
    return list(plain)


def _read_marks(marks: Any) -> tuple[Any, ...]:
    return () if marks is None else tuple(_read_list("cache_marks", marks))


def _read_salt(salt: object) -> str:
    if salt is None:
        return ""
    if not isinstance(salt, str) or not salt:
        raise InvalidRequestError(f"cache_salt={salt!r}: use a string that is not empty")
    check_unicode(salt, "cache_salt")
    return salt
