"""What the documents say of the server is so."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.server.conftest import get, serving

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def embedded():
    """A server of the embedded model, as the examples expect it."""
    with serving(None, "--served-model-name", "milepost-tiny") as server:
        yield server


def test_every_metric_of_the_deployment_page_exists(client, http):
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
    http.get("/nothing")
    exposed = set(re.findall(r"^milepost:\w+", http.get("/metrics").text, re.MULTILINE))
    for name in re.findall(r"(?<!/)milepost:[a-z]\w*", (DOCS / "deployment.md").read_text()):
        assert name in exposed or f"{name}_bucket" in exposed


def examples():
    """The curl commands of the documentation and of the README, as they are printed there."""
    pages = [(DOCS / "server.md").read_text(), (DOCS.parent / "README.md").read_text()]
    blocks = [block for page in pages for block in re.split(r"^```\w*\n", page, flags=re.M)[1::2]]
    return [c for b in blocks for c in re.findall(r"^curl .*?(?=^curl|\Z)", b, re.DOTALL | re.M)]


def test_the_curl_examples_work_as_printed(embedded):
    commands = examples()
    assert len(commands) == 6
    for command in commands:
        line = command.strip().replace("http://127.0.0.1:8000", embedded.url)
        done = subprocess.run(["bash", "-c", f"{line} -sSf"], capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout
        if "question.json" in command:
            again = subprocess.run(["bash", "-c", f"{line} -sSf"], capture_output=True, text=True)
            assert '"cached_tokens":320' in again.stdout, "what the README says"
        if "tool_choice" in command:
            (choice,) = json.loads(done.stdout)["choices"]
            functions = [call["function"] for call in choice["message"]["tool_calls"]]
            assert choice["finish_reason"] == "tool_calls"
            assert {its["name"] for its in functions} == {"get_help"}
            assert set(json.loads(functions[0]["arguments"])) == {"name", "section"}
    assert get(f"{embedded.url}/health").status_code == 200


def test_the_client_example_works_as_printed(embedded, capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "server.md").read_text(), re.S | re.M)
    exec(example.replace("http://127.0.0.1:8000", embedded.url), {})
    assert "cached_tokens=" in capsys.readouterr().out
