"""Bodies that are wrong in every way get a 4xx that says what and where."""

import json
import socket
from urllib.parse import urlsplit

import pytest

from milepost.server.config import ServerConfig
from tests.server.inprocess import answered

JSON = {"content-type": "application/json"}


def error(http, body, path="/v1/completions", headers=JSON):
    response = http.post(path, content=body, headers=headers)
    assert 400 <= response.status_code < 500, response.text
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return response.status_code, found


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "required"),
        (b"{", "EOF"),
        (b'{"prompt": "a",}', "column"),
        (b'{"prompt": "\xff\xfe"}', "unicode"),
        (b'{"prompt": "\\ud800"}', "hex escape"),
        (b'{"prompt": "a", "temperature": NaN}', "column"),
        (b"[1, 2]", "JSON object"),
        (b"null", "JSON object"),
        (b'"text"', "JSON object"),
        (b'{"prompt": ' + b"[" * 30_000, "recursion"),
        (b'{"a":' * 30_000, "recursion"),
        (b'{"prompt": "a", "max_tokens": 1e400}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 1.5}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": "5"}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": true}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", ""),
        (b'{"prompt": "a", "temperature": 1e400}', "temperature"),
        (b'{"prompt": "a", "stream_options": {"include_usage": true}}', "stream"),
        (b'{"prompt": "a", "seed": -9223372036854775809}', "seed"),
        (b'{"prompt": "a", "n": 1e3}', "n"),
        (b"\x00\x01\x02", "JSON"),
    ],
)
def test_bodies(http, body, words):
    status, found = error(http, body)
    assert status == 400
    assert words.lower() in found["message"].lower()


def test_a_body_that_says_it_is_something_else(http):
    error(http, b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    error(http, b"prompt=a", headers={"content-type": "application/x-www-form-urlencoded"})


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 8193}]},
            "messages[0].content",
        ),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 65}, "stop"),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 8193}],
            },
            "messages[0].content",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 8193}]},
            "content",
        ),
    ],
)
def test_a_list_that_is_too_long_is_not_called_no_text(path, body, where):
    response = answered(ServerConfig(), path, body)
    assert response.status_code == 400
    said = response.json()["error"]["message"]
    assert where in said
    assert "at most" in said
    assert "string" not in said


def test_paths_and_methods(http):
    nothing = http.get("/nothing").json()["error"]
    assert (nothing["code"], nothing["message"][:23]) == (404, "there is no /nothing he")
    wrong = http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "use POST" in wrong.json()["error"]["message"]
    assert http.get("/v1/models/other").json()["error"]["param"] == "model"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/v1/rerank", "/v1/audio/speech"])
def test_what_other_models_are_for_is_named(path):
    response = answered(ServerConfig(), path, {})
    assert response.status_code == 404
    assert f"{path} is not served: this server's models" in response.json()["error"]["message"]


def test_a_post_without_a_body_may_have_any_type():
    """aiohttp says that nothing is an application/octet-stream."""
    headers = {"content-type": "application/octet-stream", "content-length": "0"}
    assert answered(ServerConfig(), "/ping", "", headers).status_code == 200


def test_surrogates_deep_in_a_body(http):
    body = b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", '
    body += b'"function": {"name": "f", "parameters": {"x": "\\udfff"}}}]}'
    error(http, body, "/v1/chat/completions")


def test_a_template_that_the_values_break_is_refused(http):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    body["chat_template_kwargs"] = {"messages": 3}
    error(http, json.dumps(body).encode(), "/v1/chat/completions")


def test_what_is_no_http(server):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as sock:
        sock.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert b"400" in sock.recv(4096)
    with server.http() as client:
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("arguments", ['{"a": ' + "[" * 500 + "]" * 500 + "}", "{", "[1]", "3"])
def test_arguments_that_no_template_can_write(http, arguments):
    function = {"name": "look", "arguments": arguments}
    said = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}, said]}
    status, found = error(http, json.dumps(body), "/v1/chat/completions")
    assert (status, "JSON object" in found["message"]) == (400, True)
