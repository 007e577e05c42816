"""The HTTP application without an engine, for what ends before one is asked."""

from __future__ import annotations

import asyncio
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import httpx
from transformers import PreTrainedTokenizerFast

from milepost.config import EngineConfig
from milepost.engine.processes import EngineClient
from milepost.engine.validation import Limits, validate
from milepost.server import app
from milepost.server.config import ServerConfig
from milepost.server.service import Service
from tests import chatmodel

INFO = SimpleNamespace(
    page_size=64,
    sampling_defaults={},
    images=None,
    facts=SimpleNamespace(model_type="", device="cpu", fingerprint="", step_tokens=8192),
)

MAX_IN_FLIGHT = 100


LIMITS = Limits.of(
    EngineConfig(),
    vocab_size=448,
    max_model_len=4096,
    closes_reasoning=True,
)


def _refuse(prompts, params, **_options):
    """Validates as a client does; there is no engine to send to."""
    for prompt in prompts:
        validate(prompt, params, LIMITS)
    raise AssertionError("a request ends before an engine is asked")


def request_scope() -> dict[str, Any]:
    """Returns what the gate puts into a request's scope, without tracing."""
    own = {"record": {}, "arrival": 0.0, "span": None, "trace": None}
    return {f"milepost.{key}": value for key, value in own.items()}


class RenderedHere(PreTrainedTokenizerFast):
    """Renders conversations in its own way, so the server needs no process for them."""

    def apply_chat_template(self, *given: Any, **options: Any) -> Any:
        return super().apply_chat_template(*given, **options)


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return chatmodel.make_tokenizer(RenderedHere)


def service(config: ServerConfig, tokenizer: PreTrainedTokenizerFast | None = None) -> Service:
    """The tokenizer is the tiny model's if none is given; it renders conversations in a thread."""
    client = SimpleNamespace(
        info=INFO,
        config=EngineConfig(),
        death=None,
        num_in_flight=0,
        max_in_flight=MAX_IN_FLIGHT,
        limits=LIMITS,
        add=_refuse,
    )
    client.check_room = partial(EngineClient.check_room, client)
    return Service(config, client, tokenizer or _tokenizer(), ["tiny"])


def answered(
    config: ServerConfig, path: str, body=None, headers=None, tokenizer=None
) -> httpx.Response:
    """The response to one request: a POST if there is a body, in JSON or as bytes, else a GET."""
    kind = "content" if isinstance(body, bytes) else "json"

    async def send() -> httpx.Response:
        own = service(config, tokenizer)
        transport = httpx.ASGITransport(app.build(own), raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                method = "GET" if body is None else "POST"
                return await http.request(method, path, headers=headers, **{kind: body})
        finally:
            await own.close()

    return asyncio.run(send())
