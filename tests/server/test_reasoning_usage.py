"""How many tokens of a response were reasoning, however late the server comes to read them."""

import asyncio
from types import SimpleNamespace

import pytest

from milepost.engine.outputs import Delta, Output
from milepost.engine.processes.stream import Stream
from milepost.server import conversation
from milepost.server.config import ServerConfig
from milepost.server.protocol import ChatRequest
from milepost.server.responses.protocol import ResponsesRequest
from milepost.server.responses.tools import Names
from milepost.server.responses.writer import Writer
from milepost.server.service import Service
from tests import chatmodel
from tests.server.inprocess import request_scope, service

CLOSE = chatmodel.make_tokenizer().convert_tokens_to_ids("</think>")
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
THOUGHT = [("hm", 11), (" so", 12), ("\n", 13)]
CLOSED = [*THOUGHT, ("</think>", CLOSE), ("\n\n", 14)]


def counted(monkeypatch, pieces, joins):
    """Of an answer of these pieces, a token each; the server reads so many of them at once."""
    stream = Stream([1], 1, lambda _: None)
    steps = [[Delta(0, text, [token])] for text, token in pieces]
    steps.append([Delta(0, "", [15], finish_reason="stop")])

    async def arrive():
        for number, deltas in enumerate(steps):
            if number % joins == 0:
                while stream._pending[1]:
                    await asyncio.sleep(0)
            stream.put(Output(1, deltas, finished=number == len(steps) - 1))

    def submit(*_, **__):
        stream.arriving = asyncio.get_running_loop().create_task(arrive())
        return stream

    monkeypatch.setattr(Service, "submit", submit)

    async def run():
        own = service(ServerConfig())
        scope = request_scope()
        http = SimpleNamespace(scope=scope, receive=asyncio.Event().wait, headers={})
        chat = ChatRequest(
            messages=[{"role": "user", "content": "a"}],
            tools=[TOOL],
            chat_template_kwargs={"enable_thinking": True},
        )
        try:
            turn = await conversation.begin(own, chat, http, field="input")
            request = ResponsesRequest(input="a")
            return await Writer(request, turn, "tiny", Names(()), lambda _: None).whole()
        finally:
            await own.close()

    usage = asyncio.run(run())["usage"]
    assert usage["output_tokens"] == len(steps)
    return usage["output_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("joins", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([*CLOSED, ("yes", 16), (" yes", 17)], 4),
        ([*CLOSED, (CALL[:12], 16), (CALL[12:], 17)], 4),
        (THOUGHT, 4),
        ([("\n", 13), ("</think>", CLOSE), ("yes", 16)], 0),
    ],
    ids=["text", "a call", "never closed", "nothing thought"],
)
def test_it_does_not_depend_on_when_the_answer_is_read(monkeypatch, pieces, expected, joins):
    assert counted(monkeypatch, pieces, joins) == expected
