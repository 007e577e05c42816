"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from milepost.server import errors
from milepost.server.callers import for_clients
from milepost.server.errors import HttpError
from milepost.server.messages import tools_for_template
from milepost.server.protocol import DetokenizeRequest, TokenizeRequest
from milepost.server.service import Service
from milepost.server.stream import unless_disconnected


def add(app: FastAPI, service: Service) -> None:
    """Adds both paths."""
    meanings = {status: errors.MEANINGS[status] for status in (400, 404)}

    @app.post("/tokenize", responses=meanings, response_class=Response)
    @for_clients
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service.unknown.settle(body, request.scope)
        service.check_model(body.model)
        tokens, marks = await unless_disconnected(request, _tokenized(service, body))
        names = None
        if body.return_token_strs:
            names = await service.encoder.with_tokenizer(
                lambda tokenizer: tokenizer.convert_ids_to_tokens(tokens), len(tokens)
            )
        found = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": service.client.info.max_model_len,
            "cache_marks": marks,
            "token_strs": names,
        }
        return errors.json_response(found)

    @app.post("/detokenize", responses=meanings)
    @for_clients
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        service.unknown.settle(body, request.scope)
        service.check_model(body.model)
        vocab_size = service.client.info.vocab_size
        for index, token in enumerate(body.tokens):
            if token >= vocab_size:
                field = f"tokens[{index}]"
                message = f"{field}={token}: the vocabulary has {vocab_size} tokens"
                raise HttpError(400, message, param=field)
        text = await service.encoder.with_tokenizer(
            lambda t: t.decode(body.tokens), len(body.tokens)
        )
        return {"prompt": text}


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
    return rendered.token_ids, list(rendered.marks)
