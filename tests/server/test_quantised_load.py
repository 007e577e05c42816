"""Quantised checkpoints over HTTP, with more requests than there is room for and clients that
leave: what is answered is what a quiet server answers."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from tests import chatmodel
from tests.engines import THREE_LAYERS
from tests.quantised import write
from tests.server.conftest import NO_TLS, serving
from tests.waiting import until

FLAGS = ("--dtype", "float64", "--max-num-seqs", "4")
NUM_REQUESTS = 40
SHARED = list(range(10, 170))


def body(number):
    """Half of the prompts go on with the same 160 tokens."""
    own = [(number * 37 + index * 11) % 440 + 4 for index in range(30 + number)]
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    prompt = SHARED + own if number % 2 else own
    return {"model": "tiny", "prompt": prompt, "max_tokens": 6, **greedy}


def token_ids(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "form",
    [
        "modelopt",
        *(pytest.param(form, marks=pytest.mark.nightly) for form in ("modelopt-nvfp4", "packed")),
    ],
)
def test_load_changes_no_answer_and_leaves_nothing_behind(tmp_path, form):
    stored, _ = write("qwen3_5", tmp_path, form, **THREE_LAYERS, vocab_size=chatmodel.VOCAB_SIZE)
    chatmodel.make_tokenizer().save_pretrained(stored)
    with serving(stored, *FLAGS, "--no-enable-prefix-caching") as quiet, quiet.http() as http:
        expected = [
            token_ids(http.post("/v1/completions", json=body(number)))
            for number in range(NUM_REQUESTS)
        ]
    flags = (*FLAGS, "--max-waiting", "16", "--shutdown-timeout-s", "2")
    with serving(stored, *flags) as server:
        statuses = asyncio.run(crowd(server.url, expected))
        assert statuses[429], statuses
        until(lambda: not server.metric("num_requests_running"))
        assert not server.metric("num_requests_waiting")
        engine = server.engine_pid
        asyncio.run(told_to_go(server))
        assert server.process.wait(30) == 0
        until(lambda: not os.path.exists(f"/proc/{engine}"))
    assert not [line for line in server.log if "Traceback" in line]


def client(url):
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, verify=NO_TLS, timeout=120, limits=limits)


async def crowd(url, expected):
    """All at once, some of whom leave in the middle; how often each status came. Those that are
    refused come again."""
    statuses = {200: 0, 429: 0}

    async def asks(http, number):
        while True:
            response = await http.post("/v1/completions", json=body(number))
            statuses[response.status_code] += 1
            if response.status_code == 200:
                assert token_ids(response) == expected[number], number
                return
            await asyncio.sleep(float(response.headers["retry-after"]) / 5)

    async def leaves(http, number):
        asked = body(number) | {"stream": True, "max_tokens": 500}
        async with http.stream("POST", "/v1/completions", json=asked) as response:
            async for _ in response.aiter_lines():
                return

    async with client(url) as http, asyncio.TaskGroup() as tasks:
        for number in range(NUM_REQUESTS):
            tasks.create_task(asks(http, number))
            if number % 5 == 0:
                tasks.create_task(leaves(http, number))
    assert statuses[200] == NUM_REQUESTS
    return statuses


async def told_to_go(server):
    """SIGTERM under streams, most of which wait: each ends, with an error or with [DONE]."""
    begun = []

    async def streams(http, number):
        asked = body(number) | {"stream": True, "max_tokens": 500}
        async with http.stream("POST", "/v1/completions", json=asked) as response:
            begun.append(response.status_code)
            lines = [line async for line in response.aiter_lines() if line]
        return lines[-1]

    async with client(server.url) as http, asyncio.TaskGroup() as tasks:
        streaming = [tasks.create_task(streams(http, number)) for number in range(12)]
        while len(begun) < 12:
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
    assert set(begun) == {200}
    assert all(task.result() == "data: [DONE]" or "shut" in task.result() for task in streaming), [
        task.result() for task in streaming
    ]
