"""Endpoints that return a prompt's tokens and generate nothing: /tokenize, /detokenize, and
`/render` after the paths that take prompts.

Routers look with `/render` for the server with the longest cached prefix. They cannot render a
prompt themselves, since a template reads more than the messages. Requests that would be refused are
refused here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from milepost.engine.prompts import Prompt
from milepost.engine.text import text_of
from milepost.server import completions, conversation
from milepost.server.errors import HttpError, json_response
from milepost.server.messages import tools_for_template
from milepost.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from milepost.server.responses import endpoint as responses
from milepost.server.responses.protocol import ResponsesRequest
from milepost.server.service import Service


async def tokenize(service: Service, body: TokenizeRequest, _: Request) -> Response:
    """Returns the tokens of a prompt or of a conversation."""
    service.check_model(body.model)
    tokens, marks = await _tokenized(service, body)
    names = None
    if body.return_token_strs:
        names = await service.encoder.with_tokenizer(
            lambda tokenizer: tokenizer.convert_ids_to_tokens(tokens), len(tokens)
        )
    found = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": service.client.limits.max_model_len,
        "cache_marks": marks,
        "token_strs": names,
    }
    return await service.large.run(lambda: json_response(found), len(tokens))


async def detokenize(service: Service, body: DetokenizeRequest, _: Request) -> Response:
    """Returns the text of token ids."""
    service.check_model(body.model)
    vocab_size = service.client.limits.vocab_size

    def detokenized(tokenizer: Any) -> str:
        for index, token in enumerate(body.tokens):
            if token >= vocab_size:
                field = f"tokens[{index}]"
                message = f"{field}={token}: the vocabulary has {vocab_size} tokens"
                raise HttpError(400, message, param=field)
        return text_of(tokenizer, body.tokens)

    text = await service.encoder.with_tokenizer(detokenized, len(body.tokens))
    return await service.large.run(lambda: json_response({"prompt": text}), len(text))


async def _tokenized(service: Service, body: TokenizeRequest) -> tuple[list[int], list[int]]:
    """Returns token ids and marks."""
    if body.prompt is not None:
        (tokens,) = await service.encoder.encode(
            [body.prompt], is_cut=True, add_special_tokens=body.add_special_tokens
        )
        return tokens, []
    rendered = await service.render(
        body,
        tools=tools_for_template(body.tools),
        template_kwargs=body.chat_template_kwargs,
        is_cut=True,
    )
    return list(rendered.token_ids), list(rendered.cache_marks)


async def render_completion(
    service: Service, body: CompletionRequest, request: Request
) -> Response:
    """Returns the prompts of a completion."""
    model = service.check_model(body.model)
    prompts, params = await completions.asked(service, body)
    for prompt in prompts:
        service.check(prompt, params, "prompt")
    id_ = conversation.response_id("cmpl", body, request)
    return json_response([_rendered(prompt, body, model, id_) for prompt in prompts])


async def render_chat(service: Service, body: ChatRequest, request: Request) -> Response:
    """Returns the prompt of a chat."""
    return await _render(service, body, request, field="messages", fits_max_tokens=False)


async def render_response(service: Service, body: ResponsesRequest, request: Request) -> Response:
    """Returns the prompt of a response."""
    service.check_model(body.model)
    _, _, converted = await responses.chat_of(service, body, request)
    return await _render(service, converted.chat, request, field="input", fits_max_tokens=True)


ROUTES: Sequence[tuple[str, Any, Any]] = (
    ("/v1/completions/render", CompletionRequest, render_completion),
    ("/v1/chat/completions/render", ChatRequest, render_chat),
    ("/v1/responses/render", ResponsesRequest, render_response),
)
"""Path, type of the body and handler of each /render, with vLLM's bodies and answers."""


async def _render(
    service: Service, chat: ChatRequest, request: Request, *, field: str, fits_max_tokens: bool
) -> Response:
    model = service.check_model(chat.model)
    prompt, params = await conversation.asked(
        service, chat, request, fits_max_tokens=fits_max_tokens
    )
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
        prompt, _ = await conversation.asked(service, chat, Request(scope))
        return prompt
    if not path.endswith("/completions"):
        return None
    request = CompletionRequest.model_validate_json(body)
    if completions.num_prompts(request) > 1:
        return None
    (prompt,), _ = await completions.asked(service, request)
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
