"""Replicas of the embedded model on Ray Serve. Where ray is not installed, nothing runs."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request

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


def replica(name, pages, begun=()):
    stats = {"pages": frozenset(pages), "begun": frozenset(begun)}
    return SimpleNamespace(replica_id=name, routing_stats=stats)


class Router:
    """Ours, told what Ray would tell it; `route` sends a request and returns where it goes."""

    def __init__(self, *replicas):
        from milepost.ray import CostRouter

        self.ours = CostRouter.__new__(CostRouter)
        self.ours._replicas = {replica.replica_id: replica for replica in replicas}
        self.ours._replica_queue_len_cache = {}
        self.ours.initialize_state()

    def asked(self, number, keys=b"", num_tokens=0):
        from milepost.ray.router import Wanted

        asked = Wanted(number, tuple(keys), num_tokens, 64)
        return SimpleNamespace(
            kwargs={"asked": asked},
            metadata=SimpleNamespace(internal_request_id=number),
            future=Future(),
        )

    def choose(self, asked):
        replicas = list(self.ours._replicas.values())
        given = replicas.copy()
        ((first,), *others) = asyncio.run(self.ours.choose_replicas(given, asked))
        assert given == replicas, "the list is Ray's"
        assert len(others) == len(replicas) - 1
        return first.replica_id

    def route(self, *request):
        asked = self.asked(*request)
        name = self.choose(asked)
        self.ours.on_request_routed(asked, name, None)
        busy = self.ours._replica_queue_len_cache
        busy[name] = busy.get(name, 0) + 1
        return name

    def end(self, name, number):
        self.ours._replica_queue_len_cache[name] -= 1
        self.ours.on_request_completed(name, number)


def test_a_replica_that_is_ended_while_it_loads_leaves_nothing(monkeypatch, tmp_path):
    """Ray ends replicas when it likes, and logs what goes wrong in that."""
    from milepost.ray import replica as ours

    loading = []

    async def load(*_):
        loading.append(True)
        await asyncio.Event().wait()

    async def end_it():
        replica = ours.Replica.__new__(ours.Replica)
        beginning = asyncio.create_task(replica.__init__({"cpu_cache_gib": 0.1}))
        while not loading:
            await asyncio.sleep(0)
        beginning.cancel()
        await replica.__del__()
        monkeypatch.delattr(ours.Replica, "__del__")  # as Ray does

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ours, "load", load)
    asyncio.run(end_it())
    assert not list(tmp_path.iterdir())


def test_a_prompt_goes_to_its_pages_unless_longer_ones_wait_there():
    """Tokens to compute count, not requests; those that are lacking twice."""
    router = Router(replica("a", b"1234"), replica("b", b"1"))
    for number in range(9):
        name = router.route(str(number), b"1234", 300)
        assert name == "a", f"88 and {number} x 44 that wait, at b 472"
    assert router.route("ninth", b"1234", 300) == "b", "88 + 396 at a"
    router.end("b", "ninth")
    router.end("a", "0")
    assert router.route("long", b"12349", 9000) == "a", "192 tokens less to compute, 352 wait"
    assert router.route("again", b"1234", 300) == "b", "that one is to be waited for"


def test_prompts_that_come_at_once_are_spread_before_any_has_been_sent():
    router = Router(replica("a", b""), replica("b", b""))
    assert sorted(router.choose(router.asked(name, b"12", 128)) for name in "xyz") in (
        ["a", "a", "b"],
        ["a", "b", "b"],
    )


def test_a_prompt_whose_answer_has_begun_or_is_over_waits_no_more():
    one, two = replica("a", b"12"), replica("b", b"")
    router = Router(one, two)
    assert router.route("long", b"12", 5000) == "a"
    assert router.route("next", b"12", 160) == "b"
    router.end("b", "next")
    one.routing_stats = {"pages": frozenset(b"12"), "begun": frozenset({"long"})}
    assert router.route("now", b"12", 160) == "a"
    router.end("a", "now")
    router.end("a", "long")
    given_up = router.asked("other", b"12", 5000)
    assert router.choose(given_up) == "a"
    given_up.future.cancel()
    assert router.route("last", b"12", 160) == "a"
    router.end("a", "last")
    assert not router.ours._choices, "nothing is kept of what is over"


def test_requests_without_a_prompt_go_where_least_is_under_way():
    router = Router(replica("a", b"1"), replica("b", b""))
    assert [router.route("") for _ in range(2)] == ["b", "a"]
    assert not router.ours._choices
    asyncio.run(router.ours.choose_replicas([replica("a", b"")]))


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


def test_a_body_that_is_too_long_is_not_held():
    from milepost.ray.application import _body_of

    pieces = iter([b"123", b"456", b"789"])

    async def stream():
        for piece in pieces:
            yield piece

    request = SimpleNamespace(stream=stream)
    assert asyncio.run(_body_of(request, 5)) is None
    assert list(pieces) == [b"789"], "no more was read"
    pieces = iter([b"123", b"45"])
    assert asyncio.run(_body_of(request, 5)) == b"12345"


def test_a_route_prefix_is_not_part_of_the_path():
    from milepost.ray.application import Front

    asked = []

    async def look(path, _):
        asked.append(path)

    async def answer(scope, _, **options):
        asked.append((scope["path"], scope["root_path"], scope["server"]))
        yield 200, []

    replicas = SimpleNamespace(
        look=SimpleNamespace(remote=look),
        options=lambda **_: SimpleNamespace(ask=SimpleNamespace(remote=answer)),
    )

    async def receive():
        return {"type": "http.request", "body": b"{}"}

    scope = {"type": "http", "method": "POST", "path": "/llm/v1/completions", "headers": []}
    scope |= {"root_path": "/llm", "server": ("10.0.0.9", 80)}
    asyncio.run(Front(replicas)(Request(scope, receive)))
    assert asked == ["/v1/completions", ("/v1/completions", "", ("10.0.0.9", 80))]
