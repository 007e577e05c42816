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
import sys
import threading
import time
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.clients.nudging import nudging
from tests.kv_events.router import Following
from tests.server.conftest import folder, server, serving  # noqa: F401 - fixtures

PYTHON = os.environ.get("CLIENTS_PYTHON", "")
HERE = Path(__file__).parent
PAGE = 64
WORDS = ["the", "quick", "brown", "fox", "over", "lazy", "dog", "again", "weather", "today"]
ADVANCED = re.compile(r"live sequence advanced source=(\S+) rank=0 seq=(\d+)")
CREDITED = re.compile(r"credited_prefix_tokens=(?:Some\()?(\d+)")
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


AGENTS = os.environ.get("CLIENTS_NODE", "")
"""Where `npm` put the agents that are written for Node."""
LONG = ["--hf-overrides", '{"max_position_embeddings": 131072}', "--max-model-len", "131072"]
LONG += ["--cpu-cache-gib", "1", "--default-chat-template-kwargs", '{"enable_thinking": false}']
AGENT_TIMEOUT_S = 280


def agent(tmp_path, command, **environment):
    """The output of an agent in an empty folder with a home of its own."""
    program = Path(AGENTS) / "node_modules" / ".bin" / command[0]
    if not AGENTS or not program.exists():
        pytest.skip(f"npm has put no {command[0]} into CLIENTS_NODE")
    for name in ("home", "work"):
        (tmp_path / name).mkdir(exist_ok=True)
    own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), **environment}
    done = subprocess.run(
        [str(program), *command[1:]],
        cwd=tmp_path / "work",
        env=own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=AGENT_TIMEOUT_S,
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def test_codex_calls_a_tool_and_goes_on(folder, tmp_path):  # noqa: F811
    with serving(folder, *LONG) as server, nudging(server.url, "get_goal") as proxy:  # noqa: F811
        own = f'{{name="own",base_url="{proxy.url}/v1",wire_api="responses",env_key="KEY"}}'
        command = ["codex", "exec", "--skip-git-repo-check", "--sandbox", "read-only"]
        command += ["-m", "tiny", "-c", "model_provider=own", "-c", f"model_providers.own={own}"]
        said = agent(tmp_path, [*command, "say hello"], KEY="none")
    assert set(proxy.statuses) == {200}, proxy.refusals
    items = [item.get("type") for item in proxy.asked[-1][1]["input"]]
    assert "function_call_output" in items
    assert "done" in said
    assert {"tools[].web_search", "include[reasoning.encrypted_content]"} <= proxy.ignored


def test_claude_code_calls_a_tool_and_goes_on(folder, tmp_path):  # noqa: F811
    with serving(folder, *LONG) as server, nudging(server.url, "TaskList") as proxy:  # noqa: F811
        own = {"ANTHROPIC_BASE_URL": proxy.url, "ANTHROPIC_AUTH_TOKEN": "none"}
        own |= {"ANTHROPIC_MODEL": "tiny", "ANTHROPIC_SMALL_FAST_MODEL": "tiny"}
        own |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
        said = agent(tmp_path, ["claude", "-p", "say hello"], **own)
    assert set(proxy.statuses) == {200}, proxy.refusals
    last = proxy.asked[-1][1]["messages"]
    blocks = [block for message in last for block in message["content"]]
    assert "tool_result" in [block["type"] for block in blocks if isinstance(block, dict)]
    assert "system" in [message["role"] for message in last], "one in the middle"
    assert "done" in said


OPENCODE = {
    "model": "own/tiny",
    "small_model": "own/tiny",
    "autoupdate": False,
    "provider": {
        "own": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
            "models": {"tiny": {"name": "tiny"}},
        }
    },
}
CONTINUE = {
    "name": "own",
    "version": "0.0.1",
    "schema": "v1",
    "models": [
        {
            "name": "tiny",
            "provider": "vllm",
            "model": "tiny",
            "apiBase": "{url}/v1",
            "apiKey": "none",
            "roles": ["chat"],
            "capabilities": ["tool_use"],
        }
    ],
}
PI_MODEL = {"id": "tiny", "name": "tiny", "contextWindow": 131072, "maxTokens": 8000}
PI = {"baseUrl": "{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [PI_MODEL]}
QWEN = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": "{url}/v1", "OPENAI_MODEL": "tiny"}


@pytest.mark.parametrize(
    ("command", "tool", "file", "content", "environment"),
    [
        (["opencode", "run", "say hello"], "read", "work/opencode.json", OPENCODE, {}),
        (
            ["cn", "--config", "config.yaml", "--auto", "-p", "say hello"],
            "Read",
            "work/config.yaml",
            CONTINUE,
            {},
        ),
        (
            ["pi", "--provider", "own", "--model", "tiny", "-p", "say hello"],
            "read",
            "home/.pi/agent/models.json",
            {"providers": {"own": PI}},
            {},
        ),
        (
            ["qwen", "--auth-type", "openai", "-p", "say hello", "--yolo"],
            "list_directory",
            "work/empty.json",
            {},
            QWEN,
        ),
    ],
    ids=["opencode", "continue", "pi", "qwen"],
)
def test_agents_over_chat_call_a_tool_and_go_on(
    folder,  # noqa: F811
    tmp_path,
    command,
    tool,
    file,
    content,
    environment,
):
    with serving(folder, *LONG) as server, nudging(server.url, tool) as proxy:  # noqa: F811
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content).replace("{url}", proxy.url))
        own = {name: value.replace("{url}", proxy.url) for name, value in environment.items()}
        said = agent(tmp_path, command, **own)
    assert set(proxy.statuses) == {200}, proxy.refusals
    assert proxy.ignored == {""}
    assert "tool" in [message["role"] for message in proxy.asked[-1][1]["messages"]]
    assert "done" in said


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
        while True:
            line = self._lines.get(timeout=60)
            advanced = ADVANCED.search(line)
            if advanced:
                self._heard[advanced[1]] = int(advanced[2])
            if match := found(line):
                return match

    def wait_for_event(self, url, number):
        while self._heard.get(url, -1) < number:
            self.wait_for(ADVANCED.search)

    def credited(self):
        """What it expected the next request, by its log, to hit."""
        return int(self.wait_for(CREDITED.search)[1])

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
    """Two servers that tell routers what they have, and a follower of each."""
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
    there what the router expected, within a page; be it a chat, a text or token ids."""
    random, turns = Random(1), []
    flags = ["--policy", "kv_aware", "--router-temperature", "1"]
    with contextlib.ExitStack() as stack:
        servers, views = stack.enter_context(publishing(folder))
        urls = [each.url for each in servers]
        router = stack.enter_context(routing("--worker-urls", *urls, *flags))
        talks = [kind(random, number) for number in range(3) for kind in (Chat, Text, TokenIds)]
        for turn in range(4):
            for talk in talks:
                talk.go_on()
                tokens = talk.tokens(urls[0])
                follow(router, urls, views)
                predicted = [view.router.hit(tokens) for view in views]
                before = [each.metric("prompt_tokens_total") for each in servers]
                hit = talk.ask(router.url)
                who, credited = took(servers, before), router.credited()
                assert predicted[who] == max(predicted), (turn, predicted)
                assert credited == predicted[who], (turn, talk, predicted)
                assert abs(hit - credited) < PAGE, (turn, talk, credited, hit)
                turns.append((who, hit))
    assert {who for who, _ in turns} == {0, 1}, "new conversations are spread"
    assert all(hit >= PAGE for _, hit in turns[len(talks) :])


def follow(router, urls, views):
    """Until the router knows what there is."""
    for url, view in zip(urls, views, strict=True):
        view.catch_up()
        router.wait_for_event(url, view.number)


class Talk:
    """A conversation, turn by turn."""

    path = "/v1/completions"

    def __init__(self, random, number):
        self.random, self.number = random, number
        self.body = {"model": "tiny"}

    def tokens(self, url):
        rendered = httpx.post(f"{url}{self.path}/render", json=self.body).json()
        return (rendered[0] if isinstance(rendered, list) else rendered)["token_ids"]

    def ask(self, url):
        """What was hit by who prefilled it."""
        body = {**self.body, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}{self.path}", json=body, timeout=60).json()
        self.hear(answer["choices"][0])
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def words(self, num):
        return " ".join(self.random.choice(WORDS) for _ in range(num))


class Chat(Talk):
    """With a tool: nobody but the server can tokenize it."""

    path = "/v1/chat/completions"

    def __init__(self, random, number):
        super().__init__(random, number)
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        self.messages = [{"role": "system", "content": f"{number} {self.words(60)}"}]
        self.body |= {"messages": self.messages, "tools": [tool]}

    def go_on(self):
        self.messages.append({"role": "user", "content": self.words(20)})

    def hear(self, choice):
        content = choice["message"]["content"] or ""
        self.messages.append({"role": "assistant", "content": content})


class Text(Talk):
    """Goes on behind the answer."""

    def __init__(self, random, number):
        super().__init__(random, number)
        self.body["prompt"] = f"{number} {self.words(60)}"

    def go_on(self):
        self.body["prompt"] += f" {self.words(20)}"

    def hear(self, choice):
        self.body["prompt"] += choice["text"]


class TokenIds(Talk):
    """Leaves the answer out."""

    def __init__(self, random, number):
        super().__init__(random, number)
        self.body["prompt"] = random.choices(range(100, 250), k=150)

    def go_on(self):
        self.body["prompt"] += self.random.choices(range(100, 250), k=40)

    def hear(self, choice):
        pass


class Indexer:
    """A running indexer of Dynamo's, which follows servers' events."""

    def __init__(self):
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [PYTHON, "-m", "dynamo.indexer", "--port", str(port), "--threads", "2"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def follow(self, number, source):
        """A server, by where it says that it publishes."""
        addresses = {
            name: source[name].replace("*", "127.0.0.1") for name in ("endpoint", "replay_endpoint")
        }
        worker = {"instance_id": number, "model_name": "tiny", "block_size": PAGE, **addresses}
        assert httpx.post(f"{self._url}/register", json=worker).status_code == 201

    def hit(self, number, tokens):
        """What a prompt would hit there."""
        asked = {"model_name": "tiny", "token_ids": tokens[:-1]}
        found = httpx.post(f"{self._url}/query", json=asked).json()["instances"]
        return found.get(str(number), {}).get("longest_matched", 0)

    def wait_for(self, number, tokens, length):
        """Until it expects so much."""
        until = time.monotonic() + 30
        while self.hit(number, tokens) != length:
            assert time.monotonic() < until, (self.hit(number, tokens), length)
            time.sleep(0.02)

    def __enter__(self):
        wait_for(f"{self._url}/health")
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait()


def test_dynamos_indexer_knows_what_is_hit(folder, tmp_path):  # noqa: F811
    """On the device, in host memory and on disk: with less memory than the conversations need."""
    random = Random(3)
    flags = ["--num-pages", "24", "--num-slots", "4", "--max-num-seqs", "2", "--cache-host-gib"]
    flags += ["0.05", "--cache-dir", str(tmp_path)]
    with contextlib.ExitStack() as stack:
        servers, views = stack.enter_context(publishing(folder, *flags))
        indexer = stack.enter_context(Indexer())
        for number, each in enumerate(servers):
            indexer.follow(number, httpx.get(f"{each.url}/kv_event_sources").json()["0"])
        talks = [TokenIds(random, number) for number in range(8)]
        hits, media = [], set()
        for turn in range(3):
            for number, talk in enumerate(talks):
                talk.go_on()
                tokens, at = talk.body["prompt"], number % 2
                for who, view in enumerate(views):
                    view.catch_up()
                    indexer.wait_for(who, tokens, view.router.hit(tokens))
                media.update(*views[at].router.media.values())
                predicted = views[at].router.hit(tokens)
                hit = talk.ask(servers[at].url)
                assert predicted <= hit < predicted + PAGE, (turn, number)
                hits.append(hit)
        assert all(hit >= PAGE for hit in hits[len(talks) :])
        assert media == {"GPU", "CPU", "STORAGE"}


TRANSFER = json.dumps(
    {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_port": 0,
        "kv_connector_extra_config": {"transport": "socket", "peers": ["127.0.0.1"]},
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


SERVERS_OWN = ("openai_client", "responses_client", "anthropic_client", "fields", "forms")


def test_the_servers_own_tests_behind_a_router():
    """Streams, tools, logprobs, errors: as of one server, but for what routers do themselves."""
    files = [str(HERE.parent / "server" / f"test_{name}.py") for name in SERVERS_OWN]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.clients.via_router", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_router_that_follows_those_that_prefill(folder):  # noqa: F811
    """Two servers that prefill and two that decode: a turn is prefilled where most of it is, and
    hits there what the router expected, within a page."""
    random, flags = Random(2), ["--kv-transfer-config", TRANSFER]
    with contextlib.ExitStack() as stack:
        servers, views = stack.enter_context(publishing(folder, *flags))
        urls = [each.url for each in servers]
        decoding = [stack.enter_context(serving(folder, *flags)).url for _ in range(2)]
        pairs = [f for u in urls for f in ("--prefill", u)]
        pairs += [f for u in decoding for f in ("--decode", u)]
        router = stack.enter_context(
            routing("--vllm-pd-disaggregation", *pairs, "--policy", "kv_aware")
        )
        talks = [kind(random, number) for number in range(2) for kind in (Chat, Text, TokenIds)]
        hits = []
        for turn in range(3):
            for talk in talks:
                talk.go_on()
                follow(router, urls, views)
                predicted = [view.router.hit(talk.tokens(urls[0])) for view in views]
                before = [each.metric("prompt_tokens_total") for each in servers]
                hit = talk.ask(router.url)
                who, credited = took(servers, before), router.credited()
                assert credited == predicted[who] == max(predicted), (turn, talk, predicted)
                assert abs(hit - credited) < PAGE, (turn, talk, credited, hit)
                hits.append(hit)
        assert all(hit >= PAGE for hit in hits[len(talks) :])


def wait_for(url):
    transport = httpx.HTTPTransport(retries=5)
    with httpx.Client(transport=transport) as http:
        assert http.get(url).status_code == 200
