"""What HTTP tells of drafts: `usage`, and metrics under both prefixes."""

import json
import re

import httpx
import pytest

from tests.server.conftest import serving

CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 2,
    "adaptive": False,
}
WORDS = "again and again and again and again"
REQUESTS = {
    "/v1/completions": {"prompt": WORDS},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}]},
}
SETTINGS = {
    "model": "tiny",
    "max_tokens": 32,
    "temperature": 0,
    "ignore_eos": True,
    "logit_bias": {"60": 50, "61": 50, "62": 50},
}
"""Few words, so that some drafts are right."""
NAMES = ["num_drafts", "num_draft_tokens", "num_accepted_tokens"]


@pytest.fixture(scope="module")
def drafting(folder):
    """A client of a server that drafts."""
    flag = f"--speculative-config={json.dumps(CONFIG)}"
    with serving(folder, flag) as server, server.http() as http:
        yield http


def usage_of(http: httpx.Client, path: str, **changes) -> tuple[dict, str]:
    """And what was answered; streamed or not."""
    body = {**SETTINGS, **REQUESTS[path], **changes}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        found = response.json()
        return found["usage"], text_of(found["choices"][0])
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    return usage, "".join(text_of(c["choices"][0]) for c in chunks if c["choices"])


def text_of(choice: dict) -> str:
    message = choice.get("message") or choice.get("delta")
    return choice["text"] if message is None else message.get("content") or ""


def counters(http: httpx.Client, prefix: str) -> dict[str, list[float]]:
    """The values of each counter of drafts, of several labels in their order."""
    found: dict[str, list[float]] = {}
    pattern = rf"(?m)^{prefix}spec_decode_(\w+)_total(\S*) (\S+)$"
    for name, _labels, value in sorted(re.findall(pattern, http.get("/metrics").text)):
        found.setdefault(name, []).append(float(value))
    return found


@pytest.mark.parametrize("path", REQUESTS)
def test_usage_tells_what_became_of_drafts(drafting, http, path):
    before = counters(drafting, "vllm:")
    usage, text = usage_of(drafting, path)
    after = counters(drafting, "vllm:")
    verified, accepted = (
        after[name][0] - before[name][0] for name in ("num_draft_tokens", "num_accepted_tokens")
    )
    details = usage["completion_tokens_details"]
    assert details.pop("reasoning_tokens", 0) == 0  # /v1/completions has none
    assert details == {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": verified - accepted,
    }
    assert 0 < accepted < verified
    assert accepted < usage["completion_tokens"] == SETTINGS["max_tokens"]
    plain, expected = usage_of(http, path)
    assert text == expected
    assert plain.get("completion_tokens_details", {}).keys() <= {"reasoning_tokens"}


@pytest.mark.parametrize("path", REQUESTS)
def test_the_usage_of_a_stream_is_that_of_the_whole_answer(drafting, path):
    """(The second time the prompt hits, whose drafts are the same.)"""
    streamed, text = usage_of(drafting, path, stream=True, stream_options={"include_usage": True})
    whole, expected = usage_of(drafting, path)
    assert streamed["completion_tokens_details"] == whole["completion_tokens_details"]
    assert text == expected


def test_metrics_have_both_prefixes_and_add_up(drafting):
    usage_of(drafting, "/v1/completions")
    ours, theirs = (counters(drafting, prefix) for prefix in ("milepost:", "vllm:"))
    assert ours == theirs
    assert set(ours) == {*NAMES, "num_accepted_tokens_per_pos"}
    num_drafts, num_tokens, num_accepted = (ours[name][0] for name in NAMES)
    by_place = ours["num_accepted_tokens_per_pos"]
    assert num_drafts <= num_tokens <= 3 * num_drafts
    assert sum(by_place) == num_accepted
    assert len(by_place) <= 3
    assert by_place == sorted(by_place, reverse=True)
