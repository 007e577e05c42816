"""The one check of a request on arrival: by `LLM` before it queues prompts, and by `EngineClient`
before it sends one. The engine trusts what has passed.

Only forms and bad words are judged later, where they are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from milepost.checks import is_whole
from milepost.config import EngineConfig
from milepost.engine.prompts import Prompt
from milepost.errors import InvalidPromptError, InvalidRequestError
from milepost.kv_config import KVTransferConfig
from milepost.kv_transfer_params import check_exchange, read
from milepost.pictures import check_pictures
from milepost.sampling_params import SamplingParams

MAX_PIXEL_BYTES = 3 * 2**28
"""Largest size of the pixels of one request, which travel in one message: 262,144 tokens."""
MAX_SCORES = 2**20
"""Largest number of log-probabilities of a prompt in one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one engine."""

    vocab_size: int
    max_model_len: int
    max_cache_marks: int
    has_tokenizer: bool
    closes_reasoning: bool
    """Whether one token of the model closes the reasoning."""
    max_images: int = 0
    """Largest number of images in a prompt; 0 for a model that takes none."""
    kv_transfer_config: KVTransferConfig | None = None

    @staticmethod
    def of(
        config: EngineConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        closes_reasoning: bool,
        has_tower: bool = False,
    ) -> Limits:
        """Returns the limits of an engine with this configuration and model."""
        return Limits(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_cache_marks=config.max_cache_marks,
            has_tokenizer=not config.skip_tokenizer_init,
            closes_reasoning=closes_reasoning,
            max_images=config.max_images if has_tower else 0,
            kv_transfer_config=config.kv_transfer_config,
        )


def validate(prompt: Prompt, params: SamplingParams, limits: Limits) -> None:
    """Raises InvalidRequestError for a request that the engine cannot serve, or InvalidPromptError
    for such a prompt."""
    _check_prompt(prompt, limits)
    wish = read(prompt.kv_transfer_params)
    if wish is not None:
        check_exchange(wish, limits.kv_transfer_config)
    params.check_vocab(limits.vocab_size)
    _check_scores(prompt, params)
    _check_budget(params.thinking_token_budget, limits)
    _check_combination(params)
    if params.stop and not limits.has_tokenizer:
        raise InvalidRequestError(
            f"stop={params.stop!r}: stop strings need a tokenizer; use stop_token_ids, "
            "or an engine without skip_tokenizer_init=True"
        )


def _check_prompt(prompt: Prompt, limits: Limits) -> None:
    """Raises InvalidPromptError for a prompt that the engine cannot serve."""
    length, longest = len(prompt.token_ids), limits.max_model_len
    if not length:
        raise InvalidPromptError("the prompt is empty: use one token or more")
    if not _are_ids(prompt, limits.vocab_size):
        _refuse_first(prompt.token_ids, limits.vocab_size)
    if length >= longest:
        raise InvalidPromptError(
            f"the prompt has {length} tokens, and max_model_len={longest} leaves no room for "
            f"an answer: shorten it to {longest - 1} or raise max_model_len",
            is_too_long=True,
        )
    _check_marks(prompt.cache_marks, length, limits.max_cache_marks)
    if not limits.max_images:  # else they were counted: an image or a video may be many pictures
        check_num_images(len(prompt.pictures), 0)
    check_pictures(prompt.pictures, length)
    num_bytes = sum(len(record.rows) for record in prompt.pixels)
    if num_bytes > MAX_PIXEL_BYTES:
        raise InvalidPromptError(
            f"images of {num_bytes} bytes of pixels: use {MAX_PIXEL_BYTES} bytes or fewer",
            is_too_long=True,
        )


def check_num_images(num: int, most: int) -> None:
    """Raises InvalidPromptError for more images than a prompt may have."""
    if num <= most:
        return
    shown = "1 image" if num == 1 else f"{num} images"
    if not most:
        raise InvalidPromptError(f"{shown}: this model is served for text only")
    raise InvalidPromptError(f"{shown}: use {most} or fewer (limit_mm_per_prompt)")


def _check_combination(params: SamplingParams) -> None:
    """Raises InvalidRequestError for parameters that cannot be combined with an output
    constraint."""
    wanted = params.structured_outputs
    if wanted is not None and (params.ignore_eos or params.min_tokens):
        raise InvalidRequestError(
            f"{wanted.field}: it says where an answer ends, so leave out ignore_eos and min_tokens"
        )


def _check_budget(budget: int | None, limits: Limits) -> None:
    if budget is not None and not limits.closes_reasoning:
        raise InvalidRequestError(
            f"thinking_token_budget={budget}: this model has no token </think>"
        )


def _check_scores(prompt: Prompt, params: SamplingParams) -> None:
    """Raises InvalidRequestError if the prompt's log-probabilities are too many to hold."""
    if params.prompt_logprobs is None:
        return
    num = len(prompt.token_ids) * (params.prompt_logprobs + 1)
    if num > MAX_SCORES:
        raise InvalidRequestError(
            f"prompt_logprobs={params.prompt_logprobs}: with {len(prompt.token_ids)} prompt tokens "
            f"these are {num}: use fewer, {MAX_SCORES} at most in all"
        )


def _are_ids(prompt: Prompt, vocab_size: int) -> bool:
    """Whether all are integers within the vocabulary; fast for long prompts."""
    try:
        # Packing takes only integers, and truth values as 0 and 1.
        ids = np.frombuffer(prompt.packed, dtype=np.uint32)
    except (OverflowError, TypeError):
        return False
    low = np.flatnonzero(ids <= 1).tolist()
    has_truths = any(isinstance(prompt.token_ids[index], bool | np.bool) for index in low)
    return not has_truths and int(ids.max()) < vocab_size


def _refuse_first(token_ids: Sequence[Any], vocab_size: int) -> None:
    """Raises InvalidPromptError for the first that is no token id."""
    for index, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise InvalidPromptError(f"prompt_token_ids[{index}]={token!r}: use integers")
        if not 0 <= int(token) < vocab_size:
            raise InvalidPromptError(
                f"prompt_token_ids[{index}]={token}: the vocabulary has {vocab_size} tokens, "
                f"use ids from 0 to {vocab_size - 1}"
            )


def _check_marks(marks: Sequence[int], length: int, max_marks: int) -> None:
    if len(marks) > max_marks:
        raise InvalidPromptError(
            f"{len(marks)} cache_marks: use {max_marks} or fewer (max_cache_marks)"
        )
    for mark in marks:
        if not is_whole(mark) or not 0 < mark <= length:
            raise InvalidPromptError(
                f"cache_marks has {mark!r}: use token positions from 1 to {length}, the prompt's "
                "length"
            )
