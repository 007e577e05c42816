"""Renders a request's prompt to the tokens as served, for routers that look for the server with the
longest cached prefix. They cannot render it themselves, since a template reads more than the
messages. Requests that would be refused are refused here too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from milepost.engine.prompts import Prompt
from milepost.server import completions, conversation, parameters
from milepost.server.errors import json_response
from milepost.server.protocol import ChatRequest, CompletionRequest, Sampling
from milepost.server.responses import endpoint as responses
from milepost.server.responses.endpoint import ResponseStore
from milepost.server.responses.protocol import ResponsesRequest
from milepost.server.service import Service
from milepost.server.stream import unless_disconnected


def routes(store: ResponseStore) -> Sequence[tuple[str, Any, Any]]:
    """Returns path, type of the body and handler of each /render, with vLLM's bodies and
    answers."""

    async def render_completion(
        service: Service, body: CompletionRequest, request: Request
    ) -> Response:
        model = service.check_model(body.model)
        params = parameters.of_completion(body, service.sampling_defaults)
        service.client.check_room(completions.num_prompts(body), params.n)  # before tokenizing
        work = completions.prompts_of(service, body, params)
        prompts = await unless_disconnected(request, work)
        for prompt in prompts:
            service.check(prompt, params, "prompt")
        id_ = conversation.response_id("cmpl", body, request)
        return json_response([_rendered(prompt, body, model, id_) for prompt in prompts])

    async def render_chat(service: Service, body: ChatRequest, request: Request) -> Response:
        return await _render(service, body, request, field="messages", fits_max_tokens=False)

    async def render_response(
        service: Service, body: ResponsesRequest, request: Request
    ) -> Response:
        service.check_model(body.model)
        _, _, converted = responses.chat_of(store, body, request)
        return await _render(service, converted.chat, request, field="input", fits_max_tokens=True)

    return [
        ("/v1/completions/render", CompletionRequest, render_completion),
        ("/v1/chat/completions/render", ChatRequest, render_chat),
        ("/v1/responses/render", ResponsesRequest, render_response),
    ]


async def _render(
    service: Service, chat: ChatRequest, request: Request, *, field: str, fits_max_tokens: bool
) -> Response:
    model = service.check_model(chat.model)
    params = parameters.of_chat(chat, service.sampling_defaults)
    work = conversation.prompt_of(service, chat, params, request)
    prompt, _ = await unless_disconnected(request, work)
    if fits_max_tokens:
        params = conversation.fitting(service, prompt, params)
    service.check(prompt, params, field)
    id_ = conversation.response_id("chatcmpl", chat, request)
    return json_response(_rendered(prompt, chat, model, id_))


async def prompt_of(service: Service, path: str, body: bytes) -> Prompt | None:
    """Returns the prompt that a POST of this body to `path` would be served with, for a router in
    front of `service`; None for several prompts and for other paths. Raises ValueError,
    MilepostError and HttpError for a request that would be refused."""
    scope: dict[str, Any] = {"type": "http", "milepost.record": {}, "milepost.headers": []}
    if path.endswith("/chat/completions"):
        chat = ChatRequest.model_validate_json(body)
        service.unknown.settle(chat, scope)
        params = parameters.of_chat(chat, service.sampling_defaults)
        prompt, _ = await conversation.prompt_of(service, chat, params, Request(scope))
        return prompt
    if not path.endswith("/completions"):
        return None
    request = CompletionRequest.model_validate_json(body)
    if completions.num_prompts(request) > 1:
        return None
    params = parameters.of_completion(request, service.sampling_defaults)
    (prompt,) = await completions.prompts_of(service, request, params)
    return prompt


def _rendered(prompt: Prompt, request: Sampling, model: str, id_: str) -> dict[str, Any]:
    marks: Sequence[int] = prompt.cache_marks
    return {
        "request_id": id_,
        "model": model,
        "token_ids": list(prompt.token_ids),
        "features": None,
        "cache_salt": request.cache_salt,
        "cache_marks": list(marks),
    }
