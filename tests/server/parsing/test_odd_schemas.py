"""Schemas of tools that are no good: they ask for nothing, and fail no answer."""

import re
import tracemalloc

import pytest

from milepost.errors import InvalidRequestError
from milepost.server.parsing import tape
from milepost.server.parsing.answer import AnswerFormat
from milepost.server.parsing.events import CallArguments
from milepost.server.parsing.formats import TOOL_CALLS
from milepost.server.parsing.schemas import Leaf, Root, leaves

CALL = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
ODD = [
    {"properties": {"a": {"allOf": -1}}},
    {"properties": {"a": {"type": "string"}}, "required": 5},
    {"properties": {"a": {"type": "string"}}, "required": [["a"], {}]},
    {"properties": {"a": {"$ref": f"#/required/{'9' * 5000}"}}, "required": ["a"]},
    {"properties": {"a": {"type": "integer", "multipleOf": 0.5}}},
]


def tools_of(schema):
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


@pytest.mark.parametrize("schema", ODD)
@pytest.mark.parametrize("value", ["x", "9" * 400])
def test_a_call_is_read_whatever_its_schema_says(schema, value):
    parser = AnswerFormat(reasoning="none", calls="qwen3_xml").parser(
        tools=tools_of(schema), is_open=False
    )
    events = [*parser.feed(CALL.format(value)), *parser.finish()]
    text = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert value in text


@pytest.mark.parametrize("schema", ODD)
@pytest.mark.parametrize("name", TOOL_CALLS)
def test_every_format_writes_a_grammar_whatever_the_schema_says(schema, name):
    rules = TOOL_CALLS[name].grammar(tools_of(schema), lambda tag: f'"{tag}"', is_single=False)
    assert rules[0].startswith("calls:")


@pytest.mark.parametrize(
    ("name", "key"),
    [("lfm2", ""), ("lfm2", "a=b"), ("lfm2", "a" * 1025), ("qwen3_xml", "a" * 1025)],
)
def test_a_name_that_would_not_be_read_is_not_written(name, key):
    schema = {"properties": {key: {"type": "string"}}}
    with pytest.raises(InvalidRequestError, match="cannot write the name"):
        TOOL_CALLS[name].grammar(tools_of(schema), lambda tag: f'"{tag}"', is_single=False)


def spelled(number):
    """A reference to one schema, spelled differently for each of 256 numbers."""
    letters = (f"%{ord(c):x}" if number >> i & 1 else c for i, c in enumerate("somemany"))
    return {"$ref": f"#/$defs/{''.join(letters)}"}


MANY = {f"k{i}": 1 for i in range(3000)}
SOME_MANY = {"$defs": {"somemany": {"properties": MANY}}}
GROWING = {
    "branches with many keywords": {"a": {**MANY, "anyOf": [{}] * 3000}},
    "parts with many properties": {"a": {"allOf": [spelled(0)] * 3000}},
    "parts with many requirements": {"a": {"allOf": [{"required": ["a"] * 9}] * 3000}},
    "parts of many branches": {
        "a": {"anyOf": [{"allOf": list(map(spelled, range(256)))} for _ in range(256)]}
    },
    "a chain of references": {
        f"{'a' * (not i)}{i or ''}": {"$ref": f"#/properties/{i + 1}", **MANY} for i in range(100)
    },
}


@pytest.mark.parametrize("name", GROWING)
def test_what_references_and_alternatives_make_of_a_schema_is_bounded(name):
    schema = {**SOME_MANY, "properties": GROWING[name]}
    tracemalloc.start()
    test_a_call_is_read_whatever_its_schema_says(schema, "x")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**26
    root = Root(schema)
    assert leaves(GROWING[name]["a"], root) == [Leaf("any", {})]


def test_a_schema_that_grows_when_it_stands_alone_is_refused():
    schema = {**SOME_MANY, "properties": {"a": {"prefixItems": list(map(spelled, range(256)))}}}
    with pytest.raises(InvalidRequestError, match="too large"):
        TOOL_CALLS["lfm2"].grammar(tools_of(schema), lambda tag: f'"{tag}"', is_single=False)


def test_no_pattern_grows_with_the_number_of_parameters(monkeypatch):
    patterns = []
    monkeypatch.setattr(
        tape.re, "compile", lambda text, *flags: patterns.append(text) or COMPILE(text, *flags)
    )
    schema = {"properties": {f"parameter{i}": {"type": "string"} for i in range(500)}}
    test_a_call_is_read_whatever_its_schema_says(
        {"properties": {"a": {}, **schema["properties"]}}, "x"
    )
    assert max(map(len, patterns), default=0) < 500


COMPILE = re.compile
