"""What routers are told of a prompt is what is served of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from milepost.server.config import ServerConfig
from milepost.server.rendering import prompt_of
from tests.server.inprocess import answered, service

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SAID = [{"role": "user", "content": "the quick brown fox"}]
BEGUN = {"role": "assistant", "content": "A"}


def served(http, path, body):
    """The prompt's tokens, as the answer tells them."""
    answer = http.post(path, json={**body, "model": "tiny", "return_token_ids": True}).json()
    listed = [choice.get("prompt_token_ids") for choice in answer["choices"]]
    return [answer["prompt_token_ids"]] if "prompt_token_ids" in answer else listed


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"truncate_prompt_tokens": 7},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
    ],
)
def test_of_a_chat(http, own):
    body = {"messages": SAID, "max_tokens": 1, **own}
    rendered = http.post("/v1/chat/completions/render", json={**body, "model": "tiny"}).json()
    assert [rendered["token_ids"]] == served(http, "/v1/chat/completions", body)
    assert rendered["features"] is None


def test_tools_that_may_not_be_called_stand_in_the_prompt(http):
    """An agent's last turn finds the others' prompts in the cache."""
    body = {"messages": SAID, "max_tokens": 1, "tools": [TOOL]}
    path = "/v1/chat/completions"
    assert served(http, path, body) == served(http, path, {**body, "tool_choice": "none"})


def test_tools_that_may_not_be_called_can_be_left_out():
    body = {"model": "tiny", "messages": SAID, "tools": [TOOL], "tool_choice": "none"}
    without = {"model": "tiny", "messages": SAID}
    config = ServerConfig(exclude_tools_when_tool_choice_none=True)
    path = "/v1/chat/completions/render"
    left_out, plain = (answered(config, path, each).json() for each in (body, without))
    shown = answered(ServerConfig(), path, body).json()
    assert left_out["token_ids"] == plain["token_ids"] != shown["token_ids"]


def test_of_prompts(http):
    for prompt in ("the quick", ["the quick", "brown fox"], [5, 6, 7], [[5, 6], [7]]):
        body = {"prompt": prompt, "max_tokens": 1}
        rendered = http.post("/v1/completions/render", json={**body, "model": "tiny"}).json()
        assert [each["token_ids"] for each in rendered] == served(http, "/v1/completions", body)


def test_of_a_response_that_goes_on_from_another(http):
    first = {"model": "tiny", "input": "the quick", "max_output_tokens": 2}
    id_ = http.post("/v1/responses", json=first).json()["id"]
    body = {"model": "tiny", "input": "brown fox", "previous_response_id": id_}
    rendered = http.post("/v1/responses/render", json=body).json()
    made = http.post("/v1/responses", json={**body, "max_output_tokens": 1}).json()
    assert len(rendered["token_ids"]) == made["usage"]["input_tokens"]
    (alone,) = (http.post("/v1/responses/render", json=first).json(),)
    assert len(alone["token_ids"]) < len(rendered["token_ids"])


def test_what_cannot_be_served_is_not_rendered(http):
    body = {"model": "tiny", "messages": []}
    assert http.post("/v1/chat/completions/render", json=body).status_code == 400
    body = {"model": "nobody", "prompt": "the quick"}
    assert http.post("/v1/completions/render", json=body).status_code == 404


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/completions/render"])
@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"prompt": [""] * 2000}, "2000 prompts"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [5, 4_000_000]}, "prompt_token_ids[1]=4000000"),
        ({"prompt": [5] * 1_000_000}, "1000000 tokens"),
        ({"prompt": [5, 6], "cache_marks": [3]}, "cache_marks has 3"),
        ({"prompt": [5, 6], "max_tokens": 10**6}, "max_tokens=1000000"),
    ],
)
def test_prompts_that_cannot_be_served(http, path, own, words):
    answer = http.post(path, json={"model": "tiny", **own})
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True)
    assert len(answer.content) < 1000


def test_a_response_whose_limit_is_lowered_is_rendered(http):
    body = {"model": "tiny", "input": "the quick", "max_output_tokens": 10**6}
    assert http.post("/v1/responses/render", json=body).status_code == 200


@pytest.mark.parametrize(
    "own",
    [
        {"tools": [TOOL], "tool_choice": "none"},
        {"truncate_prompt_tokens": 7},
        {"messages": [*SAID, BEGUN], "continue_final_message": True},
        {"messages": [{**SAID[0], "mood": "good"}]},
    ],
)
def test_a_router_inside_the_process_is_told_the_same(own):
    body = {"messages": SAID, **own}
    prompt = asyncio.run(told("/v1/chat/completions", body))
    rendered = answered(ServerConfig(), "/v1/chat/completions/render", body).json()
    assert prompt.token_ids == rendered["token_ids"]


def test_a_router_inside_the_process_is_told_of_one_prompt():
    body = {"prompt": ["the quick"], "cache_salt": "a"}
    prompt = asyncio.run(told("/v1/completions", body))
    (rendered,) = answered(ServerConfig(), "/v1/completions/render", body).json()
    assert (prompt.token_ids, prompt.cache_salt) == (rendered["token_ids"], "a")
    assert asyncio.run(told("/v1/completions", {"prompt": ["a", "b"]})) is None
    assert asyncio.run(told("/v1/models", {})) is None


async def told(path, body):
    own = service(ServerConfig())
    try:
        return await prompt_of(own, path, json.dumps(body).encode())
    finally:
        await own.close()
