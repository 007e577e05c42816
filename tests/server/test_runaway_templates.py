"""Chat templates that take for ever, or all memory: they cost their own request, and no other."""

from __future__ import annotations

import asyncio
import json

import pytest
from transformers import PreTrainedTokenizer

from milepost.engine import child
from milepost.engine.prompts import Prompt
from milepost.engine.text import chat
from milepost.engine.text.encoder import Encoder
from milepost.errors import InvalidRequestError
from milepost.server.config import ServerConfig
from tests import chatmodel, forked
from tests.engine.test_parent import is_running
from tests.server.inprocess import answered
from tests.waiting import until

RUNAWAY = """\
{%- for message in messages %}
{%- set text = message.content %}
{%- if text == 'loop' %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif text == 'power' %}{{ (10 ** (text | length)) ** (10 ** 9) }}
{%- elif text == 'count' %}{% set parts = [text] * 10 ** 4 -%}
{{ ([parts + [0]] * 10 ** 7).count(parts + [1]) }}
{%- elif text == 'memory' %}{{ (text * 10 ** 10) | length }}
{%- elif text == 'list' %}{{ ([text] * 10 ** 9) | length }}
{%- elif text == 'length' %}{{ text * 10 ** 7 }}
{%- elif text == 'zero' %}{{ 1 // (text | length - 4) }}
{%- elif text == 'quote' %}{{ raise_exception('no' * 10 ** 6) }}
{%- elif text == 'deep' %}{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}
{%- endif %}{{ '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}"""
REFUSED = {
    "loop": "takes more than 0.5 seconds to render",
    "power": "takes more than 0.5 seconds to render",
    "count": "takes more than 0.5 seconds to render",
    "memory": "takes more than 2048 MiB to render",
    "list": "takes more than 2048 MiB to render",
    "length": r"makes 600000\d\d characters of the messages",
    "zero": "refuses the messages: integer division",
    "quote": r"refuses the messages: (no){500}$",
    "deep": "refuses the messages: maximum recursion",
}


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    """Processes begin where their imports end."""
    monkeypatch.setattr(child, "start_process", forked.start_helper)


def encoder(template: str = RUNAWAY, *, timeout_s: float = 0.5) -> Encoder:
    tokenizer = chatmodel.make_tokenizer()
    tokenizer.chat_template = template
    return Encoder(tokenizer, 4096, template_timeout_s=timeout_s)


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def render(encoder: Encoder, text: str) -> Prompt:
    return await encoder.encode_chat(said(text), len(text), {}, is_cut=False)


def served(work) -> None:
    async def all_of_it() -> None:
        own = encoder()
        try:
            await work(own)
        finally:
            await own.close()

    asyncio.run(all_of_it())


def test_what_a_template_may_not_take_ends_its_request_alone():
    """And only what runs in C beyond the second limit costs a new process. `count` would take
    minutes there: if it ended before that limit, its process would rightly stay."""

    async def all_kinds(own: Encoder) -> None:
        expected = (await render(own, "fine")).token_ids
        pid = own._lanes._chats.pid
        for text, why in REFUSED.items():
            refused = asyncio.ensure_future(render(own, text))
            fine = await asyncio.gather(*(render(own, "fine") for _ in range(3)))
            assert [prompt.token_ids for prompt in fine] == [expected] * 3
            with pytest.raises(InvalidRequestError, match=why):
                await refused
            assert (own._lanes._chats.pid == pid) == (text != "count")
            pid = own._lanes._chats.pid

    served(all_kinds)


def test_a_short_conversation_that_takes_long_does_not_hold_up_others():
    """It has a second, then it goes on among the long ones, until its caller leaves or the server
    closes."""

    async def both() -> None:
        own = encoder(timeout_s=600)
        await render(own, "fine")
        for ends in (lambda task: task.cancel(), lambda _: None):
            endless = asyncio.ensure_future(render(own, "loop"))
            while own._lanes._process.pid is None:
                await asyncio.sleep(0.01)
            assert await render(own, "fine")
            assert not endless.done()
            pids = [own._lanes._process.pid]
            ends(endless)
            if endless.cancelling():
                await asyncio.gather(endless, return_exceptions=True)
                until(lambda pids=pids: not is_running(pids[0]))
        pids.append(own._lanes._chats.pid)
        await own.close()
        assert not any(is_running(pid) for pid in pids)
        with pytest.raises(InvalidRequestError, match="ended its process"):
            await endless

    asyncio.run(both())


def test_a_caller_that_left_costs_the_next_no_new_process():
    async def left(own: Encoder) -> None:
        expected = await render(own, "fine")
        pid = own._lanes._chats.pid
        for _ in range(5):
            given_up = asyncio.ensure_future(render(own, "fine"))
            while own._lanes._begun.done():
                await asyncio.sleep(0)
            given_up.cancel()
            assert await render(own, "fine") == expected
        assert own._lanes._chats.pid == pid

    served(left)


def test_a_client_hears_of_it():
    tokenizer = chatmodel.make_tokenizer()
    tokenizer.chat_template = RUNAWAY
    config = ServerConfig(template_timeout_s=0.5)
    body = {"messages": said("loop")}
    response = answered(config, "/tokenize", body, tokenizer=tokenizer)
    assert response.status_code == 400
    assert "takes more than 0.5 seconds" in response.json()["error"]["message"]


# --- what is rendered in a process is what the tokenizer itself would render ----------------------

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"const": 10**30}}}]
CONVERSATIONS = [
    (said("é 中 <|im_end|> <think>"), {}),
    (
        [
            {"role": "system", "content": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": "x"},
        ],
        {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}},
    ),
    (
        [*said("a"), {"role": "assistant", "content": "b "}],
        {"continue_final_message": True},
    ),
    (said("word " * 20_000), {"add_generation_prompt": False}),
]


class Letters(PreTrainedTokenizer):
    """Written in Python: it is not known to the process."""

    vocab_size = 2**10

    def get_vocab(self):
        return {chr(i): i for i in range(self.vocab_size)}

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token) % self.vocab_size


class OwnRenderer(Letters):
    def apply_chat_template(self, conversation, **_):
        return "".join(message.get("content") or "" for message in conversation)


@pytest.mark.parametrize("kind", ["fast", "python", "own"])
def test_prompts_are_those_of_the_tokenizer(kind):
    tokenizer = chatmodel.make_tokenizer()
    if kind != "fast":
        slow = (Letters if kind == "python" else OwnRenderer)(eos_token="<|im_end|>")
        slow.chat_template = tokenizer.chat_template
        tokenizer = slow

    async def all_of_them() -> None:
        own = Encoder(tokenizer, 2**20)
        for messages, options in CONVERSATIONS:
            size = len(json.dumps(messages))
            prompt = await own.encode_chat(messages, size, options, is_cut=False)
            assert prompt == chat.render(tokenizer, messages, **options)
        assert (own._lanes._chats.pid is None) == (kind == "own")
        await own.close()

    asyncio.run(all_of_them())
