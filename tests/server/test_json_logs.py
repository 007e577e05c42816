"""With `--log-format json` every line of a server's standard error is a JSON object."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from milepost.logs import (
    MAX_CHARS,
    FieldsFormatter,
    JsonFormatter,
    LogSetup,
    RequestIds,
    StrayText,
    of_request,
)
from tests.server.conftest import ENVIRONMENT

ROOT = Path(__file__).parents[2]
SERVE = """
import sys, threading, warnings
from milepost.__main__ import run
from milepost.server.service import Service

def planted(self, name):
    if name == "boom":
        warnings.warn("a warning of Python's")
        print("a stray\\nline", file=sys.stderr)
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        raise RuntimeError("planted")
    return "tiny"

Service.check_model = planted
run()
"""


def lines_of(text: str) -> list[dict]:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "process", "message"} <= line.keys()
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
    return lines


@pytest.fixture(scope="module")
def lines(folder):
    """The log of a server with a planted defect, from its start to its end."""
    flags = ["--port", "0", "--cpu-cache-gib", "0.05", "--log-format", "json", "--verbose"]
    words = [sys.executable, "-c", SERVE, "serve", str(folder), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, env=ENVIRONMENT, **pipes)
    try:
        url = process.stdout.readline().split()[-1]
        ask(url, "tiny", "from-a-test", "/v1/completions?x=1")
        ask(url, "boom", "\u00e4 not an id", "/v1/completions")
    finally:
        process.terminate()
        _, text = process.communicate(timeout=60)
    return lines_of(text)


def ask(url, model, request_id, path):
    words = ["-H", "content-type: application/json", "-H", f"x-request-id: {request_id}"]
    words += ["-H", f"traceparent: 00-{'ab' * 16}-{'cd' * 8}-01"]
    body = json.dumps({"prompt": "a", "max_tokens": 2, "model": model})
    subprocess.run(["curl", "-sS", url + path, *words, "-d", body], check=True, capture_output=True)


def of_logger(lines, name):
    return [line for line in lines if line["logger"] == name]


def test_all_processes_and_libraries_log_json(lines):
    assert {line["process"] for line in lines} >= {"server", "engine"}
    assert of_logger(lines, "uvicorn.error")
    assert any("pages of" in line["message"] for line in lines if line["process"] == "engine")
    loading, ready = of_logger(lines, "milepost.start")
    assert loading["message"].startswith("loading /")
    assert ready["address"].startswith("http://127.0.0.1:")


def test_the_access_log_has_ids_and_fields(lines):
    first, second = of_logger(lines, "milepost.access")
    assert (first["message"], first["level"]) == ("POST /v1/completions 200", "INFO")
    assert (first["request_id"], first["trace_id"]) == ("from-a-test", "ab" * 16)
    assert first["completion_tokens"] == 2
    assert second["status"] == 500
    assert len(second["request_id"]) == 32, "its own was not a reasonable one"


def test_a_traceback_is_one_line_with_the_requests_ids(lines):
    (failed,) = [line for line in lines if line["message"] == "a request failed"]
    (access,) = [line for line in of_logger(lines, "milepost.access") if line["status"] == 500]
    assert failed["request_id"] == access["request_id"]
    assert failed["level"] == "ERROR"
    assert failed["exception"].startswith("Traceback (most recent call last):\n")
    assert failed["exception"].endswith("RuntimeError: planted")


def test_what_bypasses_logging_is_json_too(lines):
    assert [line["message"] for line in of_logger(lines, "stderr")] == ["a stray", "line"]
    (warned,) = of_logger(lines, "py.warnings")
    assert "a warning of Python's" in warned["message"]
    (thread,) = [line for line in lines if "a thread failed" in line["message"]]
    assert "ZeroDivisionError" in thread["exception"]


def test_an_engine_that_fails_to_start_logs_its_traceback():
    program = "from tests.server.failing_engine import main; main()"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
    lines = lines_of(done.stderr)
    assert done.returncode == 1
    (engine,) = [line for line in lines if line["process"] == "engine"]
    assert engine["exception"].endswith("RuntimeError: planted\nin two lines")
    (uncaught,) = [line for line in lines if line["message"] == "uncaught: EngineDeadError"]
    assert "exit code 1" in uncaught["exception"]


def test_a_mistake_on_the_command_line_is_one_line(tmp_path):
    words = [sys.executable, "-m", "milepost", "serve", str(tmp_path / "none"), "--port", "0"]
    words += ["--log-format", "json"]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    (failed,) = [line for line in lines_of(done.stderr) if line["level"] == "ERROR"]
    assert str(tmp_path / "none") in failed["message"]


# --- formatting -----------------------------------------------------------------------------------


def record(message="m", **fields):
    found = logging.LogRecord("a", logging.INFO, __file__, 1, message, (), None)
    found.fields = fields
    return found


def test_a_message_cannot_break_the_line_or_replace_its_members():
    line = JsonFormatter("p").format(record("a\nb\u2028\x85", level="none", other=1, odd=object))
    assert len(line.splitlines()) == 1
    found = json.loads(line)
    assert (found["message"], found["level"], found["other"]) == ("a\nb\u2028\x85", "INFO", 1)


def test_among_lines_of_text_the_access_log_has_its_fields_alone():
    assert json.loads(FieldsFormatter().format(record(status=200))) == {"status": 200}


def test_ids_end_with_their_request():
    with of_request(RequestIds(request_id="r", trace_id="t")):
        inside = json.loads(JsonFormatter("p").format(record()))
    assert (inside["request_id"], inside["trace_id"]) == ("r", "t")
    assert "request_id" not in json.loads(JsonFormatter("p").format(record()))


def test_a_setup_is_passed_on_as_words():
    for setup in (LogSetup(), LogSetup(format="json", is_detailed=True, process="rank 1")):
        assert LogSetup.of_words(setup.words()) == setup
    assert LogSetup.of_words([]) is None


def test_stray_text_comes_by_lines_and_is_bounded():
    said = []
    stray = StrayText(io.StringIO(), lambda _, line: said.append(line))
    for text in ("half", " a line\n\n", " 10%\r 20%\r", " 30%\n", "x" * (MAX_CHARS + 1)):
        assert stray.write(text) == len(text)
    assert said == ["half a line", " 30%", "x" * (MAX_CHARS + 1)]
    assert not stray.isatty()


def test_what_logging_itself_writes_does_not_come_back():
    said = []

    def say(_, line):
        said.append(line)
        print("it failed", file=stray)

    stray = StrayText(io.StringIO(), say)
    stray.write("once\n")
    assert said == ["once"]
