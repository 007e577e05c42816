"""`kv_transfer_params`: requests whose prompt or answer another engine computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from milepost.errors import InvalidRequestError
from milepost.kv_transfer_params import TransferWish, check_exchange
from milepost.server.protocol import ChatRequest, Sampling
from milepost.server.service import Service

R = TypeVar("R", bound=Sampling)
Params = dict[str, Any]

EACH = "of_each_prompt"
"""Key of the parameters of several prompts: routers pass on keys they do not know."""

_ONE_TOKEN = {
    "max_tokens": 1,
    "min_tokens": 1,
    "ignore_eos": True,
    "temperature": 0.0,
    "n": 1,
    "stop": None,
    "stop_token_ids": None,
    "stream": None,
    "stream_options": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "response_format": None,
    "structured_outputs": None,
}


def as_served(service: Service, request: R) -> R:
    """Returns a request to prefill for another engine as one for a single token, which nobody
    reads; other requests unchanged. Raises InvalidRequestError if this engine exchanges nothing
    with others."""
    params = request.kv_transfer_params
    if not params or not (params.get("do_remote_decode") or params.get("do_remote_prefill")):
        return request
    check_exchange(TransferWish(), service.client.config.kv_transfer_config)
    if not params.get("do_remote_decode"):
        return request
    changes: Params = {}
    if isinstance(request, ChatRequest):
        changes["max_completion_tokens"] = changes["top_logprobs"] = None
        changes["tool_choice"] = "none" if request.tool_choice == "none" else None
    else:
        changes["echo"] = None
    return request.model_copy(update={**_ONE_TOKEN, **changes})


def of_each(params: Params | None, num_prompts: int) -> list[Params | None]:
    """Returns the parameters of each prompt of a request. Raises InvalidRequestError."""
    if not params or num_prompts == 1 or params.get("do_remote_decode"):
        return [params] * num_prompts
    found: Any = params.get(EACH)
    if found is None:  # the other engine sent none: they are computed
        return [None] * num_prompts
    is_fit = isinstance(found, list) and len(found) == num_prompts
    if not is_fit or not all(each is None or isinstance(each, dict) for each in found):
        raise InvalidRequestError(
            f"kv_transfer_params: {EACH}: pass on the other engine's answer to as many prompts"
        )
    each_own: list[Params | None] = found
    return each_own


def joined(found: Mapping[int, Params], num_prompts: int) -> Params | None:
    """Returns the parameters of a response from those of its prompts, by their index."""
    if num_prompts == 1 or not found:
        return found.get(0)
    first = next(iter(found.values()))
    return {**first, EACH: [found.get(number) for number in range(num_prompts)]}
