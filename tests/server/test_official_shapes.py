"""Answers and events have every field that the official clients' types require.

The clients themselves take anything; others in stricter languages are generated from the same
descriptions.
"""

import json

import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
HELLO = [{"role": "user", "content": "the quick brown"}]
CHAT = {"messages": HELLO, "max_tokens": 40}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
RESPONSES = {"input": "the quick brown", "max_output_tokens": 40}
CALLED = {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}]}
CALLED |= {"tool_choice": "required", "parallel_tool_calls": False}
ANTHROPIC = {"tools": [{"name": "f", "input_schema": SCHEMA}]}
ANTHROPIC |= {"tool_choice": {"type": "tool", "name": "f"}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.parametrize(
    ("path", "body", "whole", "event"),
    [
        ("chat/completions", {**CHAT, **THINKING}, ChatCompletion, ChatCompletionChunk),
        (
            "chat/completions",
            {**CHAT, "logprobs": True, "tools": [FUNCTION], "tool_choice": "required"},
            ChatCompletion,
            ChatCompletionChunk,
        ),
        ("responses", {**RESPONSES, **THINKING}, Response, ResponseStreamEvent),
        ("responses", {**RESPONSES, **CALLED}, Response, ResponseStreamEvent),
        ("messages", {**CHAT, "thinking": {"type": "adaptive"}}, Message, RawMessageStreamEvent),
        ("messages", {**CHAT, **ANTHROPIC}, Message, RawMessageStreamEvent),
    ],
)
def test_answers(http, path, body, whole, event):
    body = {"model": "tiny", "temperature": 0, **body}
    TypeAdapter(whole).validate_json(http.post(f"/v1/{path}", json=body).content)
    lines = http.post(f"/v1/{path}", json={**body, "stream": True}).text.split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    assert len(data) > 3
    for each in data:
        TypeAdapter(event).validate_python(json.loads(each))


def test_completions(http):
    """Their type has no chunks: a chunk's finish_reason is null."""
    body = {"model": "tiny", "prompt": "a", "logprobs": 2, "max_tokens": 4}
    Completion.model_validate_json(http.post("/v1/completions", json=body).content)


def test_models_and_counts(http):
    Model.model_validate_json(http.get("/v1/models/tiny").content)
    named = http.get("/v1/models/tiny", headers={"anthropic-version": "2023-06-01"})
    ModelInfo.model_validate_json(named.content)
    counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": HELLO})
    MessageTokensCount.model_validate_json(counted.content)
