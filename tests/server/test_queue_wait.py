"""Requests that would wait too long for their turn, or have: 503 and when to try again."""

import asyncio
import threading

import httpx
import pytest

from milepost.config import EngineConfig
from milepost.engine.processes.stream import Stream
from milepost.errors import QueueWaitError
from milepost.server import app
from milepost.server.config import ServerConfig
from tests.server.conftest import get, post, serving
from tests.server.inprocess import service
from tests.server.test_faults import streaming
from tests.waiting import until

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"model": "tiny", "messages": MESSAGES},
    "/v1/responses": {"model": "tiny", "input": "hello"},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 4},
}
SHAPES = {
    path: {"type": "service_unavailable", "message": "later", "param": None, "code": 503}
    for path in BODIES
} | {"/v1/messages": {"type": "overloaded_error", "message": "later"}}


def refused(path, body):
    """The response of a server whose engine refuses the request after a while; what it dropped."""
    dropped = []

    async def send():
        own = service(ServerConfig())
        own.client.config = EngineConfig(max_queue_wait_s=5.0)
        own.client.forget = lambda stream, **_: dropped.append(stream)

        def add(prompts, params, **_options):
            stream = Stream([1], params.n, own.client.forget)
            error = QueueWaitError("later", retry_after_s=17)
            asyncio.get_running_loop().call_soon(stream.fail, error)
            return stream

        own.client.add = add
        transport = httpx.ASGITransport(app.build(own), raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return await http.post(path, json=body)
        finally:
            await own.close()

    return asyncio.run(send()), dropped


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_refusal_has_its_status_and_when_to_try_again(path, stream):
    """A stream too: nothing of it has been sent when its request is refused."""
    response, dropped = refused(path, {**BODIES[path], "stream": stream})
    assert response.status_code == 503, response.text
    assert response.headers["retry-after"] == "17"
    assert response.json()["error"] == SHAPES[path]
    assert len(dropped) == 1


def test_a_server_ends_those_that_wait_too_long_and_refuses_the_next(folder):
    """One seat, taken by a long answer: whoever waits is ended. Once the rate is known (it is next
    to nothing), a second one in the queue is refused at once."""
    flags = ("--max-num-seqs", "1", "--max-queue-wait-s", "1")
    with serving(folder, *flags) as server, server.client() as client:

        def ask():
            return post(f"{server.url}/v1/completions", json=BODIES["/v1/completions"], timeout=60)

        def counted(when):
            lines = get(f"{server.url}/metrics").text.splitlines()
            lines = [line for line in lines if line.startswith("milepost:queue_wait_refused_total")]
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'when="{when}"' in line)

        stream = streaming(client)
        for number in (1, 2):
            late = ask()
            assert late.status_code == 503, late.text
            assert "has waited 1 s" in late.json()["error"]["message"]
            assert int(late.headers["retry-after"]) >= 1
            assert counted("waiting") == number
        waiting = threading.Thread(target=ask)
        waiting.start()
        until(lambda: server.metric("num_requests_waiting") == 1)
        early = ask()
        waiting.join()
        stream.close()
        assert early.status_code == 503
        assert "lets none wait longer than 1 s" in early.json()["error"]["message"]
        assert counted("arrival") == 1
        until(lambda: server.metric("num_requests_running") == 0)
        assert ask().status_code == 200, "nobody is before it"
