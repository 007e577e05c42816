"""Clients of HTTP/1.0, requests without a Host, and clients that close their side."""

import asyncio
import json
import socket
from urllib.parse import urlsplit

import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from uvicorn.server import ServerState

from milepost.server import connections
from milepost.server.callers import Keys
from milepost.server.config import ServerConfig
from milepost.server.gate import Gate
from milepost.server.vllm_metrics import HttpMetrics
from tests.server.test_faults import LONG
from tests.waiting import until


@pytest.fixture
def connection(server):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as sock:
        yield sock


def answered(sock, data, *, half_closes=False):
    """The head and the body of what comes until the server closes."""
    sock.sendall(data)
    if half_closes:
        sock.shutdown(socket.SHUT_WR)
    found = b""
    while more := sock.recv(65536):
        found += more
    head, _, body = found.partition(b"\r\n\r\n")
    return head.lower(), body


def request(body, version=b"1.0"):
    body = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/%b\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    return head % (version, len(body)) + body


def test_a_stream_ends_with_the_connection_for_a_client_that_knows_no_chunks(connection):
    body = {"prompt": "the quick", "max_tokens": 3, "ignore_eos": True, "stream": True}
    head, events = answered(connection, request(body))
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    *lines, done, rest = events.split(b"\n\n")
    assert [line[:7] for line in lines] == [b"data: {"] * len(lines)
    assert (done, rest) == (b"data: [DONE]", b"")


def test_a_whole_answer_has_its_length_in_http_1_0_too(connection):
    head, body = answered(connection, request({"prompt": "the quick", "max_tokens": 1}))
    assert b"content-length: %d" % len(body) in head


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 0, 400), ("1.1", 2, 400), ("1.0", 2, 400), ("1.0", 0, 200), ("1.1", 1, 200)],
)
def test_a_request_has_one_host(connection, version, hosts, status):
    head = f"GET /health HTTP/{version}\r\n" + "host: x\r\n" * hosts + "connection: close\r\n\r\n"
    head, body = answered(connection, head.encode())
    assert head.startswith(b"http/1.1 %d" % status)
    if status == 400:
        assert f"{hosts} Host headers" in json.loads(body)["error"]["message"]


def test_a_client_that_reads_nothing_of_a_whole_answer_is_dropped():
    """It would hold its connection, and all that waits for it, for ever; one that reads slowly may
    take longer than the limit."""
    own = connections.protocol(max_connections=9, head_timeout_s=60.0, write_timeout_s=0.5)
    length = 2**25

    async def answer(scope, receive, send):
        head = [(b"content-length", b"%d" % length)]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"a" * length})

    async def ask():
        config = uvicorn.Config(answer, ws="none")
        config.load()
        loop, state = asyncio.get_running_loop(), ServerState()
        listening = await loop.create_server(lambda: own(config, state, {}), "127.0.0.1", 0)
        async with listening, asyncio.timeout(20):
            address = listening.sockets[0].getsockname()
            _, never = await asyncio.open_connection(*address, limit=2**10)
            reader, slow = await asyncio.open_connection(*address, limit=2**10)
            for writer in (never, slow):
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            num_read = 0
            while num_read < length:
                num_read += len(await reader.read(2**20))
                await asyncio.sleep(0.02)
            slow.close()
            while state.connections:
                await asyncio.sleep(0.01)
            never.close()

    asyncio.run(ask())


def test_a_client_that_closed_its_side_gets_its_answers():
    """`nc -N` does so behind the last byte of its requests."""
    own = connections.protocol(max_connections=9, head_timeout_s=60.0)
    messages = []

    async def answer(scope, receive, send):
        while not messages or messages[-1]["type"] != "http.disconnect":
            messages.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})

    async def ask():
        metrics = HttpMetrics(CollectorRegistry())
        gate = Gate(answer, ServerConfig(access_log=False), Keys([], []), metrics)
        config = uvicorn.Config(gate, ws="none")
        config.load()
        loop, state = asyncio.get_running_loop(), ServerState()
        listening = await loop.create_server(lambda: own(config, state, {}), "127.0.0.1", 0)
        async with listening, asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
            writer.write_eof()
            found = await reader.read()
            writer.close()
            while state.connections:
                await asyncio.sleep(0)
            return found

    assert asyncio.run(ask()).count(b"here") == 2
    assert [message["type"] for message in messages].count("http.disconnect") == 1


def test_what_generates_for_a_client_that_closed_its_side_is_aborted(server, connection):
    head, body = answered(connection, request(LONG, b"1.1"), half_closes=True)
    assert head.startswith(b"http/1.1 499")
    assert "closed its side" in json.loads(body)["error"]["message"]
    until(lambda: server.metric("num_requests_running") == 0)


def test_a_stream_of_a_client_that_closes_its_side_ends(server, connection):
    connection.sendall(request({**LONG, "stream": True}, b"1.1"))
    while b"data: {" not in connection.recv(65536):
        pass
    connection.shutdown(socket.SHUT_WR)
    last = b""
    while more := connection.recv(65536):
        last = more
    assert not last.endswith(b"0\r\n\r\n"), "it was whole"
    until(lambda: server.metric("num_requests_running") == 0)
    assert not [line for line in server.log if "ASGI callable" in line]
