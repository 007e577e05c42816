"""No field of a body is taken and does nothing: each is read, refused, or named in the response."""

import ast
import re
from pathlib import Path

import pytest

import milepost.server
import milepost.server.anthropic.protocol
import milepost.server.responses.protocol
from milepost.server.fields import Body, Only, Unread

NOTHING_TO_DO = {
    "spaces_between_special_tokens": "nothing is ever put between tokens",
    "eager_input_streaming": "arguments are always streamed as they come",
    "max_tool_calls": "counts calls of tools that a server runs; none are run here",
    "type": "decides which body it is",
    "tool_call_id": "goes to the chat template, as all of a message does",
}
SENT_BACK = {
    "status": "an item's",
    "caller": "of a call that a client made",
    "execution": "of a call that a client made",
    "environment": "of a call that a client made",
    "max_output_length": "of an output that a client made",
    "server_label": "of a call that was made",
    "server_name": "of a call that was made",
    "approval_request_id": "of a call that was made",
    "signature": "anything passes",
    "data": "of a block that is left out",
    "annotations": "of a part",
}


def bodies():
    found, todo = [], [Body]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo += kind.__subclasses__()
    return [kind for kind in found if kind.__module__.startswith("milepost.server")]


def names_read():
    """Attributes and strings in the server's code, without declarations of fields."""
    found = set()
    for path in Path(milepost.server.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.MatchClass):
                found.update(node.kwd_attrs)
    return found


def test_every_field_is_read_refused_or_named():
    read, idle = names_read(), []
    for kind in bodies():
        for name, field in kind.model_fields.items():
            is_marked = any(isinstance(mark, (Only, Unread)) for mark in field.metadata)
            known = name in NOTHING_TO_DO or name in SENT_BACK
            if not (is_marked or known or name in read):
                idle.append(f"{kind.__name__}.{name}")
    assert idle == []


ASK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
SAY = {"input": "a", "max_output_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {**ASK, "store": True}, "store"),
        ("/v1/chat/completions", {**ASK, "metadata": {"a": "b"}}, "metadata"),
        ("/v1/chat/completions", {**ASK, "service_tier": "flex"}, "service_tier"),
        ("/v1/chat/completions", {**ASK, "media_io_kwargs": {"a": 1}}, "media_io_kwargs"),
        ("/v1/completions", {"prompt": "a", "guided_decoding_backend": "x"}, None),
        ("/v1/responses", {**SAY, "reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ("/v1/responses", {**SAY, "text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/responses", {**SAY, "include": ["a.b"]}, "include[a.b]"),
        ("/v1/messages", {**ASK, "service_tier": "priority"}, "service_tier"),
        ("/v1/messages", {**ASK, "mcp_servers": [{"url": "http://a"}]}, "mcp_servers"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "mm_processor_kwargs": {"fps": 1}}, "mm_processor_kwargs"),
        ("/tokenize", {"messages": ASK["messages"], "add_special_tokens": True}, None),
    ],
)
def test_what_changes_nothing_is_named(http, path, body, named):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    named = named or list(body)[-1]
    assert response.headers["x-milepost-ignored"] == named


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**ASK, "store": False, "metadata": {}, "service_tier": "auto"}),
        ("/v1/responses", {**SAY, "metadata": {"a": "b"}, "text": {"verbosity": "medium"}}),
        ("/v1/responses", {**SAY, "include": ["message.output_text.logprobs"]}),
        ("/v1/messages", {**ASK, "service_tier": "auto", "metadata": {"user_id": "me"}}),
    ],
)
def test_what_asks_for_nothing_is_not_named(http, path, body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "x-milepost-ignored" not in response.headers


def test_the_log_says_which_of_them_a_strict_server_refuses(server, http):
    http.post("/v1/chat/completions", json={**ASK, "safety_identifier": "me", "only_here": 1})
    lines = "\n".join(server.log)
    assert re.search(r"only_here: ignored; --strict refuses such fields$", lines, re.MULTILINE)
    assert re.search(r"safety_identifier: ignored$", lines, re.MULTILINE)


def test_thinking_can_be_omitted(http):
    asked = {**ASK, "max_tokens": 12, "temperature": 0}
    for display, kinds in [("summarized", {"thinking"}), ("omitted", set())]:
        thinking = {"type": "enabled", "budget_tokens": 1024, "display": display}
        body = http.post("/v1/messages", json={**asked, "thinking": thinking}).json()
        assert {block["type"] for block in body["content"]} == kinds


def test_a_chat_counts_its_reasoning(http):
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 12}
    for stream in (False, True):
        options = {"stream_options": {"include_usage": True}} if stream else {}
        body = {**ASK, **thinking, "temperature": 0, "stream": stream, **options}
        text = http.post("/v1/chat/completions", json=body).text
        assert '"completion_tokens_details":{"reasoning_tokens":12}' in text


STEP = 16
"""Tokens between two places where a state is kept."""
PARTS = ["the quick brown fox jumps over the lazy dog", "and again and again", "END"]


def test_three_apis_join_the_parts_of_a_message_alike(http):
    """So one hits what another has computed: the same tokens."""

    def parts(kind):
        return [{"type": kind, "text": text} for text in PARTS]

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        {"role": "system", "content": parts("text")},
        {"role": "user", "content": parts("text")},
        {"role": "assistant", "content": parts("text"), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": parts("text")},
    ]
    items = [
        {"role": "developer", "content": parts("input_text")},
        {"role": "user", "content": parts("input_text")},
        {"role": "assistant", "content": parts("output_text")},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": parts("input_text")},
    ]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": parts("text")}
    messages = [
        {"role": "user", "content": parts("text")},
        {"role": "assistant", "content": [*parts("text"), use]},
        {"role": "user", "content": [result]},
    ]
    salt = {"cache_salt": "joined alike", "temperature": 0}
    first = http.post("/v1/chat/completions", json={**ASK, **salt, "messages": chat}).json()
    num_tokens = first["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    said = http.post("/v1/responses", json={**SAY, **salt, "input": items}).json()["usage"]
    assert said["input_tokens"] == num_tokens
    assert num_tokens - said["input_tokens_details"]["cached_tokens"] < STEP
    body = {**ASK, **salt, "system": parts("text"), "messages": messages}
    usage = http.post("/v1/messages", json=body).json()["usage"]
    created = usage["input_tokens"] + usage["cache_creation_input_tokens"]
    assert created + usage["cache_read_input_tokens"] == num_tokens
    assert created < STEP
