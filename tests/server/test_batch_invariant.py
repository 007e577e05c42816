"""A server in the bitwise mode: responses name it, and idle time canonicalises answers."""

import httpx

from tests.server.conftest import serving
from tests.waiting import until


def bodies(http):
    """Responses of each kind, and the first events of streams."""
    message = {"role": "user", "content": "one two"}
    for path, prompt in (("completions", {"prompt": "a"}), ("chat/completions", {})):
        ask = {"model": "tiny", "max_tokens": 2, **(prompt or {"messages": [message]})}
        yield http.post(f"/v1/{path}", json=ask).json()
        events = http.post(f"/v1/{path}", json={**ask, "stream": True}).text.split("\n\n")
        yield httpx.Response(200, text=events[0].removeprefix("data: ")).json()


def test_responses_name_the_mode_and_idle_time_is_used(folder, http):
    assert all("system_fingerprint" not in body for body in bodies(http))
    with serving(folder, "--batch-invariant") as server, server.http() as bitwise:
        names = {body["system_fingerprint"] for body in bodies(bitwise)}
        assert len(names) == 1
        assert names.pop().startswith("bitwise-")
        ask = {"model": "tiny", "prompt": [5] * 100, "max_tokens": 100, "ignore_eos": True}
        ask |= {"return_token_ids": True, "min_tokens": 100}
        before = server.metric("prompt_tokens_computed_total")
        answer = bitwise.post("/v1/completions", json=ask).json()["choices"][0]["token_ids"]
        until(lambda: server.metric("prompt_tokens_computed_total") == before + 100 + 129)
        follow = {**ask, "prompt": [*ask["prompt"], *answer, 6], "max_tokens": 1, "min_tokens": 1}
        usage = bitwise.post("/v1/completions", json=follow).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 192
