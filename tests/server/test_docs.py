"""What the documents say of the server is so."""

import re
from pathlib import Path

import pytest

from tests.server.conftest import serving

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


def test_the_client_example_works_as_printed(embedded, capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "server.md").read_text(), re.S | re.M)
    exec(example.replace("http://127.0.0.1:8000", embedded.url), {})
    assert "cached_tokens=" in capsys.readouterr().out
