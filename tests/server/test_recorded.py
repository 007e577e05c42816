"""One answer of a model through chat, Responses and Messages, streamed and whole: the same."""

import asyncio
import json
import random
import re
from collections import defaultdict

import httpx
import pytest

from milepost.engine.outputs import Delta, Logprob, Output
from milepost.engine.processes.stream import Stream
from milepost.server import app
from milepost.server.config import ServerConfig
from milepost.server.service import Service
from tests import chatmodel
from tests.server.inprocess import RenderedHere, service

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}},
}
NAMES = ("f", "g")
XML = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
A = "<parameter=a>\n1\n</parameter>\n"
KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"


def call(name="f", own_id="", **arguments):
    return "call", own_id, name, arguments


RECORDED = {
    "text": ("hermes", "Hello, Zürich 🙂\n\nand more", [("text", "Hello, Zürich 🙂\n\nand more")]),
    "reasoning": (
        "hermes",
        "<think>\nhm\n\nso\n</think>\n\nyes",
        [("reasoning", "hm\n\nso"), ("text", "yes")],
    ),
    "text between calls": (
        "hermes",
        'One.\n<tool_call>\n{"name": "f", "arguments": {"s": "é\\n"}}\n</tool_call>\nTwo.\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n\nThree.',
        [("text", "One."), call(s="é\n"), ("text", "Two."), call("g"), ("text", "Three.")],
    ),
    "a call in reasoning, and a late tag": (
        "qwen3_coder",
        f"<think>\nI call <tool_call>, so {XML.format(A)}\n</think>\n\nDone.",
        [("reasoning", "I call <tool_call>, so "), call(a=1), ("text", "Done.")],
    ),
    "tags that are missing": (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\nx\n<parameter=l>\n['a']\n</parameter>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [call(s="x", l=["a"]), call("g")],
    ),
    "ids of the model": (
        "kimi_k2",
        "<think>hm "
        + SECTION.format(
            KIMI.format("functions.f:3", '{"a": 1}') + KIMI.format("functions.g:4", "")
        ),
        [("reasoning", "hm "), call(own_id="functions.f:3", a=1), call("g", "functions.g:4")],
    ),
    "one id twice": (
        "kimi_k2",
        SECTION.format(KIMI.format("functions.f:0", "{}") * 2),
        [call(own_id="functions.f:0"), call()],
    ),
    "pythonic": (
        "lfm2",
        "Well. <|tool_call_start|>[f(1, s='''x\ny'''), g(**{'b': (1, 2)})]<|tool_call_end|>Done",
        [("text", "Well."), call(a=1, s="x\ny"), call("g", b=[1, 2]), ("text", "Done")],
    ),
    "a malformed call": (
        "hermes",
        'So <tool_call>{"name": "f", "arguments": [1]}</tool_call>.',
        [("text", 'So <tool_call>{"name": "f", "arguments": [1]}</tool_call>.')],
    ),
    "a call that the model left open": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {\'s\': "x',
        [call(s="x")],
    ),
    "a call that was cut off": (
        "hermes",
        'So <tool_call>{"name": "f", "arguments": {"a": 1, "s": "x',
        [("text", "So"), ("call", "", "f", '{"a": 1, "s": "x')],
    ),
}
TOOL = {"description": "d"}
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, **TOOL}} for name in NAMES
]
BODIES = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "tools": FUNCTIONS,
    },
    "/v1/responses": {
        "input": "a",
        "tools": [{"type": "function", **each["function"]} for each in FUNCTIONS],
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 99,
        "tools": [{"name": name, "input_schema": SCHEMA, **TOOL} for name in NAMES],
    },
}


def pieces_of(text, seed):
    pick = random.Random(seed)
    places = sorted(pick.sample(range(1, len(text)), min(len(text) - 1, 9)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.fixture(scope="module")
def tokenizer():
    return chatmodel.make_tokenizer(RenderedHere)


@pytest.fixture
def send(monkeypatch, tokenizer):
    """Posts bodies to one server, whose model gives answers of these pieces, a token each."""

    def send(config, requests, *, reason="stop", stop_reason=None, logprobs=False):
        """[(response, params)] of requests: (path, body, pieces)."""
        seen, answer = [], []

        def submit(_, prompts, params, **__):
            seen.append(params)
            stream = Stream([1], 1, lambda _: None)
            for number, text in enumerate([*answer, ""]):
                is_last = number == len(answer)
                score = Logprob(logprob=-0.5, rank=1, decoded_token=text)
                delta = Delta(
                    0,
                    text,
                    [5000 + number],
                    [{5000 + number: score}] if logprobs else None,
                    finish_reason=reason if is_last else None,
                    stop_reason=stop_reason if is_last else None,
                )
                stream.put(Output(1, [delta], finished=is_last))
            return stream

        monkeypatch.setattr(Service, "submit", submit)

        async def run():
            own = service(config, tokenizer)
            transport = httpx.ASGITransport(app.build(own))
            responses = []
            try:
                async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                    for path, body, pieces in requests:
                        answer[:] = pieces
                        responses.append(await http.post(path, json=body))
            finally:
                await own.close()
            return responses

        responses = asyncio.run(run())
        assert [each.status_code for each in responses] == [200] * len(requests)
        return list(zip(responses, seen, strict=True))

    return send


def events_of(text):
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# --- each API's form, as items --------------------------------------------------------------------


def of_chat(body):
    message = body["choices"][0]["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    return (
        message.get("reasoning") or "",
        message["content"] or "",
        [
            (each["id"], each["function"]["name"], each["function"]["arguments"])
            for each in message.get("tool_calls", ())
        ],
        body["choices"][0]["finish_reason"],
    )


def of_chat_stream(events):
    choices = [event["choices"][0] for event in events]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0]["role"] == "assistant"
    calls = []
    for delta in deltas:
        for each in delta.get("tool_calls", ()):
            if "id" in each:
                assert each["index"] == len(calls)
                calls.append([each["id"], each["function"]["name"], ""])
            assert each["index"] == len(calls) - 1
            calls[-1][2] += each["function"]["arguments"]
    return (
        "".join(delta.get("reasoning", "") for delta in deltas),
        "".join(delta.get("content", "") for delta in deltas),
        [tuple(each) for each in calls],
        choices[-1]["finish_reason"],
    )


def of_response(body):
    items = []
    for item in body["output"]:
        if item["type"] == "function_call":
            items.append(("call", item["call_id"], item["name"], item["arguments"]))
        else:
            (part,) = item["content"]
            kind = "reasoning" if item["type"] == "reasoning" else "text"
            items.append((kind, part["text"]))
    return items, body["status"]


def of_response_stream(events):
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    texts, added, done = defaultdict(str), [], []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(added) == len(done)
            added.append(event["item"])
        elif kind == "response.output_item.done":
            assert event["output_index"] == len(done) == len(added) - 1
            done.append(event["item"])
        elif kind.endswith(".delta"):
            assert event["item_id"] == added[event["output_index"]]["id"]
            texts[event["output_index"]] += event["delta"]
        elif kind.endswith(("text.done", "arguments.done")):
            whole = event.get("text", event.get("arguments"))
            assert whole == texts[event["output_index"]]
    last = events[-1]["response"]
    assert done == last["output"]
    for item, begun in zip(done, added, strict=True):
        assert [item.get(key) for key in ("id", "type", "call_id", "name")] == [
            begun.get(key) for key in ("id", "type", "call_id", "name")
        ]
    assert [item[-1] for item in of_response(last)[0]] == list(texts.values())
    return of_response(last)


def of_message(body):
    items = []
    for block in body["content"]:
        if block["type"] == "tool_use":
            items.append(("call", block["id"], block["name"], block["input"]))
        else:
            kind = "reasoning" if block["type"] == "thinking" else "text"
            items.append((kind, block.get("thinking", block.get("text"))))
    return items, body["stop_reason"]


def of_message_stream(events):
    """As Anthropic's client gathers it."""
    from pydantic_core import from_json

    blocks, gained = [], defaultdict(str)
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            if delta["type"] != "signature_delta":
                gained[event["index"]] += delta[
                    delta["type"].replace("_delta", "").replace("input_json", "partial_json")
                ]
    for index, block in enumerate(blocks):
        if block["type"] == "tool_use":
            block["input"] = from_json(gained[index], allow_partial=True)
        else:
            block["thinking" if block["type"] == "thinking" else "text"] = gained[index]
    (end,) = [event for event in events if event["type"] == "message_delta"]
    return of_message({"content": blocks, "stop_reason": end["delta"]["stop_reason"]})


READERS = {
    "/v1/chat/completions": (of_chat, of_chat_stream),
    "/v1/responses": (of_response, of_response_stream),
    "/v1/messages": (of_message, of_message_stream),
}
GIVEN = {
    "/v1/chat/completions": r"call_[0-9a-f]{24}",
    "/v1/responses": r"call_[0-9a-f]{24}",
    "/v1/messages": r"toolu_[0-9a-f]{24}",
}
"""Ids of calls whose model has none."""


def plain(items, path):
    """With arguments as objects, and what is not the model's own id left out."""
    found, ids = [], set()
    for item in items:
        if item[0] != "call":
            found.append(item)
            continue
        _, id_, name, given = item
        assert id_ not in ids
        ids.add(id_)
        own = "" if re.fullmatch(GIVEN[path], id_) else id_
        found.append(("call", own, name, objects(given)))
    return found


def objects(given):
    if isinstance(given, dict):
        return given
    try:
        found = json.loads(given)
    except ValueError:
        return given
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_all_apis_say_the_same_of_one_answer(send, name):
    parser, text, expected = RECORDED[name]
    config = ServerConfig(tool_call_parser=parser, reasoning_parser="qwen3")
    is_cut = name.endswith("was cut off")
    requests = [
        (path, {**body, "stream": stream}, pieces_of(text, seed=number))
        for number, (path, body) in enumerate(BODIES.items())
        for stream in (False, True)
    ]
    sent = send(config, requests, reason="length" if is_cut else "stop")
    found = defaultdict(list)
    for (path, body, _), (response, _) in zip(requests, sent, strict=True):
        whole, streamed = READERS[path]
        read = streamed(events_of(response.text)) if body["stream"] else whole(response.json())
        found[path].append(read)

    has_calls = any(item[0] == "call" for item in expected)
    check_chat(found.pop("/v1/chat/completions"), expected, is_cut=is_cut)
    for items, end in found["/v1/responses"]:
        assert plain(items, "/v1/responses") == expected
        assert end == ("incomplete" if is_cut else "completed")
    for items, end in found["/v1/messages"]:
        # an input is an object, as far as it came
        wanted = [
            (*item[:3], {"a": 1})
            if has_calls and isinstance(item[-1], str) and len(item) > 2
            else item
            for item in expected
        ]
        assert plain(items, "/v1/messages") == wanted
        assert end == ("max_tokens" if is_cut else "tool_use" if has_calls else "end_turn")


def check_chat(results, expected, *, is_cut):
    path = "/v1/chat/completions"
    calls = [item for item in expected if item[0] == "call"]
    end = "length" if is_cut else "tool_calls" if calls else "stop"
    for reasoning, content, found, reason in results:
        assert reasoning == "".join(item[1] for item in expected if item[0] == "reasoning")
        assert content == "\n".join(item[1] for item in expected if item[0] == "text")
        assert plain([("call", *each) for each in found], path) == calls
        assert reason == end


def test_each_text_of_a_response_has_its_own_logprobs(send):
    pieces = [
        *("<think>", "hm", "</think>", "\n", "One", ".", "\n", "<tool_call>\n", '{"name": "f", '),
        *('"arguments": {}}', "\n</tool_call>", "\nTw", "o", ".\n"),
    ]
    body = {**BODIES["/v1/responses"], "include": ["message.output_text.logprobs"]}
    requests = [("/v1/responses", {**body, "stream": stream}, pieces) for stream in (False, True)]
    for response, _ in send(ServerConfig(), requests, logprobs=True):
        is_stream = response.headers["content-type"].startswith("text/event-stream")
        done = events_of(response.text)[-1]["response"] if is_stream else response.json()
        found = [
            [entry["token"] for entry in item["content"][0]["logprobs"]]
            for item in done["output"]
            if item["type"] == "message"
        ]
        assert found == [["One", "."], ["\nTw", "o", ".\n"]]


def test_stop_strings_count_behind_the_reasoning_in_chat_and_messages(send, tokenizer):
    opens, closes = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    chat, messages = "/v1/chat/completions", "/v1/messages"
    stops = {chat: {"stop": ["\n\n"]}, messages: {"stop_sequences": ["\n\n"]}}
    thinking = {
        chat: {"chat_template_kwargs": {"enable_thinking": True}},
        messages: {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    }
    for path in (chat, messages):
        body = {**BODIES[path], **stops[path]}
        requests = [(path, body, ["hm"]), (path, {**body, **thinking[path]}, ["hm"])]
        requests.append((path, BODIES[path], ["hm"]))
        found = [params.reasoning for _, params in send(ServerConfig(), requests)]
        assert [(each.opens, each.closes) for each in found[:2]] == [(opens, closes)] * 2
        assert [each.is_open for each in found[:2]] == [False, True]
        assert found[2] is None
        plain = ServerConfig(reasoning_parser="none")
        assert send(plain, requests[:1])[0][1].reasoning is None


def test_a_stop_string_cuts_a_call_off(send):
    """Closed, it would say what the model had not meant."""
    pieces = ['<tool_call>{"name": "f", "arguments": {"s": "a']
    path = "/v1/chat/completions"
    ((response, _),) = send(ServerConfig(), [(path, BODIES[path], pieces)], stop_reason="b")
    (each,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert each["function"]["arguments"] == '{"s": "a'
