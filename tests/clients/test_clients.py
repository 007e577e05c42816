"""Real clients against real servers, each in a process of its own with its own libraries.

They stand in another virtual environment than the server, since their requirements exclude each
other; `make test-clients` makes it and names its interpreter in CLIENTS_PYTHON.
"""

import contextlib
import json
import os
import queue
import re
import socket
import subprocess
import threading
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.kv_events.router import Following
from tests.server.conftest import folder, server, serving  # noqa: F401 - fixtures

PYTHON = os.environ.get("CLIENTS_PYTHON", "")
HERE = Path(__file__).parent
PAGE = 64
WORDS = ["the", "quick", "brown", "fox", "over", "lazy", "dog", "again", "weather", "today"]
ADVANCED = re.compile(r"live sequence advanced source=(\S+) rank=0 seq=(\d+)")
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not PYTHON, reason="make test-clients names CLIENTS_PYTHON"),
]


def run(script, *arguments):
    """The client's process; its assertions are the test's."""
    command = [PYTHON, str(HERE / f"{script}_client.py"), *map(str, arguments)]
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("script", ["litellm", "langchain", "agents", "instructor"])
def test_libraries(server, script):  # noqa: F811
    run(script, server.url)


@pytest.mark.parametrize("script", ["lm_eval", "guidellm"])
def test_tools(server, folder, script):  # noqa: F811
    run(script, server.url, folder)


class Router:
    """A running vllm-router, and what it logs."""

    def __init__(self, *flags):
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [str(Path(PYTHON).parent / "vllm-router"), *flags, "--host", "127.0.0.1"]
        command += ["--port", self.url.rpartition(":")[2], "--log-level", "debug"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines = queue.Queue()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        self._heard = {}
        """The last message of each server's events that it has taken in."""

    def wait_for(self, found):
        """Until a line that it logs is what is looked for; returns what was found."""
        while not (match := found(self._lines.get(timeout=60))):
            pass
        return match

    def wait_for_event(self, url, number):
        while self._heard.get(url, -1) < number:
            match = self.wait_for(ADVANCED.search)
            self._heard[match[1]] = int(match[2])

    def close(self):
        self._process.terminate()
        self._reading.join()
        self._process.wait()
        self._process.stdout.close()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(re.sub(r"\x1b\[\d*m", "", line))


@contextlib.contextmanager
def routing(*flags):
    """A vllm-router with these flags."""
    with contextlib.closing(Router(*flags)) as router:
        router.wait_for(lambda line: "Starting server on" in line)
        wait_for(f"{router.url}/health")
        yield router


def test_a_router_in_front_of_two(server, folder):  # noqa: F811
    with serving(folder) as second:
        flags = ["--worker-urls", server.url, second.url, "--policy", "round_robin"]
        with routing(*flags) as router:
            run("router", router.url)
        for one in (server, second):
            assert one.metric("prompt_tokens_total") > 0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def publishing(folder, *flags):  # noqa: F811
    """Two servers that tell routers what they have, and a router's view of each."""
    with contextlib.ExitStack() as stack:
        servers, views = [], []
        for _ in range(2):
            replay = f"tcp://127.0.0.1:{free_port()}"
            own = {"endpoint": f"tcp://*:{free_port()}", "replay_endpoint": replay}
            events = json.dumps({"enable_kv_cache_events": True, **own})
            servers.append(
                stack.enter_context(serving(folder, "--kv-events-config", events, *flags))
            )
            views.append(stack.enter_context(contextlib.closing(Following(replay))))
        yield servers, views


def took(servers, before):
    """The one server that has served a prompt since then."""
    (who,) = [n for n, one in enumerate(servers) if one.metric("prompt_tokens_total") > before[n]]
    return who


def test_a_conversation_goes_where_its_state_is(folder):  # noqa: F811
    """vllm-router follows our events: each turn goes to the server that has most of it, and hits
    there what was predicted, within a page."""
    random, turns = Random(1), []
    flags = ["--policy", "kv_aware", "--router-temperature", "1"]
    with contextlib.ExitStack() as stack:
        servers, views = stack.enter_context(publishing(folder))
        urls = [each.url for each in servers]
        router = stack.enter_context(routing("--worker-urls", *urls, *flags))
        talks = [Conversation(random, number) for number in range(6)]
        for turn in range(4):
            for talk in talks:
                talk.go_on()
                tokens = talk.tokens(urls[0])
                for url, view in zip(urls, views, strict=True):
                    view.catch_up()
                    router.wait_for_event(url, view.number)
                predicted = [view.router.hit(tokens) for view in views]
                before = [each.metric("prompt_tokens_total") for each in servers]
                hit = talk.ask(router.url)
                who = took(servers, before)
                assert predicted[who] == max(predicted), (turn, predicted)
                assert abs(hit - predicted[who]) < PAGE, (turn, predicted, hit)
                turns.append((who, hit))
    assert {who for who, _ in turns} == {0, 1}, "new conversations are spread"
    assert all(hit >= PAGE for _, hit in turns[len(talks) :])


class Conversation:
    """A chat with a tool, which nobody but the server can tokenize."""

    def __init__(self, random, number):
        self._random = random
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        self._messages = [{"role": "system", "content": f"{number} {self._words(60)}"}]
        self._body = {"model": "tiny", "messages": self._messages, "tools": [tool]}

    def go_on(self):
        self._messages.append({"role": "user", "content": self._words(20)})

    def tokens(self, url):
        rendered = httpx.post(f"{url}/v1/chat/completions/render", json=self._body)
        return rendered.json()["token_ids"]

    def ask(self, url):
        """What was hit."""
        body = {**self._body, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        content = answer["choices"][0]["message"]["content"] or ""
        self._messages.append({"role": "assistant", "content": content})
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def _words(self, num):
        return " ".join(self._random.choice(WORDS) for _ in range(num))


TRANSFER = json.dumps(
    {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_port": 0,
        "kv_connector_extra_config": {"transport": "socket"},
    }
)


def test_prefill_and_decode_behind_a_router(folder):  # noqa: F811
    """Two servers that prefill and two that decode: only the latter answer, and what they answer
    was computed elsewhere."""
    flags = ["--kv-transfer-config", TRANSFER]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(folder, *flags)) for _ in range(4)]
        roles = ["--prefill", "--prefill", "--decode", "--decode"]
        pairs = [flag for role, one in zip(roles, servers, strict=True) for flag in (role, one.url)]
        router = stack.enter_context(
            routing("--vllm-pd-disaggregation", *pairs, "--policy", "round_robin")
        )
        run("router", router.url)
        run("disaggregation", router.url)
        assert all(one.metric("prompt_tokens_total") > 0 for one in servers)
        fetched = [one.metric("prompt_tokens_cached_total") for one in servers[2:]]
        assert sum(fetched) > 6 * 100, "all but the last token of each prompt"


def wait_for(url):
    transport = httpx.HTTPTransport(retries=5)
    with httpx.Client(transport=transport) as http:
        assert http.get(url).status_code == 200
