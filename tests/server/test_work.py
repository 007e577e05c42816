"""Streams of an engine that is made up: how much the HTTP process does for each token, in calls of
functions, and what comes last."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

from milepost.engine.outputs import Delta, Output
from milepost.server import conversation
from milepost.server.chat import _ChatWriter
from milepost.server.config import ServerConfig
from milepost.server.generation import Generation
from milepost.server.protocol import ChatRequest
from milepost.server.service import Service
from tests.server.inprocess import answered, request_scope, service

NUM_TOKENS = 200
MAX_CALLS = 40
"""Of functions and built-ins for each token; 34 when this was written."""


class Arriving:
    """Answers that come a token at a time, as the engine sends them."""

    def __init__(self):
        self.num = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.num += 1
        if self.num > NUM_TOKENS:
            raise StopAsyncIteration
        reason = "length" if self.num == NUM_TOKENS else None
        output = Output(1, [Delta(0, " a", [7], finish_reason=reason)], reason is not None)
        return [(0, output)]

    def close(self):
        pass


def test_a_streamed_token_takes_few_calls(monkeypatch):
    monkeypatch.setattr(Service, "submit", lambda *_, **__: Arriving())
    request = ChatRequest(messages=[{"role": "user", "content": "a"}], stream=True)
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    async def stream():
        own = service(ServerConfig())
        scope = request_scope()
        http = SimpleNamespace(scope=scope, receive=asyncio.Event().wait, headers={})
        try:
            turn = await conversation.begin(own, request, http, field="messages")
            assert isinstance(turn.generation, Generation)
            events = _ChatWriter(own, turn, "1", "tiny").events()
            sys.setprofile(count)
            found = [event async for event in events]
            sys.setprofile(None)
            return found
        finally:
            sys.setprofile(None)
            await own.close()

    asyncio.run(stream())  # patterns of tags are compiled once for the process
    num_calls = 0
    found = asyncio.run(stream())
    assert len(found) == NUM_TOKENS + 1
    assert num_calls / NUM_TOKENS < MAX_CALLS


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
    ],
)
@pytest.mark.parametrize("is_forced", [False, True])
def test_usage_that_the_operator_wants_is_told(monkeypatch, path, body, is_forced):
    monkeypatch.setattr(Service, "submit", lambda *_, **__: Arriving())
    config = ServerConfig(enable_force_include_usage=is_forced)
    for options in ({}, {"stream_options": {"include_usage": False}}):
        response = answered(config, path, {**body, "model": "tiny", "stream": True, **options})
        *events, done = response.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        last = json.loads(events[-1].removeprefix("data: "))
        assert (last["choices"] == []) is is_forced
        assert (last.get("usage") or {}).get("completion_tokens") == (200 if is_forced else None)
