"""Files of requests, answered without a server."""

import asyncio
import errno
import io
import json
import subprocess
import sys

import pytest

from milepost.cli.main import main
from milepost.server.batch import answer_all
from tests import forked
from tests.server.conftest import ENVIRONMENT


def line(custom_id, url="/v1/completions", **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


class Application:
    """Answers with what it was sent, the shortest wait first; counts what is under way."""

    def __init__(self):
        self.under_way = self.most = 0

    async def __call__(self, scope, receive, send):
        body = json.loads((await receive())["body"])
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(body.get("turns", 1)):
            await asyncio.sleep(0)
        self.under_way -= 1
        status = body.get("status", 200)
        said = {"error": {"message": "no"}} if status != 200 else {"path": scope["path"]}
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})


def answered(*lines, num_ahead=4, target=None):
    application, target, told = Application(), target or io.BytesIO(), []
    work = answer_all(application, lines, target, num_ahead, told.append)
    counts = asyncio.run(work)
    results = [json.loads(each) for each in target.getvalue().splitlines()]
    return application, counts, results, told


def test_lines_are_written_as_they_end_and_only_so_many_are_under_way():
    lines = [line("slow", turns=50), *(line(str(i), turns=3) for i in range(20)), b"\n"]
    application, counts, results, told = answered(*lines)
    assert application.most == 4
    assert (counts.answered, counts.failed, told) == (21, 0, [True] * 21)
    assert results[-1]["custom_id"] == "slow"
    assert sorted(r["custom_id"] for r in results[:-1]) == sorted(map(str, range(20)))
    assert results[0]["error"] is None
    assert results[0]["response"]["status_code"] == 200
    assert results[0]["response"]["body"] == {"path": "/v1/completions"}


@pytest.mark.parametrize(
    ("wrong", "custom_id", "words"),
    [
        (b"nothing", None, "the line is not a JSON object"),
        (b'"\xff"', None, "the line is not a JSON object"),
        (b"[" * 100_000, None, "the line is not a JSON object"),
        (b'{"custom_id": 5, "url": "/v1/completions", "body": {}}', None, "custom_id"),
        (b'{"custom_id": "a", "url": "/v1/completions"}', "a", "`body`"),
        (line("a", url="/v1/embeddings"), "a", "url='/v1/embeddings': use one of"),
        (line("a", stream=True), "a", "a batch returns whole answers"),
        (line("a").replace(b"POST", b"GET"), "a", "method='GET': use POST"),
    ],
)
def test_a_line_that_is_no_request_fails_alone(wrong, custom_id, words):
    _, counts, results, told = answered(line("before"), wrong, line("behind"))
    (found,) = [r for r in results if r["error"]]
    assert (counts.answered, counts.statuses, told.count(False)) == (2, {400: 1}, 1)
    assert found["custom_id"] == custom_id
    assert words in found["error"]["message"]
    assert found["response"]["body"]["error"] == found["error"]


def test_a_byte_order_mark_is_no_part_of_the_first_line():
    _, counts, results, _ = answered(b"\xef\xbb\xbf" + line("a"), line("b"))
    assert (counts.answered, counts.failed) == (2, 0)
    assert [result["custom_id"] for result in results] == ["a", "b"]
    _, counts, (found,), _ = answered(b"\xef\xbb\xbf\n", line("b"))
    assert (counts.answered, found["custom_id"]) == (1, "b")


def test_a_custom_id_stands_for_one_line():
    lines = [line("a", turns=9), line("b"), line("a", status=404), b"nothing", b"nothing"]
    _, counts, results, _ = answered(*lines)
    assert (counts.answered, counts.statuses) == (2, {400: 3})
    (said,) = [r["error"]["message"] for r in results if r["custom_id"] == "a" and r["error"]]
    assert "line 1 has it already" in said
    assert "line 3" in said


def test_what_the_application_refuses_is_told_with_its_status():
    _, counts, (found,), _ = answered(line("a", status=404))
    assert (counts.failed, counts.statuses) == (1, {404: 1})
    assert (found["response"]["status_code"], found["error"]) == (404, {"message": "no"})


def test_a_full_disk_ends_it_with_one_error():
    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        answered(line("a"), line("b"), target=Full())


def test_a_file_through_the_engine(folder, tmp_path):
    """Answers are those of a server; the body of a line is refused as a server refuses it."""
    chat = {"messages": [{"role": "user", "content": "the quick"}], "max_tokens": 4}
    lines = [
        line("chat", "/v1/chat/completions", **chat, temperature=0, model="tiny"),
        line("text", prompt=["the", "quick"], max_tokens=3, n=2),
        line("message", "/v1/messages", **chat),
        line("other model", prompt="the", model="gpt"),
        line("wrong", prompt="the", temperature=-1),
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines))
    flags = ["--model", str(folder), "--served-model-name", "tiny", "--cpu-cache-gib", "0.05"]
    flags += ["--max-num-seqs", "2", "--disable-log-requests", "--tensor_parallel_size=1"]
    words = ["run-batch", "-i", str(source), "-o", str(target), *flags]
    program = forked.Program(words, ENVIRONMENT, tmp_path / "pid")
    with program.stdout, program.stderr:
        errors = program.stderr.read()
    assert program.wait() == 1
    assert "3 answered, 2 failed, 1 with 400, 1 with 404" in errors
    results = {r["custom_id"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert len(results) == 5
    assert results["chat"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert len(results["text"]["response"]["body"]["choices"]) == 4
    assert results["message"]["response"]["body"]["type"] == "message"
    assert "gpt" in results["other model"]["error"]["message"]
    assert results["wrong"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("none.jsonl", "out.jsonl", "there is no such file"),
        ("in.jsonl", "none/out.jsonl", "name a file in an existing folder"),
        ("in.jsonl", "in.jsonl", "this is the input file"),
    ],
)
def test_files_are_checked_before_the_model_is_loaded(tmp_path, capsys, source, target, words):
    (tmp_path / "in.jsonl").write_text("kept")
    paths = ["-i", str(tmp_path / source), "-o", str(tmp_path / target)]
    assert main(["run-batch", *paths, "--model", "/nothing"]) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")
    assert (tmp_path / "in.jsonl").read_text() == "kept"


def test_too_few_open_files_are_one_line(tmp_path):
    (tmp_path / "in").write_bytes(line("1", prompt="a"))
    command = f"ulimit -n 12; exec {sys.executable} -m milepost run-batch -i in -o out"
    found = subprocess.run(
        command, shell=True, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert found.returncode == 1
    assert found.stderr == "milepost: error: Too many open files: raise `ulimit -n`\n"
