"""Bodies that are wrong in every way get a 4xx that says what and where."""

import json
import socket
from urllib.parse import urlsplit

import pytest

from milepost.server.bodies import MAX_HALVES, MAX_MENDED_BYTES, read_json
from milepost.server.config import ServerConfig
from tests.server.inprocess import MAX_IN_FLIGHT, answered

USER = [{"role": "user", "content": "a"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
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
        (b'{"prompt": "a", "n": 1e-3}', "n"),
        (b"\x00\x01\x02", "JSON"),
    ],
)
def test_bodies(http, body, words):
    status, found = error(http, body)
    assert status == 400
    assert words.lower() in found["message"].lower()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
def test_bodies_are_read_as_windows_writes_them(encoding):
    body = json.dumps({"tokens": [40, 41]}).encode(encoding)
    assert answered(ServerConfig(), "/detokenize", body).status_code == 200
    cut = answered(ServerConfig(), "/detokenize", body[:-1])
    assert (cut.status_code, "not valid JSON" in cut.text) == (400, True)


@pytest.mark.parametrize(
    ("fields", "is_taken"),
    [
        ({"max_tokens": 2.0, "top_k": -1.0, "seed": 5.0, "truncate_prompt_tokens": 3.0}, True),
        ({"max_tokens": 2.5}, False),
        ({"seed": 1e300}, False),
        ({"prompt": [1.0]}, False),
    ],
)
def test_whole_numbers_may_be_written_as_floats(fields, is_taken):
    response = answered(ServerConfig(), "/v1/completions/render", {"prompt": "a", **fields})
    assert response.status_code == (200 if is_taken else 400), response.text


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
        ("/v1/chat/completions", {"messages": USER, "tools": [FUNCTION] * 4097}, "tools"),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "function", "name": "f"}] * 4097},
            "tools",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": USER,
                "tools": [{"name": "f", "input_schema": {}}] * 4097,
            },
            "tools",
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
    assert (nothing["code"], nothing["message"][:23]) == (404, "/nothing does not exist")
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


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (rb'"cut \ud83d"', "cut \ufffd"),
        (rb'"\uDE00\ud83d\ude00\ud83d\n\ud83d\ud83d\ude00"', "\ufffd😀\ufffd\n\ufffd😀"),
        (rb'"\\ud83d \\\ud83d"', "\\ud83d \\\ufffd"),
        (rb'{"\ud83d": ["\udfff"]}', {"\ufffd": ["\ufffd"]}),
    ],
)
def test_half_an_emoji_is_read(text, read):
    assert read_json(text) == read


def test_halves_that_are_too_many_are_not_replaced():
    assert read_json(b'"' + rb"\ud83d" * MAX_HALVES + b'"') == "\ufffd" * MAX_HALVES
    with pytest.raises(ValueError, match="hex escape"):
        read_json(b'"' + rb"\ud83d" * (MAX_HALVES + 1) + b'"')
    with pytest.raises(ValueError, match="hex escape"):
        read_json(rb'["\ud83d"' + b" " * MAX_MENDED_BYTES + b"]")


def test_a_turn_that_was_cut_inside_an_emoji_is_answered(http):
    """An agent sends it again with every later turn, here as a result and in a call's arguments."""
    call = {"name": "f", "arguments": r'{"a": "\ud83d", "b": 1}'}
    assistant = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": call}],
    }
    messages = [{"role": "user", "content": "a"}, assistant]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "cut \ud83d"})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": "\udfff"}}}]
    body = json.dumps({"messages": messages, "tools": tools, "max_tokens": 1}).encode()
    response = http.post("/v1/chat/completions", content=body)
    assert response.status_code == 200
    assert "x-milepost-ignored" not in response.headers


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


NESTED = '{"a": ' + "[" * 500 + "]" * 500 + "}"


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (NESTED, {}),
        ("{", {}),
        ("[1]", {}),
        (3, {}),
        (None, {}),
        ("null", {}),
        ("look", {}),
        ('{"city": "Be', {"city": "Be"}),
        ('{"city": "Bern", "days": ', {"city": "Bern"}),
        ('{"code": "a\n\tb"}', {"code": "a\n\tb"}),
        ('"{\\"city\\": \\"Bern\\"}"', {"city": "Bern"}),
        ('{"a": "' + "\\" * 999, {"a": "\\" * 499}),
    ],
)
def test_a_malformed_call_is_read_as_far_as_it_goes(http, arguments, read):
    """In every endpoint, as if the client had sent what can be read of it; and it is told."""

    def told(path, body, given):
        response = http.post(path, json=body(given))
        assert response.status_code == 200, response.text
        return response.json(), response.headers.get("x-milepost-ignored")

    for path, body, field in CALLED:
        was, said = told(path, body, arguments)
        expected, silent = told(path, body, read)
        assert said == field
        assert silent is None
        for answer in (was, expected):
            answer.pop("request_id", None)
        assert was == expected


def as_text(value):
    return json.dumps(value) if isinstance(value, dict) else value


def called_in_chat(arguments):
    function = {"name": "look", "arguments": as_text(arguments)}
    said = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    return {"messages": [{"role": "user", "content": "a"}, said]}


def called_in_responses(arguments):
    call = {"type": "function_call", "call_id": "1", "name": "look"}
    return {"input": [{"role": "user", "content": "a"}, {**call, "arguments": as_text(arguments)}]}


def called_in_messages(arguments):
    call = {"type": "tool_use", "id": "1", "name": "look", "input": arguments or {}}
    call["input"] = arguments if arguments is not None else "null"
    said = {"role": "assistant", "content": [call]}
    return {"messages": [{"role": "user", "content": "a"}, said]}


CALLED = [
    ("/tokenize", called_in_chat, "messages[].tool_calls[].function.arguments"),
    ("/v1/chat/completions/render", called_in_chat, "messages[].tool_calls[].function.arguments"),
    ("/v1/responses/render", called_in_responses, "input[].arguments"),
    ("/v1/responses/input_tokens", called_in_responses, "input[].arguments"),
    ("/v1/messages/count_tokens", called_in_messages, "messages[].content[].input"),
]


HELLO = [{"role": "user", "content": "a"}]
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
FORM = {"type": "json_schema", "name": "x", "schema": {"enum": []}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("messages", {"max_tokens": 1, "output_config": {"format": FORM}}, "output_config.format"),
        ("responses", {"text": {"format": FORM}}, "text.format"),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": FORM}},
            "response_format",
        ),
        ("responses", {"input": [{"role": "user", "content": [IMAGE]}]}, "input"),
        ("responses/input_tokens", {"input": [{"role": "user", "content": [IMAGE]}]}, "input"),
    ],
)
def test_errors_name_the_fields_of_their_own_api(http, path, body, field):
    given = {"input": "a"} if path.startswith("responses") else {"messages": HELLO}
    response = http.post(f"/v1/{path}", json={**given, **body})
    error = response.json()["error"]
    assert (response.status_code, error["message"].partition(": ")[0]) == (400, field)
    assert error.get("param", field) == field


def test_a_name_of_any_length_is_repeated_in_part():
    body = {"messages": USER, "chat_template_kwargs": {"k" * 10_000: 1}}
    response = answered(ServerConfig(), "/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("chat_template_kwargs.kkk")
    assert len(response.content) < 2000


def test_answers_that_are_too_many_are_refused_before_the_messages_are_read():
    body = {"messages": [{"role": "tool", "content": "a"}], "n": MAX_IN_FLIGHT + 1}
    error = answered(ServerConfig(), "/v1/chat/completions", body).json()["error"]
    assert error["param"] == "n"
