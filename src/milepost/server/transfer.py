"""`kv_transfer_params`: a request whose prompt another engine computes, or goes on with."""

from __future__ import annotations

from typing import Any, TypeVar

from milepost.server.errors import HttpError
from milepost.server.protocol import ChatRequest, Sampling
from milepost.server.service import Service

R = TypeVar("R", bound=Sampling)

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
    """A request to prefill for another engine asks for one token, which nobody reads, whatever
    else it says of its answer. Raises HttpError where engines do not exchange anything.
    """
    params = request.kv_transfer_params
    if not params or not (params.get("do_remote_decode") or params.get("do_remote_prefill")):
        return request
    if service.client.config.kv_transfer_config is None:
        raise HttpError(
            400,
            "kv_transfer_params: this server does not exchange anything with others: start it "
            "with --kv-transfer-config",
            param="kv_transfer_params",
        )
    if not params.get("do_remote_decode"):
        return request
    own: dict[str, Any] = {}
    if isinstance(request, ChatRequest):
        own["max_completion_tokens"] = own["top_logprobs"] = None
        own["tool_choice"] = "none" if request.tool_choice == "none" else None
    else:
        own["echo"] = None
    return request.model_copy(update={**_ONE_TOKEN, **own})
