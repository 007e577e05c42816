"""A router that follows a real server knows what each request will hit."""

from __future__ import annotations

import json
from random import Random

import httpx
import pytest

from tests.kv_events.router import Following
from tests.server.conftest import serving
from tests.waiting import until


@pytest.fixture
def followed(folder, tmp_path):
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/pub",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "topic": "kv@tiny",
    }
    flags = ["--kv-events-config", json.dumps(config), "--num-pages", "40", "--num-slots", "10"]
    with serving(folder, *flags) as server, server.http() as http:
        following = Following(config["replay_endpoint"])
        yield http, following, config
        following.close()


def ask(http: httpx.Client, tokens: list[int], system_length: int) -> tuple[list[int], int]:
    """The answer's tokens, and what was hit."""
    body = {
        "model": "tiny",
        "prompt": tokens,
        "cache_marks": [system_length],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    hit = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["token_ids"], hit


def test_what_is_predicted_is_hit_within_a_page(followed):
    """Conversations that go on where they ended, under two system prompts, with less memory than
    they need."""
    http, following, config = followed
    source = http.get("/kv_event_sources").json()["0"]
    assert {name: source[name] for name in ("endpoint", "replay_endpoint", "topic")} == {
        name: config[name] for name in ("endpoint", "replay_endpoint", "topic")
    }
    random, router = Random(5), following.router
    systems = [[random.randrange(300) for _ in range(length)] for length in (128, 192)]
    history = {number: list(systems[number % 2]) for number in range(7)}
    found = []
    for turn in range(4):
        for number, tokens in history.items():
            tokens += [random.randrange(300) for _ in range(random.randrange(20, 120))]
            following.catch_up()
            predicted = router.hit(tokens)
            answer, hit = ask(http, tokens, len(systems[number % 2]))
            assert predicted <= hit < predicted + router.block_size, (turn, number, len(tokens))
            found.append(hit)
            tokens += answer
    assert sum(hit > 192 for hit in found) > 4
    assert any(hit <= 192 for hit in found[7:]), "some was evicted"
    assert router.blocks
    assert http.post("/reset_prefix_cache").status_code == 200
    following.catch_up()
    assert not router.blocks


def test_what_a_directory_holds_is_predicted_after_a_restart(folder, tmp_path):
    """And what only host memory still has, as the device forgets."""
    random = Random(6)
    tokens = [random.randrange(300) for _ in range(300)]
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/pub",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    flags = ["--kv-events-config", json.dumps(config), "--cache-dir", str(tmp_path / "kept")]
    flags += ["--cache-host-gib", "0.05", "--num-pages", "40", "--num-slots", "10"]
    with serving(folder, *flags) as server, server.http() as http:
        answer, _ = ask(http, tokens, 128)
        tokens += answer
    with serving(folder, *flags) as server, server.http() as http:
        following = Following(config["replay_endpoint"])
        router = following.router
        until(lambda: following.catch_up() or len(router.held_by("STORAGE")) == 4)
        assert router.media.keys() == router.held_by("STORAGE")
        predicted = router.hit([*tokens, 1])
        answer, hit = ask(http, [*tokens, 1], 128)
        assert predicted == 256 <= hit < 256 + router.block_size
        until(lambda: following.catch_up() or len(router.held_by("CPU")) >= 4)
        following.close()
