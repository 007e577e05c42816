"""Examples of docs/python.md run as they stand, and print what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import milepost
from milepost import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from milepost.engine.processes import starting
from tests import forked

PAGE = Path(milepost.__file__).parents[2] / "docs" / "python.md"
BLOCK = re.compile(
    r"^```python\n(.*?)^```\n(?:\n(?:[^`#\n][^\n]*\n)*?\n?```\n(.*?)^```)?", re.S | re.M
)


@pytest.fixture(scope="module")
def ran():
    """The names that all examples leave, and (what each printed, what the page says)."""
    names, printed = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "CONTEXT", forked.context())
        for example, said in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(example, names)
            printed.append((example, out.getvalue(), said))
        yield names, printed


def test_examples_print_what_the_page_says(ran):
    _, printed = ran
    assert len(printed) > 12
    assert sum(bool(said) for *_, said in printed) >= 7
    for example, found, said in printed:
        assert found == said or not said, example


def test_the_page_shows_every_public_name():
    text = PAGE.read_text(encoding="utf-8")
    shown = set(re.findall(r"\w+", "".join(example for example, _ in BLOCK.findall(text))))
    classes = set(milepost.__all__) - {"CompletionOutput", "RequestOutput", "__version__"}
    methods = {
        name
        for kind in (LLM, AsyncLLM)
        for name in vars(kind)
        if not name.startswith("_") and callable(getattr(kind, name))
    }
    mentioned = set(re.findall(r"\w+", text))
    assert classes <= shown
    assert methods - shown <= {"from_engine_args"}
    assert {*methods, "CompletionOutput", "RequestOutput"} <= mentioned
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == (
        StructuredOutputs(regex="a")
    )


def test_the_application_streams(ran):
    names, _ = ran
    with TestClient(names["app"]) as client:
        answer = client.post("/ask", json={"text": "What does str.partition do?"})
        assert answer.status_code == 200
        assert "separator" in answer.text
        assert client.post("/ask", json={}).status_code == 422


def test_a_mounted_server_answers(ran):
    names, _ = ran
    question = {"model": "tiny", "messages": [{"role": "user", "content": "What is json for?"}]}
    with TestClient(names["host"]) as client:
        answer = client.post("/llm/v1/chat/completions", json={**question, "max_tokens": 8})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert client.get("/llm/v1/models").json()["data"][0]["max_model_len"] == 4096
        assert client.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
        missing = client.get("/llm/nothing")
        assert (missing.status_code, "/llm/docs" in missing.text) == (404, True)
        with client.stream(
            "POST", "/llm/v1/chat/completions", json={**question, "stream": True, "max_tokens": 4}
        ) as stream:
            assert stream.read().endswith(b"data: [DONE]\n\n")


def test_a_server_of_its_own_starts_with_its_lifespan():
    from milepost.server import create_app

    with TestClient(create_app(max_model_len=512)) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "milepost-tiny"
