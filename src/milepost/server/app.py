"""The HTTP application: maps paths to their endpoints, and serves in a program's own server too."""

from __future__ import annotations

from functools import partial
from os import PathLike
from typing import Any, Unpack

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import milepost
from milepost.annexes import annex, is_installed
from milepost.config import EngineConfig
from milepost.engine.options import EngineOptions, read_options
from milepost.engine.processes import EngineClient, LoadedOnce
from milepost.errors import MilepostError, ServerClosingError
from milepost.server import api_docs, app, errors, operation, rendering
from milepost.server.anthropic import endpoint as anthropic
from milepost.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from milepost.server.bodies import BODY_SIZE, JsonRoute, size_of
from milepost.server.callers import Audience, Keys, admit, for_clients
from milepost.server.chat import chat
from milepost.server.completions import complete
from milepost.server.config import ServerConfig, read_keys
from milepost.server.errors import HttpError, body_for
from milepost.server.gate import Gate, with_cors
from milepost.server.loading import load
from milepost.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Invocation,
    TokenizeRequest,
    field_names,
)
from milepost.server.responses import endpoint as responses
from milepost.server.responses.protocol import ResponsesRequest
from milepost.server.service import Service
from milepost.server.stream import unless_disconnected


def build(service: Service) -> Any:
    """Returns the whole application around a service."""
    config = service.config
    keys = Keys(
        [*(config.api_key or ()), *read_keys("key_file", config.key_file)],
        [*(config.admin_key or ()), *read_keys("admin_key_file", config.admin_key_file)],
    )
    page = _page(config)
    quiet = frozenset() if page is None else page.PATHS
    gate = Gate(routed(service), config, keys, service.metrics.http, service.tracing, quiet)
    return with_cors(gate, config)


def _page(config: ServerConfig) -> Any:
    """Returns the annex that serves the page; None if it is not wanted or not installed."""
    return annex("page", wanted_by="ui") if config.ui and is_installed("page") else None


def routed(service: Service) -> FastAPI:
    """Returns all routes, each with its audience. Other paths are for clients, and return 404."""
    app = FastAPI(
        title="Milepost",
        version=milepost.__version__,
        description="OpenAI-compatible server for hybrid language models.",
        openapi_url=None,  # FastAPI's own routes have no audience
        strict_content_type=False,
    )
    app.router.route_class = JsonRoute
    app.router.redirect_slashes = False  # the gate removes them
    app.router.default = _nowhere
    app.state.large = service.large
    api_docs.add(app)
    _add_answers(app, service)
    _add_models(app, service)
    _add_stored_responses(app, service)
    operation.add(app, service)
    page = _page(service.config)
    if page is not None:
        page.add(app, service.client)
    _add_errors(app, service)
    assert all(isinstance(route, JsonRoute) for route in app.routes), "each states its audience"
    return app


async def _nowhere(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - as ASGI has it
    admit(scope, Audience.CLIENT)
    raise HTTPException(404)


def _add_answers(app: FastAPI, service: Service) -> None:
    """Adds the endpoints that answer a prompt, or render one."""
    meanings = {"responses": errors.MEANINGS}
    add = partial(_add_answer, app, service)
    add("/v1/completions", CompletionRequest, complete, name="completions", **meanings)
    add("/v1/chat/completions", ChatRequest, chat, name="chat_completions", **meanings)
    add("/invocations", Invocation, _invoke, name="invocations", **meanings)
    add("/v1/messages", MessagesRequest, anthropic.answer, name="messages", **meanings)
    add("/v1/responses", ResponsesRequest, responses.respond, name="respond", **meanings)
    counting = {"name": "count_tokens", **meanings}
    add("/v1/messages/count_tokens", CountTokensRequest, anthropic.count_tokens, **counting)
    add("/v1/responses/input_tokens", ResponsesRequest, responses.count_tokens, **counting)
    for path, body_type, render in rendering.ROUTES:
        add(path, body_type, render, name=render.__name__)
    few = {status: errors.MEANINGS[status] for status in (400, 404)}
    add("/tokenize", TokenizeRequest, rendering.tokenize, name="tokenize", responses=few)
    add("/detokenize", DetokenizeRequest, rendering.detokenize, name="detokenize", responses=few)


def _add_answer(
    app: FastAPI, service: Service, path: str, body_type: Any, answer: Any, **options: Any
) -> None:
    """Adds a POST route whose answers are responses. What `answer` does is cancelled if the client
    leaves; a stream that it returns notices that itself."""

    async def endpoint(body: Any, request: Request) -> Response:
        size = size_of(getattr(body, "messages", None)) + request.scope[BODY_SIZE]
        await service.large.run(lambda: service.unknown.settle(body, request.scope), size)
        return await unless_disconnected(request, answer(service, body, request))

    endpoint.__annotations__["body"] = body_type
    endpoint.__doc__ = answer.__doc__ if answer is _invoke else None
    app.post(path, response_class=Response, **options)(for_clients(endpoint))


async def _invoke(
    service: Service, body: ChatRequest | CompletionRequest, request: Request
) -> Response:
    """Answers a chat or a completion, since SageMaker sends both."""
    if isinstance(body, ChatRequest):
        return await chat(service, body, request)
    return await complete(service, body, request)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    @for_clients
    async def models(request: Request) -> dict[str, Any]:
        if anthropic.ANTHROPIC_VERSION in request.headers:
            return anthropic.models(service)
        return {"object": "list", "data": [_model(service, name) for name in service.names]}

    @app.get("/v1/models/{name:path}", responses={404: errors.MEANINGS[404]})
    @for_clients
    async def model(name: str, request: Request) -> dict[str, Any]:
        service.check_model(name)
        if anthropic.ANTHROPIC_VERSION in request.headers:
            return anthropic.model(service, name)
        return _model(service, name)


def _add_stored_responses(app: FastAPI, service: Service) -> None:
    store, owner_of = service.responses, responses.owner_of

    unknown: dict[str, Any] = {"responses": {404: errors.MEANINGS[404]}}

    @app.get("/v1/responses/{id_}", response_class=Response, **unknown)
    @for_clients
    async def stored(id_: str, request: Request) -> Response:
        return errors.json_response(store.find(owner_of(request), id_).body)

    @app.get("/v1/responses/{id_}/input_items", response_class=Response, **unknown)
    @for_clients
    async def input_items(id_: str, request: Request) -> Response:
        items = store.find(owner_of(request), id_).input_items
        ids = [item["id"] for item in items]
        ends = {"first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return errors.json_response({"object": "list", "data": items, **ends})

    @app.delete("/v1/responses/{id_}", **unknown)
    @for_clients
    async def delete(id_: str, request: Request) -> dict[str, Any]:
        store.delete(owner_of(request), id_)
        return {"id": id_, "object": "response", "deleted": True}


def _model(service: Service, name: str) -> dict[str, Any]:
    info = service.client.info
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "milepost",
        "max_model_len": service.client.limits.max_model_len,
        "input_modalities": ["text", *(() if info.images is None else info.images.modalities)],
        "max_request_bytes": service.config.max_request_bytes,
    }


def _add_errors(app: FastAPI, service: Service) -> None:
    fields = field_names()

    async def answer(request: Request, error: Exception) -> Response:
        path, root = request.scope["milepost.path"], request.scope["root_path"]
        if isinstance(error, RequestValidationError):
            error = errors.of_validation(error, fields)
        elif isinstance(error, HTTPException) and not isinstance(error, HttpError):
            error = errors.of_http(error, request.method, path, root)
        request.scope["milepost.record"]["error"] = errors.message_of(error)
        response = errors.response_of(error, body_for(path, error))
        service.metrics.refused.labels(str(response.status_code)).inc()
        return response

    for kind in (Exception, MilepostError, HttpError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


class EmbeddedServer:
    """Loads the model with the lifespan of its host, or else with the first request. Ends with the
    lifespan, by `close`, or with the program.

    A host that mounts it runs no lifespan for it: such a program calls `start` and `close`.
    """

    def __init__(self, config: ServerConfig, engine_config: EngineConfig) -> None:
        self._client = EngineClient(
            engine_config,
            max_waiting=config.max_waiting,
            step_timeout_s=config.step_timeout_s or None,
        )
        self._service = LoadedOnce(partial(load, config, engine_config, self._client))
        self._app: Any = None

    async def start(self) -> None:
        """Loads the model, unless that has begun. Raises ConfigError, UnsupportedModelError,
        WeightsError and EngineDeadError."""
        service = await self._service.get()
        self._app = self._app or app.build(service)

    async def close(self) -> None:
        """Ends the engine. Requests that are running fail, so have the host finish them first."""
        service = await self._service.end()
        if service is not None:
            service.is_closing = True
            self._client.fail_all(ServerClosingError("the server shut down"))
        await self._client.close()
        if service is not None:
            await service.close()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if self._app is None:
            await self.start()
        await self._app(scope, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        """Follows the protocol of lifespans. An exception fails the host's start."""
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})


def create_app(
    model: str | PathLike[str] | None = None,
    *,
    config: ServerConfig | None = None,
    **options: Unpack[EngineOptions],
) -> EmbeddedServer:
    """Returns the server of `milepost serve` as an ASGI application, with an engine of its own.

    Options are those of `LLM`; `config` has those of the server, without the ones that concern
    sockets and signals: these are the host's. Raises ConfigError.
    """
    return EmbeddedServer(config or ServerConfig(), read_options(model, options))
