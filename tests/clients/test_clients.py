"""Real clients against real servers, each in a process of its own with its own libraries.

They stand in another virtual environment than the server, since their requirements exclude each
other; `make test-clients` makes it and names its interpreter in CLIENTS_PYTHON.
"""

import contextlib
import json
import os
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import folder, server, serving  # noqa: F401 - fixtures

PYTHON = os.environ.get("CLIENTS_PYTHON", "")
HERE = Path(__file__).parent
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


@contextlib.contextmanager
def routing(*flags):
    """The address of a vllm-router with these flags."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(PYTHON).parent / "vllm-router"), *flags]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        for line in process.stdout:
            if b"Starting server on" in line:
                break
        wait_for(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


def test_a_router_in_front_of_two(server, folder):  # noqa: F811
    with serving(folder) as second:
        flags = ["--worker-urls", server.url, second.url, "--policy", "round_robin"]
        with routing(*flags) as url:
            run("router", url)
        for one in (server, second):
            assert one.metric("prompt_tokens_total") > 0


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
        url = stack.enter_context(
            routing("--vllm-pd-disaggregation", *pairs, "--policy", "round_robin")
        )
        run("router", url)
        run("disaggregation", url)
        assert all(one.metric("prompt_tokens_total") > 0 for one in servers)
        fetched = [one.metric("prompt_tokens_cached_total") for one in servers[2:]]
        assert sum(fetched) > 6 * 100, "all but the last token of each prompt"


def wait_for(url):
    transport = httpx.HTTPTransport(retries=5)
    with httpx.Client(transport=transport) as http:
        assert http.get(url).status_code == 200
