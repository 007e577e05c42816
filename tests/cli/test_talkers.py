"""`milepost chat --url`: a running server, here a stub that speaks OpenAI's API."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

REPORT = {"cached_tokens": 4, "lost_tokens": {"unseen": 2}}
USAGE = {"prompt_tokens": 6, "completion_tokens": 2, "prompt_tokens_details": REPORT}


def event(delta, finish=None, usage=USAGE):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}


class Stub(BaseHTTPRequestHandler):
    """Answers with the events of its server, in order."""

    def do_GET(self):
        self._send(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.headers["authorization"], body))
        status, answer = self.server.answers.pop(0)
        if status == 200:
            lines = [f"data: {json.dumps(one)}\n\n" for one in answer]
            self._send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())
        else:
            self._send(status, json.dumps(answer).encode())

    def _send(self, status, content):
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def served():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.asked, server.answers = [], []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def answer(*texts):
    return 200, [*(event({"content": text}) for text in texts), event({}, "stop")]


def test_turns_go_to_the_server_with_what_was_set_and_nothing_else(served, chat_session):
    served.answers = [answer("One", " two"), answer("three")]
    said = "hello\n/set top_k 5\nagain\n"
    flags = ("--url", served.url, "--api-key", "secret", "--temperature", "0.5")
    assert chat_session.run("chat", *flags, stdin=said) == 0
    assert chat_session.out == "One two\nthree\n"
    assert chat_session.engines == []
    assert [key for key, _ in served.asked] == ["Bearer secret"] * 2
    first, second = (body for _, body in served.asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert first == {
        "model": "first",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.5,
        "stream": True,
        "stream_options": options,
    }
    assert second["top_k"] == 5
    assert [one["content"] for one in second["messages"]] == ["hello", "One two", "again"]
    assert "4 of 6 prompt tokens from the cache; computed 2: 2 " in chat_session.err
    assert "2 tokens in " in chat_session.err


def test_reasoning_is_shown_and_sent_back_as_such(served, chat_session):
    thought = [event({"reasoning_content": "hm "}), event({"reasoning_content": "ah"})]
    status, said = answer("So.")
    served.answers = [(status, [*thought, *said]), answer("x")]
    chat_session.run("chat", "--url", f"{served.url}/v1/", stdin="why\nand\n")
    assert chat_session.out == "<think>hm ah\n</think>\n\nSo.\nx\n"
    assert served.asked[1][1]["messages"][1] == {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "hm ah",
    }


def test_a_refusal_is_said_and_its_turn_taken_back(served, chat_session):
    refused = (400, {"error": {"message": "messages: 9 tokens, and 8 is the most"}})
    broken = (200, [event({"content": "ha"}), {"error": {"message": "the engine died"}}])
    served.answers = [refused, broken, (500, "no"), answer("yes")]
    chat_session.run("chat", "--url", served.url, stdin="long\na\nb\nc\n")
    assert "error: messages: 9 tokens, and 8 is the most" in chat_session.err
    assert "error: the engine died" in chat_session.err
    assert "error: the server answers 500" in chat_session.err
    assert [one["content"] for one in served.asked[-1][1]["messages"]] == ["a", "ha", "c"]


def test_a_server_without_reports_is_shown_without(served, chat_session):
    plain = [{"choices": [{"delta": {"content": "hi"}, "finish_reason": "length"}]}]
    served.answers = [(200, plain)]
    chat_session.run("chat", "--url", served.url, "--model", "second", stdin="hello\n/stats\n")
    assert served.asked[0][1]["model"] == "second"
    assert chat_session.out == "hi\n"
    assert "prompt tokens from the cache" not in chat_session.err
    assert "1 token in " in chat_session.err


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ([{"error": "it is\n\x1b[31mfull"}], r"error: it is\n\x1b[31mfull"),
        ([{"error": {"message": "x" * 10**6}}], "error: " + "x" * 300),
        (["text"], "error: the server sent what is no event: "),
        ([[1]], "error: the server sent what is no event: "),
        ([{"choices": ["text"]}], "error: the server sent what is no event: "),
        ([event({"content": 5})], "error: the server sent what is no event: "),
        ([event({}, usage=[1])], "error: the server sent what is no event: "),
    ],
)
def test_whatever_a_server_sends_ends_no_chat(served, chat_session, said, shown):
    served.answers = [(200, said), answer("fine")]
    chat_session.run("chat", "--url", served.url, stdin="hello\nagain\n")
    assert shown in chat_session.err.replace("\n", " ")
    assert "Traceback" not in chat_session.err
    assert chat_session.out.endswith("fine\n")
    assert "x" * 301 not in chat_session.err


@pytest.mark.parametrize("count", [None, -1, "many", 10**15])
def test_a_count_that_no_server_has_is_unknown(served, chat_session, count):
    usage = {"prompt_tokens": count, "completion_tokens": count}
    served.answers = [(200, [event({"content": "hi"}, usage=usage), event(None, "stop", usage)])]
    assert chat_session.run("chat", "--url", served.url, stdin="hello\n") == 0
    assert chat_session.out == "hi\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--url", "nowhere"], "--url nowhere: use an address such as"),
        (["--url", "http://127.0.0.1:1"], "--url http://127.0.0.1:1: no server answers"),
        (["--url", "{url}", "--model", "third"], "--model third: {url} serves first, second"),
        (["--url", "{url}", "--max-num-seqs", "4"], "--max-num-seqs with --url: the server has"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(served, chat_session, flags, said):
    flags = [flag.format(url=served.url) for flag in flags]
    assert chat_session.run("chat", *flags, stdin="a\n") == 2
    assert said.format(url=served.url) in chat_session.err.replace("\n", " ")
    assert served.asked == []
