"""`milepost bench` against servers that are not ours: whatever they leave out, add or break."""

import contextlib
import http.server
import json
import threading

import pytest

from tests.server.test_bench import SMALL, bench

USAGE = {"prompt_tokens": 50, "completion_tokens": 2, "total_tokens": 52}
CACHED = {**USAGE, "prompt_tokens_details": {"cached_tokens": 20}}


def chunk(content=None, finish=None, **more):
    delta = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]}
ANSWER = [ROLE, chunk("one"), chunk(" two"), chunk(finish="length")]


def events(chunks, *, space=" ", end="\n\n", between=""):
    lines = [f"data:{space}{json.dumps(part)}{end}{between}" for part in chunks]
    return "".join([*lines, f"data:{space}[DONE]{end}"]).encode()


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Answers every request with the same status and bytes; `server.asked` keeps the bodies."""

    def do_GET(self):
        self._answer(*self.server.listing)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append((self.path, json.loads(body)))
        self._answer(*self.server.answer)

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        # A client that was refused does not wait for the body.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(body), 7):  # pieces that keep to no line
                self.wfile.write(body[start : start + 7])

    def log_message(self, *arguments):
        """Quiet."""


@pytest.fixture
def elsewhere():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    server.listing, server.asked = (200, b'{"data": [{"id": "their-model"}]}'), []
    server.answer = (200, events([*ANSWER, {"choices": [], "usage": CACHED}]))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def url(server, path=""):
    return f"http://127.0.0.1:{server.server_port}{path}"


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_usual_form(elsewhere, capsys, path):
    status, row, table = bench(capsys, "--base-url", url(elsewhere, path), *SMALL)
    assert status == 0, table
    assert (row["requests"], row["failed"], row["hit_rate"]) == (6, 0, 0.4)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (300, 12)
    paths, bodies = zip(*elsewhere.asked, strict=True)
    assert set(paths) == {"/v1/chat/completions"}
    known = {"model", "messages", "max_tokens", "stream", "stream_options", "temperature"}
    assert all(set(body) == known and body["model"] == "their-model" for body in bodies)


@pytest.mark.parametrize(
    ("chunks", "options"),
    [
        ([*ANSWER, {"choices": [], "usage": USAGE}], {}),
        ([*ANSWER, {"choices": [], "usage": {**USAGE, "prompt_tokens_details": None}}], {}),
        ([*ANSWER[:-1], chunk(finish="stop", usage=USAGE)], {}),
        ([{**part, "usage": USAGE} for part in ANSWER], {}),
        ([{**part, "usage": None, "error": None} for part in ANSWER] + [{"usage": USAGE}], {}),
        ([*ANSWER, {"choices": [], "usage": USAGE}], {"space": "", "end": "\r\n\r\n"}),
        ([*ANSWER, {"choices": [], "usage": USAGE}], {"between": ": still here\n\nevent: x\n"}),
        ([*ANSWER, {"choices": [], "usage": USAGE, "padding": "x" * 300_000}], {}),
    ],
    ids=["no-details", "null", "in-last", "in-all", "nulls", "crlf", "comments", "long-line"],
)
def test_forms_of_usage_and_streams(elsewhere, capsys, chunks, options):
    elsewhere.answer = (200, events(chunks, **options))
    status, row, table = bench(capsys, "--base-url", url(elsewhere), *SMALL)
    assert (status, row["failed"]) == (0, 0), table
    assert (row["prompt_tokens"], row["hit_rate"], row["cached_tokens"]) == (300, None, None)
    assert "unknown of 300 prompt tokens from the cache" in table
    assert row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"]


@pytest.mark.parametrize("number", ["5", [], {}, 1.5])
def test_counts_that_are_none_are_unknown(elsewhere, capsys, number):
    usage = {"prompt_tokens": number, "completion_tokens": number, "prompt_tokens_details": number}
    elsewhere.answer = (200, events([*ANSWER, {"choices": [], "usage": usage}]))
    status, row, table = bench(capsys, "--base-url", url(elsewhere), *SMALL)
    assert (status, row["failed"]) == (0, 0), table
    assert row["prompt_tokens"] is row["completion_tokens"] is row["hit_rate"] is None


def test_no_usage_at_all(elsewhere, capsys):
    elsewhere.answer = (200, events(ANSWER))
    status, row, table = bench(capsys, "--base-url", url(elsewhere), *SMALL)
    assert status == 0
    assert row["output_tokens_per_s"] is row["prompt_tokens"] is None
    assert "unknown tokens/s out" in table


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, b'{"detail": "no such field"}'), "400: {"),
        ((500, b"<html>oops</html>"), "oops"),
        ((200, events([ROLE, chunk("a"), {"error": {"message": "out of memory"}}])), "memory"),
        ((200, events([ROLE, chunk("a")])), "without a finish reason"),
        ((200, b"data: {broken\n\n"), "JSONDecodeError"),
        ((500, b"\xff\xfe no text"), "500: "),
        ((200, b'data: "text"\n\n'), "no chunk"),
        ((200, b'data: {"choices": ["text"]}\n\n'), "no chunk"),
        ((200, b'data: {"choices": [{"delta": {"content": 5}}]}\n\n'), "no chunk"),
        ((200, b"data: " + b"[" * 100_000 + b"\n\n"), "RecursionError"),
    ],
)
def test_errors_are_failures(elsewhere, capsys, answer, words):
    elsewhere.answer = answer
    quiet = ("--num-warmups", "0")
    status, row, table = bench(capsys, "--base-url", url(elsewhere), *SMALL, *quiet)
    assert (status, row["failed"]) == (1, 6)
    assert words in row["errors"][0]
    assert words in table
    status, _, table = bench(capsys, "--base-url", url(elsewhere), *SMALL)
    assert status == 2
    assert "refuses a request" in table


def test_a_line_without_an_end_is_a_failure(elsewhere, capsys, monkeypatch):
    monkeypatch.setattr("milepost.load.client.MAX_LINE", 2**12)
    elsewhere.answer = (200, b"data: " + b" " * 2**20)
    status, row, _ = bench(capsys, "--base-url", url(elsewhere), *SMALL, "--num-warmups", "0")
    assert (status, row["failed"]) == (1, 6)
    assert "a line of more than 4096 bytes" in row["errors"][0]


@pytest.mark.parametrize(
    ("listing", "words"),
    [
        ((401, b""), "(401 Unauthorized): check the address and --api-key"),
        ((200, b"<html>"), "lists no models: name yours with --served-model"),
        ((200, b'{"data": []}'), "lists no models: name yours with --served-model"),
        ((200, b"[1]"), "lists no models: name yours with --served-model"),
    ],
)
def test_a_server_that_lists_no_models(elsewhere, capsys, listing, words):
    elsewhere.listing = listing
    status, _, table = bench(capsys, "--base-url", url(elsewhere), *SMALL)
    assert status == 2
    assert words in table
    status, row, table = bench(capsys, "--base-url", url(elsewhere), "--served-model", "x", *SMALL)
    assert (status, row["failed"]) == (0, 0), table


def test_all_at_once(elsewhere, capsys):
    status, row, _ = bench(capsys, "--base-url", url(elsewhere), *SMALL, "--request-rate", "inf")
    assert (status, row["request_rate"], row["loop"], row["requests"]) == (0, "inf", "open", 6)
