"""Anthropic's official client against a real server."""

import re
from typing import get_args, get_type_hints

import anthropic
import pytest
from anthropic.types import ThinkingConfigParam
from anthropic.types.beta import BetaThinkingConfigParam

from milepost.server.anthropic.protocol import Thinking
from milepost.server.config import ServerConfig
from tests.server.inprocess import answered

HELLO = [{"role": "user", "content": "the quick brown fox"}]
GREEDY = {"model": "tiny", "max_tokens": 8, "extra_body": {"temperature": 0}}
LONG = "you are a helpful assistant. " * 20
TOOL = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bern", "Uster"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALLED = [
    *HELLO,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "let me see"},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Bern"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "and?"},
            {"type": "tool_result", "tool_use_id": "t1", "content": "sunny", "is_error": False},
        ],
    },
]
"""A turn of an agent."""
DEFINED = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL}}


@pytest.fixture(scope="module")
def official(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_is_what_chat_says(official, client):
    said = official.messages.create(messages=HELLO, system="be brief", **GREEDY)
    chat = client.chat.completions.create(
        model="tiny",
        max_tokens=8,
        temperature=0,
        messages=[{"role": "system", "content": "be brief"}, *HELLO],
    )
    assert text_of(said) == chat.choices[0].message.content
    assert (said.role, said.model, said.stop_reason) == ("assistant", "tiny", "max_tokens")
    assert (said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0)) == (
        chat.usage.prompt_tokens
    )
    assert said.usage.output_tokens == 8


def test_blocks_without_citations_have_no_such_field(official):
    """Vercel's client takes none for null."""
    raw = official.messages.with_raw_response.create(messages=HELLO, **GREEDY)
    assert {"type", "text"} == set(raw.http_response.json()["content"][0])


def test_streamed_is_the_same(official):
    whole = official.messages.create(messages=HELLO, **GREEDY)
    with official.messages.stream(messages=HELLO, **GREEDY) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "thinking")]
        gathered = stream.get_final_message()
    assert text_of(gathered) == text_of(whole)
    assert gathered.stop_reason == whole.stop_reason
    assert gathered.usage.output_tokens == whole.usage.output_tokens
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_cache_control_is_a_mark_and_usage_tells_of_it(official):
    head = {"type": "text", "text": f"for cache control only. {LONG}"}
    marked = {**head, "cache_control": {"type": "ephemeral"}}
    options = {"messages": HELLO, **GREEDY}
    total = official.messages.count_tokens(
        model="tiny", messages=HELLO, system=[marked]
    ).input_tokens
    first = official.messages.create(system=[marked], **options).usage
    assert first.cache_read_input_tokens == 0
    assert 100 < first.cache_creation_input_tokens < total
    assert first.cache_creation_input_tokens + first.input_tokens == total
    other = [{"role": "user", "content": "something else, 日本語"}]
    second = official.messages.create(system=[marked], **{**options, "messages": other}).usage
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens - 8
    unmarked = official.messages.create(system=[head], **options).usage
    assert unmarked.cache_creation_input_tokens == 0


def test_a_billing_line_before_the_system_prompt_is_dropped(official):
    line = {"type": "text", "text": "x-anthropic-billing-header: cch=12ab;"}
    system = [{"type": "text", "text": "be brief"}]
    counts = [
        official.messages.count_tokens(model="tiny", messages=HELLO, system=given).input_tokens
        for given in (system, [line, *system])
    ]
    assert counts[0] == counts[1]


def test_thinking_comes_in_blocks_of_its_own(official):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    said = official.messages.create(messages=HELLO, thinking=thinking, **GREEDY)
    assert [block.type for block in said.content] == ["thinking"]
    with official.messages.stream(messages=HELLO, thinking=thinking, **GREEDY) as stream:
        gathered = stream.get_final_message()
    assert gathered.content[0].thinking == said.content[0].thinking
    assert gathered.content[0].signature == said.content[0].signature
    off = official.messages.create(messages=HELLO, thinking={"type": "disabled"}, **GREEDY)
    assert [block.type for block in off.content] == ["text"]


def test_thinking_ends_with_its_budget(official):
    thinking = {"type": "enabled", "budget_tokens": 3}
    said = official.messages.create(messages=HELLO, thinking=thinking, **GREEDY)
    assert [block.type for block in said.content] == ["thinking", "text"]
    free = official.messages.create(
        messages=HELLO, thinking={**thinking, "budget_tokens": 1024}, **GREEDY
    )
    assert free.content[0].thinking.startswith(said.content[0].thinking)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_called(official, choice):
    options = {**GREEDY, "max_tokens": 200, "tools": [TOOL], "tool_choice": choice}
    said = official.messages.create(messages=HELLO, **options)
    (call,) = said.content
    assert (call.type, call.name, said.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert call.input["city"] in ("Bern", "Uster")
    with official.messages.stream(messages=HELLO, **options) as stream:
        gathered = stream.get_final_message()
    assert gathered.content[0].input == call.input


def test_an_agents_turn_is_taken(official, client):
    """Results of tools stand before what the user says beside them, as OpenAI's messages do."""
    said = official.messages.count_tokens(model="tiny", messages=CALLED, tools=[TOOL]).input_tokens
    call = {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "user", "content": "and?"},
    ]
    function = {"name": "get_weather", "parameters": TOOL["input_schema"]}
    tool = {"type": "function", "function": function}
    chat = client.chat.completions.create(
        model="tiny", messages=messages, tools=[tool], max_tokens=1
    )
    assert said == chat.usage.prompt_tokens


def test_an_assistants_last_message_is_continued(official):
    begun = [*HELLO, {"role": "assistant", "content": "jumps over"}]
    closed = [*begun, {"role": "user", "content": ""}]
    counts = [
        official.messages.count_tokens(model="tiny", messages=messages).input_tokens
        for messages in (HELLO, begun, closed)
    ]
    assert counts[0] < counts[1] < counts[2]
    assert official.messages.create(messages=begun, **GREEDY).usage.output_tokens == 8


def test_ends(official):
    text = text_of(official.messages.create(messages=HELLO, **{**GREEDY, "max_tokens": 20}))
    stop = text[6:8]
    cut = official.messages.create(
        messages=HELLO, stop_sequences=[stop], **{**GREEDY, "max_tokens": 20}
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert text_of(cut) == text[: text.index(stop)]


def test_more_tokens_than_there_is_room_for_are_as_many_as_there_is(official):
    biased = {"temperature": 0, "stop_sequences": ["e", "o", "a", " "]}
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 9999, "extra_body": biased}
    with official.messages.stream(**options) as stream:
        assert stream.get_final_message().stop_reason == "stop_sequence"


def test_a_form_is_kept_to(official):
    form = {"format": {"type": "json_schema", "schema": {"enum": [True, False]}}}
    said = official.messages.create(messages=HELLO, output_config=form, **GREEDY)
    assert text_of(said) in ("true", "false")
    former = {**GREEDY["extra_body"], "output_format": form["format"]}
    again = official.messages.create(messages=HELLO, **{**GREEDY, "extra_body": former})
    assert text_of(again) == text_of(said)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not served"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, None, "source"),
        ({"extra_body": {"temperature": -1}}, None, "temperature"),
        ({"tools": [{"name": "f"}]}, None, "tools[0]"),
        ({"extra_body": {"thread": {"type": "create"}}}, None, "send the whole conversation"),
        ({"extra_body": {"compaction": {"type": "summarize"}}}, None, "ask for a summary"),
        ({"messages": [{"role": "user", "content": [DEFINED]}]}, None, "define it in tools"),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [TOOL]}, None, "'f'"),
    ],
)
def test_errors_have_the_clients_form(official, changes, kind, words):
    with pytest.raises(kind or anthropic.BadRequestError) as raised:
        official.messages.create(**{**GREEDY, "messages": HELLO, **changes})
    body = raised.value.body
    assert body["type"] == "error"
    assert words in body["error"]["message"]


@pytest.mark.parametrize("headers", [{"x-api-key": "k"}, {"authorization": "Bearer k"}, {}])
def test_keys(headers):
    body = {"model": "tiny", "messages": HELLO}
    config = ServerConfig(api_key=["k"])
    response = answered(config, "/v1/messages/count_tokens", body, headers)
    assert response.status_code == (200 if headers else 401)
    if not headers:
        assert response.json()["error"]["type"] == "authentication_error"
    wrong = answered(config, "/v1/messages/count_tokens", body, {"x-api-key": "other"})
    assert wrong.status_code == 401


def test_unknown_fields_are_named(official):
    body = {"context_management": {"edits": []}, "temperature": 0}
    raw = official.messages.with_raw_response.create(
        model="tiny", max_tokens=2, messages=HELLO, extra_body=body
    )
    assert raw.headers["x-milepost-ignored"] == "context_management"


@pytest.mark.parametrize("kind", [ThinkingConfigParam, BetaThinkingConfigParam])
def test_every_way_of_thinking_is_known(kind):
    for config in get_args(kind):
        hints = get_type_hints(config)
        (type_,) = get_args(hints["type"])
        for display in (None, *re.findall(r"'(\w+)'", str(hints.get("display", "")))):
            assert Thinking.model_validate({"type": type_, "display": display}).type == type_
