"""Renders a request's prompt to the tokens that would be served, for routers that send a prompt to
where it hits. They cannot do it themselves, since a template reads more than the messages. A
request that would be refused is refused here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from milepost.engine.prompts import Prompt
from milepost.server import completions, conversation, parameters
from milepost.server.callers import for_clients
from milepost.server.errors import json_response
from milepost.server.protocol import ChatRequest, CompletionRequest, Sampling
from milepost.server.responses import endpoint as responses
from milepost.server.responses.protocol import ResponsesRequest
from milepost.server.responses.store import ResponseStore
from milepost.server.service import Service
from milepost.server.stream import unless_disconnected


def add(app: FastAPI, service: Service, store: ResponseStore) -> None:
    """/render below each path that takes prompts, with the bodies and answers that vLLM's has."""

    @app.post("/v1/completions/render", response_class=Response)
    @for_clients
    async def render_completion(body: CompletionRequest, request: Request) -> Response:
        service.unknown.settle(body, request.scope)
        model = service.check_model(body.model)
        params = parameters.of_completion(body, service.sampling_defaults)
        service.check_number(completions.num_prompts(body), params.n)  # before they are tokenized
        work = completions.prompts_of(service, body, params)
        prompts = await unless_disconnected(request, work)
        for prompt in prompts:
            service.check_prompt(prompt, params, "prompt")
        id_ = conversation.response_id("cmpl", body, request)
        return json_response([_rendered(prompt, body, model, id_) for prompt in prompts])

    async def rendered(
        chat: ChatRequest, model: str, request: Request, *, field: str, fits_max_tokens: bool
    ) -> Response:
        params = parameters.of_chat(chat, service.sampling_defaults)
        work = conversation.prompt_of(service, chat, params, request)
        prompt, _ = await unless_disconnected(request, work)
        if fits_max_tokens:
            params = conversation.fitting(service, prompt, params)
        service.check_prompt(prompt, params, field)
        id_ = conversation.response_id("chatcmpl", chat, request)
        return json_response(_rendered(prompt, chat, model, id_))

    @app.post("/v1/chat/completions/render", response_class=Response)
    @for_clients
    async def render_chat(body: ChatRequest, request: Request) -> Response:
        service.unknown.settle(body, request.scope)
        model = service.check_model(body.model)
        return await rendered(body, model, request, field="messages", fits_max_tokens=False)

    @app.post("/v1/responses/render", response_class=Response)
    @for_clients
    async def render_response(body: ResponsesRequest, request: Request) -> Response:
        service.unknown.settle(body, request.scope)
        model = service.check_model(body.model)
        _, _, converted = responses.chat_of(store, body, request)
        chat = converted.chat
        return await rendered(chat, model, request, field="input", fits_max_tokens=True)


async def prompt_of(service: Service, path: str, body: bytes) -> Prompt | None:
    """What a POST of this body to `path` would be served with, for a router in front of `service`;
    None for several prompts and for paths that take none. Raises ValueError, MilepostError and
    HttpError for a request that would be refused.
    """
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
