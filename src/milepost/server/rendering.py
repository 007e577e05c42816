"""The tokens of a request's prompt, as it would be served: for routers that send a prompt to where
it hits. They cannot make them themselves, since a template reads more than the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request

from milepost.engine.prompts import Prompt
from milepost.server import completions, conversation, parameters
from milepost.server.protocol import ChatRequest, CompletionRequest, Sampling
from milepost.server.responses import endpoint as responses
from milepost.server.responses.protocol import ResponsesRequest
from milepost.server.responses.store import ResponseStore
from milepost.server.service import Service
from milepost.server.stream import unless_disconnected


def add(app: FastAPI, service: Service, store: ResponseStore) -> None:
    """/render below each path that takes prompts, with the bodies and answers that vLLM's has."""

    @app.post("/v1/completions/render")
    async def render_completion(body: CompletionRequest, request: Request) -> list[dict[str, Any]]:
        service.unknown.settle(body, request.scope)
        model = service.check_model(body.model)
        params = parameters.of_completion(body, service.client.info.sampling_defaults)
        work = completions.prompts_of(service, body, params)
        prompts = await unless_disconnected(request, work, lambda: None)
        id_ = conversation.response_id("cmpl", body, request)
        return [_rendered(prompt, body, model, id_) for prompt in prompts]

    async def rendered(chat: ChatRequest, model: str, request: Request) -> dict[str, Any]:
        params = parameters.of_chat(chat, service.client.info.sampling_defaults)
        work = conversation.prompt_of(service, chat, params, request)
        prompt, _ = await unless_disconnected(request, work, lambda: None)
        return _rendered(prompt, chat, model, conversation.response_id("chatcmpl", chat, request))

    @app.post("/v1/chat/completions/render")
    async def render_chat(body: ChatRequest, request: Request) -> dict[str, Any]:
        service.unknown.settle(body, request.scope)
        return await rendered(body, service.check_model(body.model), request)

    @app.post("/v1/responses/render")
    async def render_response(body: ResponsesRequest, request: Request) -> dict[str, Any]:
        service.unknown.settle(body, request.scope)
        model = service.check_model(body.model)
        _, _, chat = responses.chat_of(store, body, request)
        return await rendered(chat, model, request)


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
