"""What a connection may cost before its request is known, and how a server begins and ends."""

import asyncio
import errno
import io
import json
import logging
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from uvicorn.server import ServerState

from milepost.cli import serve
from milepost.config import EngineConfig
from milepost.engine.metrics import Metric
from milepost.engine.processes.client import EngineClient
from milepost.errors import ConfigError, EngineDeadError
from milepost.server import connections, loading, stats
from milepost.server.callers import Keys
from milepost.server.config import ServerConfig
from milepost.server.gate import Gate
from milepost.server.run import HttpServer
from milepost.server.vllm_metrics import HttpMetrics
from tests.server.conftest import ENVIRONMENT, Server, get, post, serving
from tests.server.inprocess import service
from tests.server.test_faults import LONG
from tests.waiting import until

HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
MAX_CONNECTIONS = 40


@pytest.fixture(scope="module")
def limited(folder):
    flags = ("--head-timeout-s", "1", "--body-timeout-s", "1", "--api-key", "one")
    flags += ("--max-connections", str(MAX_CONNECTIONS), "--max-request-bytes", "10000")
    with serving(folder, *flags) as running:
        yield running


def test_idle_connections_outlive_those_of_proxies():
    """Pools of nginx, ALB and Go's transport keep theirs for 60 to 90 seconds."""

    async def kept(config):
        own = service(config)
        try:
            return HttpServer(own, 128).config.timeout_keep_alive
        finally:
            await own.close()

    assert asyncio.run(kept(ServerConfig())) > 90
    assert asyncio.run(kept(ServerConfig(keep_alive_timeout_s=1.5))) == 2


@pytest.fixture
def connect(limited):
    address = urlsplit(limited.url)
    opened = []

    def opens():
        sock = socket.create_connection((address.hostname, address.port), timeout=30)
        opened.append(sock)
        return sock

    yield opens
    for sock in opened:
        sock.close()


def sent(sock, *pieces):
    """Send until the server has had enough."""
    try:
        for piece in pieces:
            sock.sendall(piece)
    except OSError:
        pass


def received(sock):
    """All that comes until the server closes."""
    data = b""
    try:
        while more := sock.recv(65536):
            data += more
    except ConnectionError:
        pass
    return data


def status(data):
    return int(data.split(b" ", 2)[1]) if data else None


LINE = b"x-%d: " + b"a" * 1000 + b"\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD, b"x: ", *[b"a" * 65536] * 40],
        [HEAD, *[LINE % i * 60 for i in range(40)]],
        [b"GET /", *[b"a" * 65536] * 40],
        [b"a" * 65536] * 40,
    ],
    ids=["one header", "many headers", "the path", "no request at all"],
)
def test_heads_are_bounded_before_a_key_is_asked_for(connect, pieces):
    sock = connect()
    sent(sock, *pieces)
    assert status(received(sock)) in (400, 431, None)  # None: reset while we were writing


def test_a_large_head_in_one_piece_is_refused(connect):
    sock = connect()
    sent(sock, HEAD + b"x: " + b"a" * 2**16 + b"\r\nconnection: close\r\n\r\n")
    assert status(received(sock)) == 431


def test_trailers_and_chunk_extensions_are_bounded(connect):
    chunked = b"authorization: Bearer one\r\ntransfer-encoding: chunked\r\n\r\n"
    for pieces in ([b"0\r\n", *[LINE % i * 60 for i in range(40)]], [b"1;", *[b"a" * 65536] * 40]):
        sock = connect()
        sent(sock, POST + chunked, *pieces)
        received(sock)  # it is closed


def test_requests_sent_ahead_are_bounded(connect):
    sock = connect()
    request = POST + b"authorization: Bearer one\r\ncontent-length: 2\r\n\r\n{}"
    sent(sock, request * 1000)
    assert received(sock).count(b"HTTP/1.1 400") <= connections.MAX_PIPELINED


def test_connections_that_say_nothing_are_closed(connect):
    quiet, slow = connect(), connect()
    sent(slow, HEAD)
    assert received(quiet) == b""
    assert status(received(slow)) == 408


def test_a_body_that_does_not_come_is_not_waited_for(connect):
    sock = connect()
    sent(sock, POST + b"authorization: Bearer one\r\ncontent-length: 10\r\n\r\n{")
    data = b""
    while b"no more of the body" not in data:
        data += sock.recv(65536)
    assert status(data) == 408


def test_a_body_that_comes_by_the_byte_is_not_waited_for():
    """No pause is long, but what has come is held all the while."""
    config = ServerConfig(request_timeout_s=0.05, max_request_bytes=2**16, access_log=False)

    async def app(_, receive, __):
        while True:
            await receive()

    async def receive():
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def answer():
        messages = asyncio.Queue()
        gate = Gate(app, config, Keys([], []), HttpMetrics(CollectorRegistry()))
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await gate(scope, receive, messages.put)
        return messages.get_nowait(), messages.get_nowait()

    start, body = asyncio.run(answer())
    assert start["status"] == 408
    assert b"within 0.05 seconds" in body["body"]


def test_connections_are_counted(limited, connect):
    opened = [connect() for _ in range(MAX_CONNECTIONS + 8)]
    answers = [received(sock) for sock in opened]
    assert [status(data) for data in answers].count(503) >= 8
    assert get(f"{limited.url}/health").is_success


def test_a_client_that_leaves_is_no_failure_of_the_server(limited):
    headers = {"authorization": "Bearer one"}

    def refused(code):
        text = get(f"{limited.url}/metrics", headers=headers).text
        lines = [line for line in text.splitlines() if line.startswith("milepost:request_refused")]
        return sum(float(line.split()[-1]) for line in lines if f'"{code}"' in line)

    before = refused(499)
    with pytest.raises(httpx.ReadTimeout):
        post(f"{limited.url}/v1/completions", json=LONG, headers=headers, timeout=0.5)
    until(lambda: refused(499) == before + 1)
    assert refused(500) == 0
    (line,) = [line for line in limited.log if '"client_gone": true' in line and "finish" in line]
    assert '"status": 499' in line


def test_a_client_that_sent_ahead_is_missed_when_it_leaves():
    """The first request is running while the protocol already holds the next ones."""
    own = connections.protocol(max_connections=9, head_timeout_s=60.0)
    running, messages = asyncio.Event(), []

    async def answer(scope, receive, send):
        running.set()
        while not messages or messages[-1]["type"] != "http.disconnect":
            messages.append(await receive())

    async def leave_early():
        config = uvicorn.Config(answer, ws="none")
        config.load()
        loop, state = asyncio.get_running_loop(), ServerState()
        listening = await loop.create_server(lambda: own(config, state, {}), "127.0.0.1", 0)
        async with listening, asyncio.timeout(10):
            _, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
            writer.write((HEAD + b"\r\n") * 3)
            await running.wait()
            writer.transport.abort()
            while state.tasks:
                await asyncio.sleep(0)

    asyncio.run(leave_early())
    assert [message["type"] for message in messages].count("http.disconnect") == 1


def test_a_huge_body_is_refused_early_and_late(limited, connect):
    def chunks():
        for _ in range(20):
            yield b"a" * 1000

    headers = {"authorization": "Bearer one", "content-type": "application/json"}
    for body in (b'{"prompt": "' + b"a" * 20_000 + b'"}', chunks()):
        response = post(f"{limited.url}/v1/completions", content=body, headers=headers)
        assert response.status_code == 413
        assert response.json()["error"]["type"] == "request_too_large"
    sock = connect()
    length = b"authorization: Bearer one\r\ncontent-length: %d\r\n\r\n" % 10**30
    sent(sock, POST + length)
    assert status(received(sock)) in (400, 413)


KEY = b"authorization: Bearer one\r\n"
CHUNKED = KEY + b"transfer-encoding: chunked\r\n\r\n"
WHOLE = POST + KEY + b"content-length: 2\r\n\r\n{}"


def responses(data):
    """(status, whether the connection ends behind it, body) of each response."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        (length,) = re.findall(rb"(?mi)^content-length: (\d+)", head)
        found.append((status(head), b"connection: close" in head.lower(), data[: int(length)]))
        data = data[int(length) :]
    return found


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNKED + b"zz\r\n"],
        [CHUNKED + b"-1\r\n"],
        [CHUNKED + b"f" * 40 + b"\r\n"],
        [CHUNKED, b"5\r\n{}   XX\r\n"],
        [CHUNKED + b"2\r\n{}\r\n", b"0\r\nno trailer\r\n\r\n"],
        [KEY + b"transfer-encoding: gzip\r\n\r\n{}"],
        [KEY + b"transfer-encoding: chunked, gzip\r\n\r\n{}"],
        [KEY + b"connection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: gzip\r\n\r\n{}"],
        [KEY + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{}"],
        [KEY + b"content-length: 2x\r\n\r\n{}"],
        [KEY + b"no header\r\n\r\n{}"],
    ],
)
def test_what_is_framed_wrongly_is_answered(connect, pieces):
    sock = connect()
    sent(sock, POST, *pieces)
    ((code, is_last, body),) = responses(received(sock))
    assert (code, is_last) == (400, True)
    assert "chunk sizes" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "codings", [b"gzip, chunked", b"deflate , Chunked", b"gzip\r\nTE: chunked"]
)
def test_a_body_that_is_encoded_besides_its_chunks_is_refused(connect, codings):
    """Its chunks are framed well; read on, they would be taken for the body."""
    sock = connect()
    head = b"transfer-encoding: " + codings.replace(b"TE", b"Transfer-Encoding") + b"\r\n\r\n"
    sent(sock, WHOLE + POST + KEY + head + b"2\r\n{}\r\n0\r\n\r\n" + WHOLE)
    (first, second) = responses(received(sock))
    assert first[:2] == (400, False)
    assert second[:2] == (501, True)
    assert "use chunked alone" in json.loads(second[2])["error"]["message"]


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_a_request_for_another_protocol_is_read_whole(connect, protocol):
    """Java's client asks for HTTP/2 with the first request of a connection, whatever its body."""
    sock = connect()
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: " + protocol + b"\r\n"
    body = b'{"prompt": "a", "max_tokens": -3}'
    sized = POST + KEY + upgrade + b"content-length: %d\r\n\r\n" % len(body) + body
    chunked = POST + KEY + upgrade + CHUNKED.removeprefix(KEY) + b"%x\r\n%b" % (len(body), body)
    bare = HEAD + upgrade + b"\r\n"
    for byte in sized[:-1]:
        sent(sock, bytes([byte]))
    sent(sock, sized[-1:] + bare + chunked, b"\r\n0\r\n\r\n" + bare)
    sent(sock, HEAD + b"connection: close\r\n\r\n")
    answers = responses(received(sock))
    assert [code for code, _, _ in answers] == [400, 200, 400, 200, 200]
    assert b"max_tokens" in answers[0][2]
    assert answers[0][2] == answers[2][2]


def test_trailers_that_are_too_long_are_answered(connect):
    sock = connect()
    sent(sock, POST + CHUNKED + b"0\r\n", LINE % 1 * 200)
    ((code, is_last, _),) = responses(received(sock))
    assert (code, is_last) == (431, True)


def test_requests_before_what_cannot_be_read_have_their_answers(connect):
    for end in (b"garbage\r\n\r\n", b"GET /health HTTP/1.1\r\nno header\r\n\r\n"):
        sock = connect()
        sent(sock, WHOLE * 2 + end)
        first, second, third = responses(received(sock))
        assert first == second
        assert "prompt" in json.loads(first[2])["error"]["message"]
        assert (third[0], third[1]) == (400, True)
        assert "valid HTTP" in json.loads(third[2])["error"]["message"]


def test_a_refusal_keeps_the_connection_of_a_body_that_has_come(connect):
    sock = connect()
    nowhere = WHOLE.replace(b"/v1/completions", b"/nowhere")
    sent(sock, nowhere, nowhere + HEAD + b"connection: close\r\n\r\n")
    assert [(code, is_last) for code, is_last, _ in responses(received(sock))] == [
        (404, False),
        (404, False),
        (200, True),
    ]


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (POST + CHUNKED + b"fffffff\r\n", 413),
        (POST + KEY + b"content-length: 200000000\r\n\r\n", 413),
        (POST + b"content-length: 200000000\r\n\r\n", 401),
        (POST.replace(b"/v1/", b"/no/") + KEY + b"content-length: 200000000\r\n\r\n", 404),
    ],
)
def test_behind_a_refusal_nobody_reads_on(connect, head, code):
    """A client that sends first and reads later gets its answer, and one that never ends an end."""
    sock = connect()
    sock.sendall(head + b"a" * 4_000_000)
    answer = sock.recv(4096, socket.MSG_PEEK)
    assert status(answer) == code
    assert b"connection: close" in answer
    with pytest.raises(ConnectionError):
        sock.sendall(b"a" * 150 * 2**20)


def test_who_says_no_more_behind_a_refusal_is_let_go(monkeypatch):
    monkeypatch.setattr(connections, "LINGER_S", 0.0)
    own = connections.protocol(max_connections=9, head_timeout_s=60.0)

    async def open_behind_it():
        state, loop = ServerState(), asyncio.get_running_loop()
        metrics = HttpMetrics(CollectorRegistry())
        gate = Gate(None, ServerConfig(access_log=False), Keys([], []), metrics)
        config = uvicorn.Config(gate, ws="none")
        config.load()
        listening = await loop.create_server(lambda: own(config, state, {}), "127.0.0.1", 0)
        async with listening:
            reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
            writer.write(b"POST /%0a HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
            answer = await reader.read()
            async with asyncio.timeout(10):
                while state.connections:
                    await asyncio.sleep(0)
            writer.close()
            return answer

    assert status(asyncio.run(open_behind_it())) == 400


def test_a_priority_is_for_the_operator_to_allow(limited):
    body = {"prompt": "a", "max_tokens": 1, "priority": -5}
    headers = {"authorization": "Bearer one"}
    response = post(f"{limited.url}/v1/completions", json=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"
    assert "--scheduling-policy" in response.json()["error"]["message"]


def test_open_files_are_raised_to_what_is_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
    try:
        limit = connections.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("limit", "warns"), [(65, True), (255, True), (1024, False)])
def test_few_open_files_are_logged(limit, warns, monkeypatch, caplog):
    """Connections past them get 503, which no line of the access log says."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert connections.raise_file_limit() == limit
    assert ("raise `ulimit -n`" in caplog.text) is warns


@pytest.mark.parametrize("can_be_raised", [False, True])
def test_too_few_open_files_for_any_connection_are_refused(can_be_raised, monkeypatch):
    def refuse(*_):
        raise OSError(1, "not permitted")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 64 if can_be_raised else 24))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with pytest.raises(ConfigError, match=r"open files: 24, .* raise `ulimit -n` to 256 or more"):
        connections.raise_file_limit()


def test_a_model_that_is_none_is_one_line(tmp_path):
    command = [sys.executable, "-m", "milepost", "serve", str(tmp_path / "no-such"), "--port", "0"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no-such" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_an_engine_is_not_waited_for_when_its_model_is_none(tmp_path):
    """It takes seconds to import what it needs, and then says the same."""

    class NeverReady(EngineClient):
        is_over = False

        async def start(self):
            await asyncio.Event().wait()

        async def close(self):
            self.is_over = True

    async def load():
        config = EngineConfig(model=str(tmp_path / "no-such"))
        client = NeverReady(config)
        async with asyncio.timeout(10):
            with pytest.raises(ConfigError, match="no-such"):
                await loading.load(ServerConfig(), config, client)
        assert client.is_over

    asyncio.run(load())


def test_a_signal_while_loading_ends_both_processes(folder):
    command = [sys.executable, "-m", "milepost", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        server = Server(process, "")
        until(lambda: server.children(b"spawn_main"))
        engine_pid = server.engine_pid
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
        assert process.wait(30) == 0
        assert not Path(f"/proc/{engine_pid}").exists()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_address_that_nobody_can_read_ends_nothing(monkeypatch, caplog):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(serve, "forget_stdout", lambda: None)
    serve._announce("http://x", [])
    assert "http://x" in caplog.text


def test_figures_are_logged_while_there_are_some(caplog):
    """vLLM's line: one for each interval with work in it, and one behind the last."""
    moments = [(0, 0), (5, 1), (9, 0), (9, 0), (9, 0)]
    names = ["prefix_cache_queries", "prefix_cache_hits", "prompt_tokens_computed", "decode_tokens"]
    names += ["num_requests_waiting", "kv_cache_usage_perc", "state_cache_usage_perc"]

    class Client:
        async def metrics(self):
            if not moments:
                raise asyncio.CancelledError
            num_steps, num_running = moments.pop(0)
            values = dict.fromkeys(names, 0.0)
            values |= {"num_steps": num_steps, "num_requests_running": num_running}
            return [Metric(name=f"milepost:{name}", value=value) for name, value in values.items()]

    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        asyncio.run(stats.log_stats(Client(), interval_s=0))
    lines = [record.message for record in caplog.records if record.name == "milepost.stats"]
    assert len(lines) == 3
    assert "Running: 1 reqs" in lines[0]
    before = dict.fromkeys((*names, "num_steps", "num_requests_running"), 0)
    after = {**before, "prefix_cache_queries": 200, "prefix_cache_hits": 50, "decode_tokens": 30}
    assert "Avg generation throughput: 15.0 tokens/s" in stats.line(before, after, 2.0)
    assert "Prefix cache hit rate: 25.0%" in stats.line(before, after, 2.0)


def test_an_engine_that_dies_before_the_first_line_ends_the_statistics_alone():
    class Client:
        async def metrics(self):
            raise EngineDeadError("exit code 1")

    asyncio.run(stats.log_stats(Client(), interval_s=0))
