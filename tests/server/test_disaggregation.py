"""Two servers as a router drives them: one prefills, the other decodes."""

from __future__ import annotations

import json
import uuid

import httpx
import pytest

from milepost.server.config import ServerConfig
from tests.server.collector import collecting
from tests.server.conftest import post, serving
from tests.server.inprocess import answered

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
EXTRA = {"peers": ["127.0.0.1"], "transport": "socket", "timeout_s": 1.0, "lease_s": 5.0}
CONFIG = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_port": 0,
    "kv_connector_extra_config": EXTRA,
}
ELSEWHERE = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "0" * 32,
    "remote_num_tokens": 100,
}
DEEP = {"remote_port": json.loads("[" * 60 + "]" * 60)}
TEXT = "the quick brown fox jumps over the lazy dog " * 12


@pytest.fixture(scope="module")
def collector():
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def pair(folder, collector):
    """The second one has traces."""
    flags = ["--kv-transfer-config", json.dumps(CONFIG)]
    traces = ("--otlp-traces-endpoint", collector.url)
    with serving(folder, *flags) as first, serving(folder, *flags, *traces) as second:
        yield first, second


def passed_by_sidecar(first: str, second: str, path: str, body: dict) -> httpx.Response:
    """What llm-d's sidecar does with a request (llm-d-inference-scheduler at 520af47,
    pkg/sidecar/proxy/connector_nixlv2.go, `runNIXLProtocolV2`): of chats both limits are 1, whether
    they were set or not; what the other answers is passed on as it is."""
    headers, short = {"x-request-id": str(uuid.uuid1())}, {**body, "stream": False}
    short |= {"max_tokens": 1, "kv_transfer_params": ASKED}
    if "chat" in path:
        short["max_completion_tokens"] = 1
    short.pop("stream_options", None)
    prefilled = post(first + path, json=short, headers=headers, timeout=60)
    assert prefilled.status_code == 200, prefilled.text
    params = prefilled.json().get("kv_transfer_params")
    passed = {**body, "kv_transfer_params": params}
    return post(second + path, json=passed, headers=headers, timeout=60)


def routed(first: str, second: str, path: str, body: dict) -> httpx.Response:
    """What vllm-router does with a request."""
    headers = {"x-request-id": f"___prefill_addr_a:1___decode_addr_b:2_{uuid.uuid4().hex}"}
    short = {**body, "max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": ASKED}
    short.pop("stream_options", None)
    if path.endswith("responses"):
        del short["max_tokens"], short["min_tokens"]
        short["max_output_tokens"] = 1
    prefilled = post(first + path, json=short, headers=headers, timeout=60)
    assert prefilled.status_code == 200, prefilled.text
    params = prefilled.json()["kv_transfer_params"]
    assert params["do_remote_prefill"]
    passed = {**body, "kv_transfer_params": params}
    return post(second + path, json=passed, headers=headers, timeout=60)


def reused(response: httpx.Response) -> tuple[int, int]:
    usage = response.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("passing", [routed, passed_by_sidecar])
def test_a_completion_is_prefilled_there_and_decoded_here(pair, server, passing):
    first, second = pair
    prompt = f"{passing.__name__} {TEXT}"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    got = passing(first.url, second.url, "/v1/completions", body)
    alone = post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert got.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
    length, cached = reused(got)
    assert cached == length - 1
    assert "kv_transfer_params" not in got.json()


def test_a_trace_goes_on_to_the_engine_that_decodes(pair, collector):
    """With what the router carries, even if it passes on no headers of the client's."""
    first, second = pair
    body = {"model": "tiny", "prompt": f"traced {TEXT}", "max_tokens": 4}
    asked = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    short = {**body, "max_tokens": 1, "kv_transfer_params": ASKED}
    prefilled = post(f"{first.url}/v1/completions", json=short, headers=asked, timeout=60)
    params = prefilled.json()["kv_transfer_params"]
    assert params["traceparent"] == asked["traceparent"]
    long = {**body, "kv_transfer_params": params}
    headers = {"traceparent": f"00-{'3' * 32}-{'4' * 16}-01"}
    assert post(f"{second.url}/v1/completions", json=long, headers=headers).status_code == 200
    found = collector.trace("3" * 32)
    assert found["llm_request"].links == ["2" * 16]
    assert found["load"].attributes["milepost.cache.loaded.remote"] > 0


def test_each_of_several_prompts_is_prefilled_there(pair, server):
    """As clients send them in batches; one has a single token, and nothing to fetch."""
    first, second = pair
    prompts = [f"several {TEXT}", [5], f"others {TEXT}", f"several {TEXT}"]
    prompts = [p if isinstance(p, list) else tokenized(server, p) for p in prompts]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 6, "seed": 3, "n": 2}
    fetched = second.metric("kv_transfers_total")
    got = routed(first.url, second.url, "/v1/completions", body)
    alone = post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert got.status_code == 200, got.text
    texts = [[choice["text"] for choice in each.json()["choices"]] for each in (got, alone)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 8
    assert second.metric("kv_transfers_total") - fetched >= 2
    refused = {**body, "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "h"}}
    got = post(f"{second.url}/v1/completions", json=refused, timeout=60)
    assert got.status_code == 200, "they are computed"


def tokenized(server, text):
    return post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]


def test_chat_with_all_that_an_answer_can_have(pair, server):
    first, second = pair
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "chat " + TEXT}],
        "max_tokens": 60,
        "seed": 3,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [tool],
        "tool_choice": "required",
    }
    got = routed(first.url, second.url, "/v1/chat/completions", body)
    alone = post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert len(got.json()["choices"]) == 2
    for ours, theirs in zip(got.json()["choices"], alone.json()["choices"], strict=True):
        calls = [
            [call["function"] for call in choice["message"].get("tool_calls", [])]
            for choice in (ours, theirs)
        ]
        assert calls[0] == calls[1] != []
        assert [entry["token"] for entry in ours["logprobs"]["content"]] == [
            entry["token"] for entry in theirs["logprobs"]["content"]
        ]


def test_chat_behind_llm_ds_sidecar(pair, server):
    first, second = pair
    messages = [{"role": "user", "content": "sidecar " + TEXT}]
    body = {"model": "tiny", "messages": messages, "max_completion_tokens": 9, "temperature": 0}
    got = passed_by_sidecar(first.url, second.url, "/v1/chat/completions", body)
    alone = post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert got.json()["choices"][0]["message"] == alone.json()["choices"][0]["message"]
    length, cached = reused(got)
    assert cached == length - 1


def test_what_was_prefilled_by_an_engine_that_lends_nothing_is_computed(server, pair):
    """llm-d's sidecar passes a missing answer on as null."""
    body = {"model": "tiny", "prompt": "null " + TEXT, "max_tokens": 4, "kv_transfer_params": None}
    got = post(f"{pair[1].url}/v1/completions", json=body, timeout=60)
    assert got.status_code == 200, got.text
    assert got.json()["usage"]["completion_tokens"] == 4


def test_a_stream_and_a_response(pair):
    first, second = pair
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "stream " + TEXT}],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    got = routed(first.url, second.url, "/v1/chat/completions", body)
    chunks = [line[6:] for line in got.text.splitlines() if line.startswith("data: {")]
    usage = json.loads(chunks[-1])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    asked = {"model": "tiny", "input": "respond " + TEXT, "max_output_tokens": 5}
    got = routed(first.url, second.url, "/v1/responses", asked)
    usage = got.json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1


def test_what_is_asked_wrongly_is_refused(pair):
    first, _ = pair
    body, said = {"model": "tiny", "prompt": [TEXT, TEXT]}, {"do_remote_prefill": True}
    for changes, named in (
        ({"kv_transfer_params": {**said, "of_each_prompt": [None]}}, "as many prompts"),
        ({"kv_transfer_params": {**said, "of_each_prompt": [1, 2]}}, "as many prompts"),
        ({"prompt": TEXT, "kv_transfer_params": said}, "remote_engine_id"),
        ({"prompt": TEXT, "kv_transfer_params": ELSEWHERE}, "remote_host='10.0.0.1': that is"),
        ({"prompt": TEXT, "kv_transfer_params": ELSEWHERE | DEEP}, "remote_port=list"),
    ):
        refused = post(f"{first.url}/v1/completions", json=body | changes)
        assert (refused.status_code, named in refused.text) == (400, True)
    body = {"prompt": TEXT, "kv_transfer_params": ASKED}
    refused = answered(ServerConfig(), "/v1/completions", body)
    assert (refused.status_code, "--kv-transfer-config" in refused.text) == (400, True)


def test_a_server_that_dies_before_it_is_read(pair, folder):
    """The prompt is computed where it is decoded."""
    _, second = pair
    path, body = "/v1/completions", {"model": "tiny", "prompt": "dies " + TEXT, "max_tokens": 4}
    with serving(folder, "--kv-transfer-config", json.dumps(CONFIG)) as dying:
        short = {**body, "max_tokens": 1, "kv_transfer_params": ASKED}
        params = post(dying.url + path, json=short, timeout=60).json()["kv_transfer_params"]
        dying.process.kill()
        dying.process.wait()
    got = post(second.url + path, json={**body, "kv_transfer_params": params}, timeout=60)
    assert got.status_code == 200
    assert got.json()["usage"]["completion_tokens"] == 4
    assert reused(got)[1] == 0
