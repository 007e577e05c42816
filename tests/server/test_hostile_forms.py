"""Forms that would take minutes to compile, from a client of a server that others use."""

import json

import pytest

from milepost.errors import InvalidRequestError
from milepost.server.config import ServerConfig
from milepost.structured_outputs import StructuredOutputs
from tests.server.conftest import serving
from tests.server.inprocess import answered


def patterns(number):
    """Each pair of patterns is compared."""
    named = {f"^k{i:04d}$": {"type": "string"} for i in range(number)}
    return {"type": "object", "patternProperties": named}


def optional(number):
    named = {f"key{i}": {"type": "string"} for i in range(number)}
    return {"type": "object", "properties": named, "additionalProperties": False}


def required(number):
    return {**optional(number), "required": [f"key{i}" for i in range(number)]}


class Unread(list):
    """As many values as a body may have: reading them would hold everybody else up."""

    def __len__(self):
        return 2**21

    def __iter__(self):
        raise AssertionError("it was read")


@pytest.mark.parametrize("schema", [{"enum": Unread()}, {"a": {"b": [{}, Unread()]}}])
def test_a_form_that_is_too_long_is_not_written_out(schema):
    for form in (StructuredOutputs(json=schema), StructuredOutputs(regex="a" * 2**18 + "b")):
        with pytest.raises(InvalidRequestError, match="use 262144 or fewer characters"):
            _ = form.as_text
    assert StructuredOutputs(json={"enum": ["a", 1]}).as_text.json == '{"enum": ["a", 1]}'


def test_choices_are_counted_before_they_are_read():
    form = {"choice": ["a"] * (2**16 + 1)}
    body = {"prompt": "a", "structured_outputs": form}
    error = answered(ServerConfig(), "/v1/completions", body).json()["error"]
    assert error["param"] == "structured_outputs.choice"
    assert "65536" in error["message"]


def asked(http, schema, **options):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"prompt": "a", "max_tokens": 4, "seed": 1, "response_format": form, **options}
    return http.post("/v1/completions", json=body)


@pytest.fixture(scope="module")
def bounded(folder):
    with serving(folder, "--grammar-timeout-s", "0.5") as running:
        yield running


def test_a_form_that_takes_too_long_is_refused_while_others_go_on(bounded):
    body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True, "seed": 1}
    with bounded.http() as http, http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        with bounded.http() as other:
            refused = asked(other, patterns(1000))
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "response_format"
            assert "0.5 seconds (--grammar-timeout-s)" in error["message"]
            assert asked(other, optional(2500)).status_code == 400
            assert other.get("/health").is_success
            assert asked(other, {"enum": ["yes"]}).is_success
        assert next(line for line in lines if line).startswith("data: {")


def test_a_large_form_is_compiled_once_for_all_answers(bounded):
    """Without a copy for each, 64 answers took the engine longer than its watchdog waits."""
    with bounded.http() as http:
        response = asked(http, required(500), n=64)
        assert response.is_success, response.text
        assert len(response.json()["choices"]) == 64
        assert all(choice["text"].lstrip()[:1] == "{" for choice in response.json()["choices"])


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "tool_choice"])
def test_errors_name_the_field_that_asked(bounded, field):
    schema = {"type": "wrong"}
    message = {"role": "user", "content": "a"}
    own = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "structured_outputs": {"json": schema},
        "tool_choice": "required",
    }[field]
    body = {"messages": [message], field: own}
    if field == "tool_choice":
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
        body["tools"] = [{"type": "function", "function": function}]
    with bounded.http() as http:
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == field, json.dumps(error)
