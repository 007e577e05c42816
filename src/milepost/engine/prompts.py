"""Reads what a caller passes as a prompt, and turns it into token ids. `validation` checks them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

from milepost.checks import check_unicode
from milepost.errors import InvalidRequestError
from milepost.pictures import Picture
from milepost.runner.recording import PictureRecord
from milepost.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptLike = str | list[int] | Mapping[str, Any]
"""Text, or a list of token ids, or {"prompt": text} or {"prompt_token_ids": [...]}, with
"cache_salt" and "cache_marks" if wanted.
"""

ChatMessages = Sequence[Mapping[str, Any]]
"""A conversation, as OpenAI has it."""

_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "cache_marks")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as token ids, to be checked by `validation.validate`."""

    token_ids: Sequence[int]
    text: str | None = None
    """None if it came as token ids."""
    cache_salt: str = ""
    cache_marks: tuple[int, ...] = ()
    """Positions where a state is worth keeping."""
    breakpoints: tuple[int, ...] = ()
    """The marks of a conversation that come from a `cache_control`."""
    pictures: tuple[Picture, ...] = ()
    """Images among the tokens, in order."""
    pixels: tuple[PictureRecord, ...] = ()
    """Pixels of the pictures, each once."""
    kv_transfer_params: dict[str, Any] | None = None
    """Fields that say which part of it other engines have or should get."""

    @cached_property
    def packed(self) -> array[int]:
        """The token ids as packed uint32, computed once. Raises OverflowError or TypeError for
        invalid ids."""
        return array("I", self.token_ids)


def read_prompt(prompt: PromptLike, tokenizer: PreTrainedTokenizerBase | None) -> Prompt:
    """Returns the token ids, salt and marks of a prompt. Raises InvalidRequestError, naming what is
    wrong."""
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


def encoding(
    tokenizer: PreTrainedTokenizerBase | None,
) -> Callable[[str], list[int]] | None:
    """Returns a function that tokenizes a part of a text; None without a tokenizer."""
    if tokenizer is None:
        return None
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def rendered_prompt(rendered: Prompt, max_marks: int, salt: object) -> Prompt:
    """Returns a rendered conversation under a salt, with as many of its marks as are allowed.
    Raises InvalidRequestError for an invalid salt."""
    marks = rendered.cache_marks[:max_marks]
    return replace(rendered, text=None, cache_salt=_read_salt(salt), cache_marks=marks)


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


# --- one or several -------------------------------------------------------------------------------


def is_prompt(prompts: object) -> TypeGuard[PromptLike]:
    """Whether a value is one prompt (a text, a mapping or token ids) rather than several. Also true
    for values that are no prompt at all."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return True
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)


def is_conversation(messages: ChatMessages | Sequence[ChatMessages]) -> TypeGuard[ChatMessages]:
    """Whether a value is one conversation, that is, a list of messages, rather than a list of
    several."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidRequestError(f"messages={messages!r}: use a list of messages")
    first = messages[0] if messages else None
    return isinstance(first, str) or not isinstance(first, Sequence)


def one_each(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """Returns one set of parameters for each prompt."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise InvalidRequestError(f"sampling_params={params!r}: use SamplingParams(...), or a list")
    if len(params) != num_prompts:
        raise InvalidRequestError(
            f"{len(params)} sampling_params for {num_prompts} prompts: give one, or one for each"
        )
    return list(params)
