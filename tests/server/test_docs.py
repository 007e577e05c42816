"""What the documents say of the server is so."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import httpx

from tests.server.conftest import serving

DOCS = Path(__file__).parents[2] / "docs"


def test_every_metric_of_the_dashboard_exists(client, http):
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
    http.get("/nothing")
    exposed = set(re.findall(r"^milepost:\w+", http.get("/metrics").text, re.MULTILINE))
    panels = json.loads((DOCS / "grafana.json").read_text())["panels"]
    used = set(re.findall(r"milepost:\w+", json.dumps(panels)))
    assert used - exposed <= {"milepost:checkpoints_evicted_total"}, "its labels come with a cause"


def test_the_curl_examples_work_as_printed(tmp_path):
    text = (DOCS / "server.md").read_text()
    block = re.search(r"## Try it\n\n```\n(.*?)```", text, re.DOTALL).group(1)
    commands = re.split(r"\n\n(?=curl)", block.strip())
    assert len(commands) == 4
    with serving(None, "--served-model-name", "milepost-tiny") as server:
        for command in commands:
            words = shlex.split(command.replace("http://127.0.0.1:8000", server.url))
            done = subprocess.run([*words, "-sS", "-f"], capture_output=True, text=True)
            assert done.returncode == 0, (command, done.stderr)
            assert done.stdout
        assert httpx.get(f"{server.url}/health").status_code == 200
