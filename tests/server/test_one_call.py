"""Answers that may have one tool call, however late the server comes to read them."""

import asyncio
from types import SimpleNamespace

from milepost.engine.outputs import Delta, Output
from milepost.engine.processes.stream import Stream
from milepost.server import conversation
from milepost.server.chat import _ChatWriter
from milepost.server.config import ServerConfig
from milepost.server.protocol import ChatRequest
from milepost.server.service import Service
from tests.server.inprocess import request_scope, service

CALL = ["<tool_call>\n", '{"name": "now", "arguments": {}}', "\n</tool_call>"]
STEPS = [
    [Delta(0, CALL[0], [1]), Delta(1, "it", [1])],
    [Delta(0, CALL[1], [2]), Delta(1, CALL[0], [2])],
    [Delta(0, CALL[2], [3]), Delta(1, CALL[1], [3])],
    [Delta(0, CALL[0], [4]), Delta(1, CALL[2], [4])],
    [Delta(0, CALL[1], [5]), Delta(1, " and", [5])],
    [Delta(0, CALL[2], [6], finish_reason="stop"), Delta(1, " so", [6], finish_reason="stop")],
]
"""The first answer's call is whole after three steps, the second's after four."""


def answered(monkeypatch, *, all_at_once: bool):
    """The body of a response whose steps had all come before it was read, or one after another."""
    given_up = []

    def forget(stream):
        given_up.append(bool(stream.open))

    def submit(_, prompts, params, *, keeps_steps, **__):
        stream = Stream([1], params.n, forget, keeps_steps=keeps_steps)
        loop = asyncio.get_running_loop()
        for number, deltas in enumerate(STEPS):
            output = Output(1, deltas, finished=number == len(STEPS) - 1)
            if all_at_once:
                stream.put(output)
            else:
                loop.call_later(0.01 * number, stream.put, output)
        return stream

    monkeypatch.setattr(Service, "submit", submit)
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    request = ChatRequest(
        messages=[{"role": "user", "content": "a"}],
        n=2,
        tools=[tool],
        parallel_tool_calls=False,
        return_token_ids=True,
    )

    async def run():
        own = service(ServerConfig())
        scope = request_scope()
        http = SimpleNamespace(scope=scope, receive=asyncio.Event().wait, headers={})
        try:
            turn = await conversation.begin(own, request, http, field="messages")
            return await _ChatWriter(own, turn, "1", "tiny").whole()
        finally:
            await own.close()

    return asyncio.run(run()), given_up


def test_usage_does_not_depend_on_when_the_answers_are_read(monkeypatch):
    bodies = []
    for all_at_once in (True, False):
        body, given_up = answered(monkeypatch, all_at_once=all_at_once)
        assert given_up == [not all_at_once]  # read in time, the engine is told to stop
        assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls"] * 2
        assert [len(choice["message"]["tool_calls"]) for choice in body["choices"]] == [1, 1]
        assert [choice["token_ids"] for choice in body["choices"]] == [[1, 2, 3], [1, 2, 3, 4]]
        assert body["usage"]["completion_tokens"] == 7
        bodies.append(body["choices"])
    for choice in (choice for body in bodies for choice in body):
        for call in choice["message"]["tool_calls"]:
            del call["id"]
    assert bodies[0] == bodies[1]
