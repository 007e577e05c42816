"""Hostile requests against one server, while a second client's stream goes on."""

import json
import os
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.server.bombs import BODIES, MIB, RAW
from tests.server.conftest import post, serving
from tests.waiting import until

TIMEOUTS = ("--head-timeout-s", "1", "--body-timeout-s", "1", "--keep-alive-timeout-s", "1")
FLAGS = ("--grammar-timeout-s", "0.4", *TIMEOUTS)
OTHER = {"prompt": "The method str.split", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def memory(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held(server):
    """File descriptors and threads of both processes."""
    pids = (server.process.pid, server.engine_pid)
    return [len(os.listdir(f"/proc/{pid}/{kind}")) for pid in pids for kind in ("fd", "task")]


class Stream:
    """A client that asks for the same answer again and again."""

    def __init__(self, url):
        self._url = url
        self.answers = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def ask(self):
        body = {**OTHER, "stream": True}
        response = post(f"{self._url}/v1/completions", json=body, timeout=90)
        *chunks, end = [line for line in response.text.splitlines() if line]
        assert end == "data: [DONE]"
        texts = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
        return "".join(choice["text"] for choice in texts)

    def _run(self):
        while not self._is_over.is_set():
            self.answers.append(self.ask())

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def attacked():
    """The server; what it is afterwards is what it was before."""
    with serving(None, *FLAGS, "--max-num-seqs", "16") as server:
        alone = Stream(server.url).ask()
        for body in ({"prompt": "a", "max_tokens": 1}, {"prompt": "a", "max_tokens": 1, "seed": 1}):
            form = {"structured_outputs": {"regex": "a"}}
            assert post(f"{server.url}/v1/completions", json={**body, **form}).is_success
        before, pids = held(server), (server.process.pid, server.engine_pid)
        sizes = [memory(pid) for pid in pids]
        with Stream(server.url) as stream:
            yield server
        assert stream.answers
        assert set(stream.answers) == {alone}
        until(lambda: server.metric("num_requests_running") == 0)
        assert server.metric("num_requests_waiting") == 0
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.metric("state_cache_usage_perc") == 0
        # A few threads are started when they are first needed.
        until(lambda: all(now <= then + 4 for now, then in zip(held(server), before, strict=True)))
        grown = [memory(pid) - size for pid, size in zip(pids, sizes, strict=True)]
        assert max(grown) < 300 * MIB


def test_there_are_enough():
    assert len(BODIES) + len(RAW) >= 100


@pytest.mark.parametrize("name", BODIES)
def test_bodies(attacked, name):
    path, body = BODIES[name]
    body = body() if callable(body) else body
    headers = {"content-type": "application/json"}
    response = post(attacked.url + path, content=body, headers=headers, timeout=90)
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert len(response.content) < 10_000


@pytest.mark.parametrize("name", RAW)
def test_connections(attacked, name):
    address = urlsplit(attacked.url)
    data = b""
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        try:
            for piece in RAW[name]:
                sock.sendall(piece)
            while more := sock.recv(65536):
                data += more
        except ConnectionError:
            pass  # reset while we were writing
    if data:
        assert data.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")), data[:100]
