"""Schemas of tools that are no good: they ask for nothing, and fail no answer."""

import pytest

from milepost.errors import InvalidRequestError
from milepost.server.parsing.answer import AnswerFormat
from milepost.server.parsing.events import CallArguments
from milepost.server.parsing.formats import TOOL_CALLS

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
