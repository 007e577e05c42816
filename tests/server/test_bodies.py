"""What a body may cost before it is refused: few findings, little memory, whatever it holds."""

import json
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic_core import from_json

from milepost.server import bodies, messages, unknown
from milepost.server.config import ServerConfig
from milepost.server.errors import HttpError
from milepost.server.protocol import ChatRequest, CompletionRequest
from tests.server.inprocess import answered

MIB = 2**20
MESSAGE = b'{"role": "user", "content": "a"}'
PART = b'{"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}'


def repeated(head, unit, tail, size):
    """A body of about this size."""
    return head + b",".join([unit] * (size // (len(unit) + 1))) + tail


def numbered(head, unit, tail, count):
    return head + b",".join(unit % number for number in range(count)) + tail


def judged(body, kind):
    """How many things were found wrong."""
    try:
        bodies.check_size(body)
        kind.model_validate(from_json(body, allow_inf_nan=False))
    except HttpError:
        return 1
    except ValidationError as error:
        return len(error.errors())
    return 0


PROMPT, CHAT = b'{"prompt": [', b'{"messages": ['
PARTS = CHAT + b'{"role": "user", "content": ['
BOMBS = {
    "token ids, and a text": (PROMPT, b"1", b', "a"]}', 2 * MIB, CompletionRequest),
    "large token ids": (PROMPT, b"70000", b"]}", 4 * MIB, CompletionRequest),
    "numbers that are no token ids": (PROMPT, b"1.5", b"]}", 2 * MIB, CompletionRequest),
    "texts, and a token id": (PROMPT, b'"ab"', b", 1]}", 2 * MIB, CompletionRequest),
    "empty lists": (PROMPT, b"[]", b"]}", 2 * MIB, CompletionRequest),
    "few empty lists": (PROMPT, b"[]", b"]}", 150_000, CompletionRequest),
    "numbers for messages": (CHAT, b"1", b"]}", 2 * MIB, ChatRequest),
    "empty objects for messages": (CHAT, b"{}", b"]}", 150_000, ChatRequest),
    "messages of no role": (CHAT, b'{"role": "x"}', b"]}", 500_000, ChatRequest),
    "many messages": (CHAT, MESSAGE, b"]}", 500_000, ChatRequest),
    "too many messages": (CHAT, MESSAGE, b"]}", 1_000_000, ChatRequest),
    "numbers for parts": (PARTS, b"1", b"]}]}", 2 * MIB, ChatRequest),
    "many parts": (PARTS, PART, b"]}]}", 1 * MIB, ChatRequest),
    "numbers for tools": (CHAT + MESSAGE + b'], "tools": [', b"1", b"]}", 2 * MIB, ChatRequest),
    "stops": (b'{"prompt": "a", "stop": [', b"1", b"]}", 2 * MIB, CompletionRequest),
    "marks": (b'{"prompt": "a", "cache_marks": [', b'"a"', b"]}", 2 * MIB, CompletionRequest),
}
NUMBERED = {
    "fields": (b"{", b'"f%d": 1', b"}", ChatRequest),
    "fields of a message": (b'{"messages": [{', b'"f%d": 1', b"}]}", ChatRequest),
    "biases": (b'{"prompt": "a", "logit_bias": {', b'"%d": "x"', b"}}", CompletionRequest),
    "biases that are none": (b'{"prompt": "a", "logit_bias": {', b'"x%d": 1', b"}}", ChatRequest),
}


def hold(body, kind):
    """Few findings, in memory of ten times the body and what the most containers take."""
    tracemalloc.start()
    try:
        num_findings = judged(body, kind)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_findings <= 3
    assert peak <= 10 * len(body) + 32 * MIB


@pytest.mark.parametrize("name", BOMBS)
def test_a_repeated_value_costs_little(name):
    *parts, kind = BOMBS[name]
    hold(repeated(*parts), kind)


@pytest.mark.parametrize("name", NUMBERED)
def test_many_names_cost_little(name):
    *parts, kind = NUMBERED[name]
    hold(numbered(*parts, 60_000), kind)


def test_text_is_not_counted():
    """Code has more brackets, colons and commas than any request has values."""
    text = '{[,: "\\ \\" \n' * 200_000
    bodies.check_size(json.dumps({"prompt": text}).encode())


@given(
    st.recursive(
        st.text('a"\\,:[{') | st.integers(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\a{'), inner),
        max_leaves=30,
    )
)
def test_only_what_stands_outside_of_strings_counts(value):
    def counts(value):
        """Commas, colons and opening brackets."""
        if isinstance(value, dict):
            inner, own = list(value.values()), (max(len(value) - 1, 0), len(value), 1)
        elif isinstance(value, list):
            inner, own = value, (max(len(value) - 1, 0), 0, 1)
        else:
            return [0, 0, 0]
        return [sum(column) for column in zip(own, *map(counts, inner), strict=True)]

    assert bodies._counts_outside_strings(json.dumps(value).encode()) == counts(value)
    chunk, bodies._CHUNK_BYTES = bodies._CHUNK_BYTES, 3
    try:
        assert bodies._counts_outside_strings(json.dumps(value).encode()) == counts(value)
    finally:
        bodies._CHUNK_BYTES = chunk


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" + b"1," * (bodies.MAX_VALUES + 1) + b"1]", "values"),
        (b"[" + b"[]," * (bodies.MAX_CONTAINERS + 1) + b"1]", "lists and objects"),
        (numbered(b"{", b'"%d":1', b"}", bodies.MAX_KEYS + 1), "keys"),
    ],
)
def test_what_is_too_much_is_said(body, words):
    with pytest.raises(HttpError, match=words):
        bodies.check_size(body)


def test_a_content_type_is_not_needed_but_must_not_lie(http):
    assert http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}').is_success
    for kind in ("application/x-www-form-urlencoded", "text/plain", "x"):
        response = http.post(
            "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind}
        )
        assert response.status_code == 415
        assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br, gzip"])
def test_a_compressed_body_is_refused_as_one(coding):
    headers = {"content-encoding": coding}
    response = answered(ServerConfig(), "/tokenize", {"prompt": "a"}, headers=headers)
    assert response.status_code == 415
    assert coding in response.json()["error"]["message"]
    headers = {"content-encoding": "identity"}
    assert answered(ServerConfig(), "/tokenize", {"prompt": "a"}, headers=headers).is_success


def test_a_marked_part_costs_few_calls():
    """To pydantic, to what looks for unknown fields, and to what makes it the template's."""
    num_parts, num_calls = 1000, 0
    parts = [from_json(PART)] * num_parts
    body = {"messages": [{"role": "user", "content": parts}]}

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        request = ChatRequest.model_validate(body)
        assert list(unknown.ignored(request)) == []
        messages.for_template(request.messages)
    finally:
        sys.setprofile(None)
    assert num_calls < 6 * num_parts


def test_unknown_fields_are_named_where_they_stand():
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "x": 1}}
    body = {"messages": [{"role": "user", "content": [part, {**part, "y": 1}], "z": 1}], "w": 1}
    request = ChatRequest.model_validate(body)
    inside = "messages[0].content"
    found = list(unknown.ignored(request))
    assert all(is_refusable for _, is_refusable in found)
    assert [path for path, _ in found] == [
        "w",
        "messages[0].z",
        f"{inside}[0].cache_control.x",
        f"{inside}[1].y",
        f"{inside}[1].cache_control.x",
    ]
    assert list(unknown.ignored(request)) == []


def test_very_many_unknown_fields_are_refused():
    policy = unknown.UnknownFields(strict=False)
    request = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], **{f"f{i}": i for i in range(5000)}}
    )
    with pytest.raises(HttpError, match="more than 256 unknown fields"):
        policy.settle(request, {"milepost.record": {}, "milepost.headers": []})
