"""Replicas of the embedded model on Ray Serve. Where ray is not installed, nothing runs."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import SimpleNamespace

import httpx
import pytest

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what ray does as it starts and ends
]
FEW = {"replicas": "2", "max_num_seqs": "8", "cpu_cache_gib": "0.1"}


@pytest.fixture(scope="module")
def url():
    from ray import serve

    from milepost.ray import app

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(FEW), name="milepost")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def ask(url, messages, **options):
    body = {"model": "milepost-tiny", "messages": messages, "max_tokens": 6, **options}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def said(number):
    text = f"You are number {number}. " + "Be kind and brief. " * 20
    return [{"role": "system", "content": text}, {"role": "user", "content": "Hello."}]


def replicas():
    names = ray.util.list_named_actors(all_namespaces=True)
    return [named["name"] for named in names if "#Replica#" in named["name"]]


def replica(name, pages):
    return SimpleNamespace(replica_id=name, routing_stats={"pages": frozenset(pages)})


@pytest.mark.parametrize(
    ("num_requests", "chosen"),
    [
        ({"a": 4, "b": 0}, "a"),
        ({"a": 5, "b": 0}, "b"),
        ({"a": 5, "b": 1}, "a"),
        ({}, "a"),
    ],
)
def test_who_has_most_is_chosen_unless_four_more_wait_there(num_requests, chosen):
    """And the list of replicas, which is Ray's, stays as it is."""
    from milepost.ray import PrefixRouter

    router = PrefixRouter.__new__(PrefixRouter)
    router._replica_queue_len_cache = num_requests
    known = [replica("a", b"123"), replica("b", b"1"), *(replica(str(n), b"") for n in range(9))]
    asked = SimpleNamespace(kwargs={"keys": tuple(b"123")})
    given = known[:2]
    for _ in range(9):
        (first,), _ = asyncio.run(router.choose_replicas(given, asked))
        assert first.replica_id == chosen
        assert given == known[:2]
    given = list(known)
    asyncio.run(router.choose_replicas(given))
    assert given == known


def test_conversations_stay_where_they_are_cached(url):
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "milepost-tiny"
    history = {number: said(number) for number in range(4)}
    hits = []
    for _ in range(3):
        for messages in history.values():
            found = ask(url, messages, temperature=0).json()
            hits.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
            messages.append(
                {"role": "assistant", "content": found["choices"][0]["message"]["content"]}
            )
            messages.append({"role": "user", "content": "Tell me more about it. " * 4})
    followed = [hit > 64 for hit in hits[4:]]
    assert sum(followed) >= 6, "replicas tell what they have once a second"


def test_streams_and_errors_come_through(url):
    streamed = ask(url, said(9), stream=True)
    assert streamed.text.rstrip().endswith("data: [DONE]")
    assert streamed.headers["content-type"].startswith("text/event-stream")
    refused = ask(url, [])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


def test_a_replica_that_is_killed_takes_only_what_it_answers(url):
    names, lost, done = replicas(), [], []
    assert len(names) == 2

    def work(number):
        for turn in range(6):
            status = ask(url, said(100 + 10 * number + turn)).status_code
            (done if status == 200 else lost).append(status)
            if number == turn == 1:
                name = next(n for n in names)
                ray.kill(ray.get_actor(name, namespace="serve"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lost) <= 4, "those that were in flight"
    assert len(done) + len(lost) == 24
