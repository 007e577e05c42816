"""Real clients against real servers, each in a process of its own with its own libraries.

They stand in another virtual environment than the server, since their requirements exclude each
other; `make test-clients` makes it and names its interpreter in CLIENTS_PYTHON.
"""

import os
import socket
import subprocess
import sys
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


def test_a_router_in_front_of_two(server, folder):  # noqa: F811
    with serving(folder) as second, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        router = Path(PYTHON).parent / "vllm-router"
        command = [sys.executable, "-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"]
        command += [str(router), "--worker-urls", server.url, second.url]
        command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            for line in process.stdout:
                if b"Starting server on" in line:
                    break
            wait_for(f"http://127.0.0.1:{port}/health")
            run("router", f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.communicate()
        for one in (server, second):
            assert one.metric("prompt_tokens_total") > 0


def wait_for(url):
    transport = httpx.HTTPTransport(retries=5)
    with httpx.Client(transport=transport) as http:
        assert http.get(url).status_code == 200
