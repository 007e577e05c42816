"""What happens when a part fails, leaves, or is told to go."""

import asyncio
import json
import os
import re
import signal
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from milepost.server import run
from milepost.server.config import ServerConfig
from tests.server.conftest import NO_TLS, post, serving
from tests.waiting import until

LONG = {"prompt": "the quick brown fox", "max_tokens": 4000, "ignore_eos": True, "seed": 1}
DEADLINE_S = 30


def streaming(client, max_tokens=4000):
    """An open stream that has had its first chunk."""
    stream = client.completions.create(
        model="tiny",
        prompt=LONG["prompt"],
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    return stream


def test_a_killed_engine_fails_its_streams_and_ends_the_server(folder):
    with serving(folder) as server, server.client() as client:
        stream = streaming(client)
        waiting = threading.Thread(target=_expect_unavailable, args=(server,))
        waiting.start()
        until(lambda: server.metric("num_requests_running") == 2)
        os.kill(server.engine_pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="killed by signal 9"):
            list(stream)
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive()
        assert server.process.wait(DEADLINE_S) == 1
    assert any("killed by signal 9" in line for line in server.log)


def test_an_engine_that_hangs_is_given_up(folder):
    with serving(folder, "--step-timeout-s", "2") as server, server.client() as client:
        stream = streaming(client)
        os.kill(server.engine_pid, signal.SIGSTOP)
        with pytest.raises(openai.APIError, match="no sign of life for 2 seconds"):
            list(stream)
        assert server.process.wait(DEADLINE_S) == 1
    assert any("no sign of life" in line for line in server.log)


def _expect_unavailable(server):
    response = post(f"{server.url}/v1/completions", json=LONG, timeout=DEADLINE_S)
    assert response.status_code == 503
    assert "killed by signal 9" in response.json()["error"]["message"]


def test_a_signal_lets_short_requests_finish_and_fails_long_ones(folder):
    """Ctrl-C's here, SIGTERM's in the test below."""
    with (
        serving(folder, "--shutdown-timeout-s", "2", forks=False) as server,
        server.client() as client,
    ):
        stream = streaming(client)
        with server.http() as http:
            request = {**LONG, "max_tokens": 5, "stream": True}
            with http.stream("POST", "/v1/completions", json=request) as short:
                lines = short.iter_lines()
                next(lines)
                (checker,) = server.children(b"engine.constraints")
                server.process.send_signal(signal.SIGINT)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        with pytest.raises(openai.APIError, match="shut down"):
            list(stream)
        assert server.process.wait(DEADLINE_S) == 0
        until(lambda: not os.path.exists(f"/proc/{checker}"))
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


def test_a_second_ctrl_c_ends_what_runs(folder):
    """The first one says what is awaited."""
    with serving(folder) as server, server.client() as client:
        stream = streaming(client)
        server.process.send_signal(signal.SIGINT)
        until(lambda: any("still running: 1" in line for line in server.log))
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="told to stop at once"):
            list(stream)
        assert server.process.wait(DEADLINE_S) == 0
    assert not [line for line in server.log if "Traceback" in line]


def test_a_closed_terminal_lets_requests_finish(folder):
    """Both processes get the signal."""
    with serving(folder) as server, server.client() as client:
        stream = streaming(client, max_tokens=40)
        for pid in (server.engine_pid, server.process.pid):
            os.kill(pid, signal.SIGHUP)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert server.process.wait(DEADLINE_S) == 0


def test_the_engine_hears_no_ctrl_c(server):
    """From its first moment on: it had a traceback while it imported."""
    status = Path(f"/proc/{server.engine_pid}/status").read_text()
    (blocked,) = re.findall(r"^SigBlk:\s*(\w+)", status, re.MULTILINE)
    assert int(blocked, 16) >> (signal.SIGINT - 1) & 1


def test_a_signal_under_load_leaves_no_stream_without_an_end(folder):
    """Most of the requests wait for a place when the signal comes."""

    async def streamed(http, body, begun):
        async with http.stream(
            "POST", "/v1/completions", json={**body, "stream": True}
        ) as response:
            begun.append(response.status_code)
            lines = [line async for line in response.aiter_lines() if line]
        return lines[-1].removeprefix("data: ")

    async def all_of_them(server):
        begun = []
        limits = httpx.Limits(max_connections=None)
        options = {
            "base_url": server.url,
            "timeout": DEADLINE_S,
            "limits": limits,
            "verify": NO_TLS,
        }
        async with httpx.AsyncClient(**options) as http:
            short = {**LONG, "max_tokens": 8}
            first = asyncio.gather(*(streamed(http, short, begun) for _ in range(12)))
            while len(begun) < 12:
                await asyncio.sleep(0)
            second = asyncio.gather(*(streamed(http, LONG, begun) for _ in range(28)))
            whole = asyncio.gather(*(http.post("/v1/completions", json=LONG) for _ in range(8)))
            while len(begun) < 40:
                await asyncio.sleep(0)
            server.process.send_signal(signal.SIGTERM)
            return [*await first, *await second], await whole

    with serving(folder, "--shutdown-timeout-s", "2") as server:
        streams, whole = asyncio.run(all_of_them(server))
        assert server.process.wait(DEADLINE_S) == 0
        with server.client() as client, pytest.raises(openai.APIConnectionError):
            client.models.list()
    finished = [end for end in streams if end == "[DONE]"]
    errors = [json.loads(end)["error"] for end in streams if end != "[DONE]"]
    assert finished
    assert len(errors) >= 28 - 8
    assert all("shut down" in error["message"] for error in errors)
    for response in whole:
        assert response.status_code == 503
        assert "shut" in response.json()["error"]["message"]
    lines = [json.loads(line) for line in server.log if line.startswith("{")]
    assert len([line for line in lines if line["path"] == "/v1/completions"]) == 48


@pytest.fixture(scope="module")
def narrow(folder):
    """A server of few requests that drops whoever does not read for a second."""
    flags = ("--max-num-seqs", "4", "--max-waiting", "1", "--write-timeout-s", "1")
    with serving(folder, *flags) as server:
        yield server


def test_a_client_that_never_reads_is_dropped(narrow):
    with narrow.http() as http:  # starts the process that renders templates: two more sockets
        messages = [{"role": "user", "content": "a"}]
        http.post("/tokenize", json={"messages": messages})
    start = os.listdir(f"/proc/{narrow.process.pid}/fd")
    address = urlsplit(narrow.url)
    sockets = []
    for _ in range(4):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.connect((address.hostname, address.port))
        body = json.dumps({**LONG, "stream": True, "logprobs": 20, "return_token_ids": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        sock.sendall(f"{head}content-type: application/json\r\n\r\n{body}".encode())
        sockets.append(sock)
    until(lambda: narrow.metric("num_requests_running") == 4)
    until(lambda: narrow.metric("num_requests_running") == 0)
    until(lambda: len(os.listdir(f"/proc/{narrow.process.pid}/fd")) <= len(start) + 1)
    gone = [line for line in narrow.log if '"client_gone": true' in line]
    assert len(gone) == 4
    for sock in sockets:
        sock.close()


def test_disconnects_free_everything(server):
    with server.http() as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            next(response.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=LONG, timeout=0.2)
    until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("state_cache_usage_perc") == 0


def test_a_full_queue_says_when_to_come_back(narrow):
    with narrow.client() as client:
        streams = [streaming(client) for _ in range(4)]
        done = threading.Thread(target=lambda: _swallow(narrow))
        done.start()
        until(lambda: narrow.metric("num_requests_waiting") == 1)
        with pytest.raises(openai.RateLimitError) as raised:
            client.completions.create(model="tiny", prompt="more", max_tokens=1)
        assert int(raised.value.response.headers["retry-after"]) >= 1
        assert client.models.list()
        for stream in streams:
            stream.close()
        done.join(DEADLINE_S)
        assert client.completions.create(model="tiny", prompt="more", max_tokens=1)


def _swallow(server):
    post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 2}, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def on_socket(folder, tmp_path_factory):
    """A client of a server that listens on a socket file and bounds the time of requests."""
    path = tmp_path_factory.mktemp("socket") / "milepost.sock"
    with serving(folder, "--uds", str(path), "--request-timeout-s", "0.3"):
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://x", timeout=DEADLINE_S) as http:
            yield http


def test_a_unix_socket(on_socket):
    assert on_socket.get("/health").status_code == 200


def test_a_request_that_takes_too_long_is_ended(on_socket):
    response = on_socket.post("/v1/completions", json=LONG)
    assert response.status_code == 504
    text = on_socket.post("/v1/completions", json={**LONG, "stream": True}).text
    events = [line for line in text.splitlines() if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "timeout"
    idle = re.compile(r"^milepost:num_requests_running\S* 0(\.0)?$", re.MULTILINE)
    until(lambda: idle.search(on_socket.get("/metrics").text))


@pytest.fixture(scope="module")
def locked(folder, tmp_path_factory):
    """A server with all kinds of keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("tenant\n\nother\n")
    flags = ("--api-key", "one", "--api-key", "two", "--key-file", str(keys), "--admin-key", "root")
    with serving(folder, *flags) as server:
        yield server


def test_without_a_key_nothing_is_served(locked):
    with httpx.Client(base_url=locked.url, verify=NO_TLS, timeout=DEADLINE_S) as http:
        paths = http.get("/openapi.json", headers={"authorization": "Bearer one"}).json()["paths"]
        assert http.get("/health").status_code == 200
        for path in [*paths, "/docs", "/openapi.json", "/nothing"]:
            if path == "/health":
                continue
            for method in ("GET", "POST"):
                for key in (None, "three", "onetwo"):
                    headers = {} if key is None else {"authorization": f"Bearer {key}"}
                    response = http.request(method, path, headers=headers)
                    assert response.status_code == 401, (path, key)
    with locked.client("two") as client:
        assert client.completions.create(model="tiny", prompt="a", max_tokens=1)
    with locked.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_operators_have_keys_of_their_own(locked):
    with httpx.Client(base_url=locked.url, verify=NO_TLS, timeout=DEADLINE_S) as http:
        for path, method in (("/metrics", "GET"), ("/reset_prefix_cache", "POST")):
            for key, status in (("one", 401), ("tenant", 401), ("root", 200)):
                headers = {"authorization": f"Bearer {key}"}
                assert http.request(method, path, headers=headers).status_code == status
    for key in ("one", "tenant", "other", "root"):
        with locked.client(key) as client:
            assert client.models.list()


def test_small_writes_are_sent_at_once():
    """Nagle's algorithm with a delayed ACK adds 40 ms to the first token."""

    async def accepted():
        with run._listen(ServerConfig(port=0)) as sock:
            seen = asyncio.get_running_loop().create_future()
            listener = await asyncio.start_server(
                lambda _, writer: seen.set_result(writer), sock=sock
            )
            async with listener:
                _, ours = await asyncio.open_connection(*sock.getsockname())
                writer = await seen
                option = writer.get_extra_info("socket").getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_NODELAY
                )
                for one in (ours, writer):
                    one.close()
                    await one.wait_closed()
                return option

    assert asyncio.run(accepted())


def test_a_port_in_use_is_found_before_loading(folder):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        with (
            pytest.raises(AssertionError, match=r"cannot listen.*--port"),
            serving(folder, "--port", port),
        ):
            pass


def test_many_streams_some_of_which_leave(server):
    """Those that stay get the answer that the same request gets alone."""

    async def one(client, seed, leaves):
        stream = await client.completions.create(
            model="tiny",
            prompt=f"number {seed % 5}",
            max_tokens=24,
            seed=seed,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if leaves:
                await stream.close()
                return None
        return text

    async def all_of_them():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            together = [one(client, seed, seed % 3 == 0) for seed in range(40)]
            found = await asyncio.gather(*together)
            alone = [await one(client, seed, False) for seed in range(40)]
        return found, alone

    found, alone = asyncio.run(all_of_them())
    assert [text for text in found if text is not None] == [
        text for seed, text in enumerate(alone) if seed % 3
    ]
    until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("kv_cache_usage_perc") == 0
