"""Makes sampling parameters from the fields of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milepost.engine.text import with_defaults
from milepost.sampling_params import SamplingParams
from milepost.server.protocol import ChatRequest, CompletionRequest, Sampling

_SAME = (
    "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words",
    "thinking_token_budget", "min_tokens", "prompt_logprobs", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
"""Fields that SamplingParams has under the same name."""


Defaults = Mapping[str, int | float]
"""Values for fields that a request does not set."""


def of_completion(request: CompletionRequest, defaults: Defaults) -> SamplingParams:
    """Returns the sampling parameters of a completion. Raises InvalidRequestError."""
    max_tokens = 16 if request.max_tokens is None else max(request.max_tokens, 1)
    extra: dict[str, Any] = {}
    if request.echo and request.logprobs is not None:
        extra["prompt_logprobs"] = max(request.prompt_logprobs or 0, request.logprobs)
    return _params(request, {**defaults}, max_tokens=max_tokens, logprobs=request.logprobs, **extra)


def of_chat(request: ChatRequest, defaults: Defaults) -> SamplingParams:
    """Returns the sampling parameters of a chat. Raises InvalidRequestError."""
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens or request.max_tokens
    return _params(request, defaults, max_tokens=max_tokens, logprobs=logprobs)


def _params(request: Sampling, defaults: Defaults, **own: Any) -> SamplingParams:
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.logit_bias:
        own["logit_bias"] = {int(key): bias for key, bias in request.logit_bias.items()}
    return with_defaults({**given, **own}, defaults)
