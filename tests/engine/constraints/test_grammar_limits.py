"""What a form may cost is bounded by counting: each kind of costly one meets its own bound."""

import json

import pytest

from milepost.engine.constraints.grammars import (
    LIMITS,
    Compiler,
    grammar_of,
    problem_of,
    vocabulary_of,
)
from milepost.engine.text.tokenizer import load_tokenizer
from milepost.models.folder import EMBEDDED_MODEL
from milepost.sampling_params import StructuredOutputs
from tests.server.bombs import GRAMMARS

FIRST = 'start: "ab" ("cd" | "e") '


def words(number):
    return FIRST + "(" + " | ".join(f'"word {i}"' for i in range(number)) + ")"


def optional(number):
    """Inside another object, so that its fields are no part of the first mask."""
    inner = {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(number)}}
    return json.dumps({"type": "object", "properties": {"a": inner}, "required": ["a"]})


@pytest.fixture(scope="module")
def compiler():
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    return Compiler(vocabulary_of(tokenizer, len(tokenizer), (tokenizer.eos_token_id,)))


def end_of(compiler, **form):
    """Why a form is refused, or followed no further; None for one that can be followed."""
    try:
        matcher = compiler.compile(grammar_of(StructuredOutputs(**form)))
    except ValueError as error:
        return str(error)
    for _ in range(24):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or matcher.is_stopped():
            break
        matcher.consume_token((mask & -mask).bit_length() - 1)
    return problem_of(matcher)


COSTLY = [
    ("max_grammar_size", {"grammar": words(10_000)}),
    ("max_grammar_size", {"json": optional(5_000)}),
    ("max_items_in_row", {"json": optional(600)}),
    ("step_max_items", {"grammar": 'start: "a" x\nx: x x | "a" | "b" | "ab" | /[a-z]/'}),
    ("step_lexer_fuel", {"grammar": GRAMMARS["lexemes"]}),
]


@pytest.mark.parametrize(("limit", "form"), COSTLY)
def test_a_costly_form_meets_its_bound(compiler, limit, form):
    problem = end_of(compiler, **form)
    assert problem.startswith(("too complex", ": too complex"))
    assert f"({limit})" in problem
    assert limit in LIMITS


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"$ref": "#"}},
        {
            "json": {
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                "$ref": "#/$defs/a",
            }
        },
        {"grammar": "start: start"},
        {"grammar": 'start: "call" arguments\narguments: %json {"$ref": "#"}'},
    ],
)
def test_a_form_that_nothing_completes_says_why(compiler, form):
    assert "refer to itself without an end" in end_of(compiler, **form)


ORDINARY = {
    "fields": {"json": optional(300)},
    "words": {"grammar": words(1_500)},
    "a large enum": {"json": {"enum": [f"value {i}" for i in range(5_000)]}},
    "strings": {"json": {"type": "array", "items": {"type": "string", "maxLength": 4_000}}},
    "a date": {"json": {"type": "string", "format": "date-time"}},
    "a pattern": {"regex": r"[A-Z]{2,5}-[0-9]{3,8}( [a-z]+){1,20}"},
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_form_meets_none(compiler, name):
    assert end_of(compiler, **ORDINARY[name]) is None
