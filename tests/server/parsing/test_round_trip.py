"""Any call, written out in a format, is accepted by the format's grammar and read back as it was.

What the grammar accepts is read as arguments that the schema allows."""

import functools
import json

import jsonschema_rs
import llguidance.hf
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from milepost.engine.constraints.grammars import grammar_of
from milepost.server import forms
from milepost.server.messages import toolset_of
from milepost.server.parsing.answer import AnswerFormat
from milepost.server.protocol import ChatRequest
from tests import chatmodel
from tests.server.parsing.written import (
    WRITERS,
    Grammar,
    cut,
    kimi,
    lfm2,
    ling,
    olmo3,
    parsed,
    tool,
    xml,
)

XML = AnswerFormat(reasoning="none", calls="qwen3_xml")
NAMES = st.sampled_from(["a", "b", "füße", "x y", "name", "arguments", "function"])
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "123", "null", "None", "true", "False", "\n", " a\n", "1e5", "[1]", '{"a": 1}', '"q"']
    ),
    st.sampled_from(
        [
            "</tool_call>",
            "a\n</tool_call>\nb",
            "<tool_call>",
            "</parameter>",
            "</parameter> ",
            "<parameter=a>",
            "</function>",
            "<function=f>",
            '"}}',
            "<think>",
            "\\",
            "\u2028 🙂",
        ]
    ),
)
SCALARS = {
    "string": TEXTS,
    "integer": st.integers(-(10**20), 10**20),
    "number": st.one_of(st.integers(-5, 5), st.floats(allow_nan=False, allow_infinity=False)),
    "boolean": st.booleans(),
    "null": st.none(),
}


LITERALS = st.one_of(
    TEXTS,
    st.integers(-(2**53), 2**53),
    st.integers(-9, 9).map(lambda x: x + 0.5),
    st.booleans(),
    st.none(),
)
"""Floats as llguidance writes them too: it has one form for each. It keeps literal numbers as
doubles, so larger integers come out as their neighbours."""


@st.composite
def pairs(draw, depth=2):
    """(schema, value)"""
    kinds = [*SCALARS, "enum", "union", "bounded", "pattern"]
    kinds += ["array", "object", "ref", "optional"] if depth else []
    kind = draw(st.sampled_from(kinds))
    if kind in SCALARS:
        return {"type": kind}, draw(SCALARS[kind])
    if kind == "enum":
        literals = draw(st.lists(LITERALS, min_size=1, max_size=4))
        return {"enum": literals}, draw(st.sampled_from(literals))
    if kind == "union":
        types = draw(st.lists(st.sampled_from(list(SCALARS)), min_size=1, unique=True))
        return {"type": types}, draw(SCALARS[draw(st.sampled_from(types))])
    if kind == "bounded":
        low, high = sorted(draw(st.tuples(st.integers(-99, 99), st.integers(-99, 99))))
        schema = {"type": "integer", "minimum": low, "maximum": high}
        return schema, draw(st.integers(low, high))
    if kind == "pattern":
        schema = {"type": "string", "pattern": "^[a-c/]{1,4}$", "maxLength": 3}
        return schema, draw(st.text(alphabet="abc/", min_size=1, max_size=3))
    schema, value = draw(pairs(depth=depth - 1))
    if kind == "array":
        return {"type": "array", "items": schema}, [value] * draw(st.integers(0, 2))
    if kind == "object":
        whole = {"type": "object", "properties": {"k": schema}, "additionalProperties": False}
        return {**whole, "required": ["k"]}, {"k": value}
    if kind == "optional":
        return {"anyOf": [schema, {"type": "null"}]}, draw(st.sampled_from([value, None]))
    return {"$ref": schema}, value


def settled(schema, definitions):
    """With each referred schema among the definitions."""
    if isinstance(schema, list):
        return [settled(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$ref"), dict):
        name = f"D/{len(definitions)}"
        definitions[name] = None
        definitions[name] = settled(schema["$ref"], definitions)
        return {"$ref": f"#/$defs/{name.replace('/', '~1')}"}
    return {
        key: value if key in ("enum", "const") else settled(value, definitions)
        for key, value in schema.items()
    }


@st.composite
def calls(draw):
    """(parameters, arguments, where to cut)"""
    names = draw(st.lists(NAMES, unique=True, max_size=3))
    drawn = {name: draw(pairs()) for name in names}
    definitions = {}
    properties = {name: settled(schema, definitions) for name, (schema, _) in drawn.items()}
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    parameters["required"] = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    parameters["$defs"] = definitions
    arguments = {
        name: value
        for name, (_, value) in drawn.items()
        if name in parameters["required"] or draw(st.booleans())
    }
    return parameters, arguments, draw(st.randoms(use_true_random=False))


def same(left, right):
    """Equal as JSON, types included."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def is_ambiguous(parameters, arguments):
    """Whether some string, where other types are allowed too, is written as a value of those."""
    for name, value in arguments.items():
        if isinstance(value, str):
            schema = {**parameters["properties"][name], "$defs": parameters["$defs"]}
            check = jsonschema_rs.validator_for(schema)
            for word in (value.strip(), {"None": "null"}.get(value.strip(), value.strip().lower())):
                try:
                    other = json.loads(word)
                except ValueError:
                    continue
                if not isinstance(other, str) and check.is_valid(other):
                    return True
            brackets = value.lstrip()[:1]
            if brackets and brackets in "[{" and any(check.is_valid(o) for o in ([], {}, [value])):
                return True
    return False


@settings(max_examples=50)
@given(calls())
def test_json_calls(drawn):
    parameters, arguments, pick = drawn
    check("hermes", parameters, arguments, pick, WRITERS["hermes"]("f", arguments))


@settings(max_examples=80)
@given(calls(), st.booleans())
def test_tagged_calls(drawn, python_words):
    parameters, arguments, pick = drawn
    assume(not is_ambiguous(parameters, arguments))
    text = xml("f", arguments, python_words=python_words)
    check("qwen3_xml", parameters, arguments, pick, text)


@settings(max_examples=80)
@given(calls())
def test_keyed_calls(drawn):
    parameters, arguments, pick = drawn
    assume(not is_ambiguous(parameters, arguments))
    check("ling3", parameters, arguments, pick, ling("f", arguments))


@settings(max_examples=30)
@given(calls())
def test_named_calls(drawn):
    parameters, arguments, pick = drawn
    check("kimi_k2", parameters, arguments, pick, kimi("f", arguments))


@settings(max_examples=50)
@given(calls(), st.sampled_from([("lfm2", lfm2), ("olmo3", olmo3)]))
def test_pythonic_calls(drawn, form):
    """As Python writes values they are read; as JSON they are what a grammar keeps to."""
    parameters, arguments, pick = drawn
    assume("x y" not in parameters["properties"])
    calls, write = form
    tools = [tool(parameters)]
    as_json = functools.partial(json.dumps, ensure_ascii=False)
    for text in (write("f", arguments), write("f", arguments, write=as_json)):
        for pieces in ([text], cut(text, pick), list(text)):
            _, content, [[name, given]] = parsed(
                AnswerFormat(reasoning="none", calls=calls), pieces, tools
            )
            assert (name, content) == ("f", "")
            assert same(json.loads(given), arguments), given
    assert Grammar(calls, tools).accepts(text), text


def test_several_calls_in_one_section():
    tools = [tool({"type": "object", "properties": {"a": {"type": "null"}}}, name) for name in "fg"]
    one = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    section = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
    for calls, text in {
        "kimi_k2": section.format(one.format("f", 0) + one.format("g", 1)),
        "lfm2": "<|tool_call_start|>[f(), g()]<|tool_call_end|>",
        "olmo3": "<function_calls>\nf()\ng()\n</function_calls>",
    }.items():
        form = AnswerFormat(reasoning="none", calls=calls)
        for pieces in ([text], list(text)):
            assert parsed(form, pieces, tools) == ("", "", [["f", "{}"], ["g", "{}"]])
        assert Grammar(calls, tools, is_single=False).accepts(text)
        assert not Grammar(calls, tools).accepts(text)


def check(calls, parameters, arguments, pick, text):
    tools = [tool(parameters)]
    form = AnswerFormat(reasoning="none", calls=calls)
    for pieces in ([text], cut(text, pick), list(text)):
        _, content, [[name, given]] = parsed(form, pieces, tools)
        assert (name, content) == ("f", "")
        assert same(json.loads(given), arguments), given
    assert Grammar(calls, tools).accepts(text), text


SAMPLED = {
    "optional string": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "string or bounded": {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "string"}]},
    "literals": {"enum": ["a", "ab", 1, 2.5, None, True]},
    "string or object": {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]},
        ]
    },
    "strings": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    "pattern": {"type": "string", "pattern": "^[<>/a-z]{2,9}$"},
    "boolean": {"type": ["boolean", "null"]},
}
LIKELY = ["\n", "</", "parameter", ">", "</parameter>", "function", '"', "{", "}", "[", "]", "1"]
LIKELY += ["7", "tool_call", "None", "null", "true", ".", "a", " ", "k", ":", "<", "="]
END = "\n</parameter>\n"


@pytest.mark.parametrize("name", SAMPLED)
def test_what_a_grammar_accepts_is_read_as_the_schema_allows(name):
    parameters = {"type": "object", "properties": {"a": SAMPLED[name]}, "required": ["a"]}
    tools = [tool({**parameters, "additionalProperties": False})]
    check = jsonschema_rs.validator_for(parameters)
    grammar = Grammar("qwen3_xml", tools)
    texts = [text for seed in range(12) if (text := grammar.sample(seed, LIKELY, END))]
    assert len(texts) > 2
    for text in texts:
        _, content, [[_, given]] = parsed(XML, [text], tools)
        assert check.is_valid(json.loads(given)), (text, given)
        assert content == ""


@pytest.mark.parametrize("calls", WRITERS)
def test_several_calls_come_where_several_may(calls):
    tools = [tool({"type": "object", "properties": {"a": {"type": "null"}}}, name) for name in "fg"]
    written = [WRITERS[calls](name, {"a": None}) for name in "fg"]
    assert Grammar(calls, tools, is_single=False).accepts("\n".join(written))
    assert Grammar(calls, tools).accepts(written[1])
    assert not Grammar(calls, tools).accepts("\n".join(written))


@pytest.mark.parametrize("newlines", ["", "\n", "\n\n"])
def test_a_demanded_call_behind_reasoning_may_begin_with_line_breaks(newlines):
    form = AnswerFormat(reasoning="qwen3", calls="hermes")
    text = newlines + WRITERS["hermes"]("f", {})
    tools = [tool({"type": "object"})]
    request = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required"}
    )
    tokenizer = chatmodel.make_tokenizer()
    wanted = forms.of_chat(request, toolset_of(request), form, tokenizer, is_open=True)
    assert tokenizer.decode(wanted.starts_after) == "</think>"
    library = llguidance.hf.from_tokenizer(tokenizer)
    matcher = LLMatcher(library, grammar_of(wanted))
    tokens = tokenizer.encode(text)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()
    pieces = ["hm</think>", text]
    assert parsed(form, pieces, tools, is_open=True) == ("hm", "", [["f", "{}"]])
