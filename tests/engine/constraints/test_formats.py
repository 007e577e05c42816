"""Formats of strings that nothing here enforces are left out, and nothing else of a schema is."""

import json

import pytest

from milepost.engine.constraints import Forms, vocabulary_of, without_unknown_formats
from milepost.engine.constraints.grammars import ENFORCED
from milepost.errors import InvalidRequestError
from milepost.structured_outputs import StructuredOutputs
from tests import chatmodel

STRING = {"type": "string"}
TAKEN = {"format": "phone"}
"""A value, or properties of which one has this name."""


@pytest.fixture(scope="module")
def forms():
    return Forms(vocabulary_of(chatmodel.make_tokenizer(), 448, ()))


@pytest.mark.parametrize("format_", ["password", "binary", "regex", "file-path", "int32", ""])
def test_schemas_as_libraries_make_them_are_taken(forms, format_):
    schema = {"type": "object", "properties": {"a": {**STRING, "format": format_}}}
    for given in (schema, json.dumps(schema)):
        forms.compile(StructuredOutputs(json=given))


@pytest.mark.parametrize("format_", sorted(ENFORCED))
def test_known_formats_are_enforced(forms, format_):
    schema = {**STRING, "format": format_}
    assert without_unknown_formats(schema) == schema
    matcher = forms.compile(StructuredOutputs(json=schema)).copy()
    tokens = chatmodel.make_tokenizer().encode('"% no such %"')
    assert matcher.try_consume_tokens(tokens) < len(tokens)


def test_an_unknown_keyword_is_refused_still(forms):
    with pytest.raises(InvalidRequestError, match="contains"):
        forms.compile(StructuredOutputs(json={**STRING, **TAKEN, "contains": {}}))


def test_values_and_names_are_no_formats():
    schema = {
        "$defs": {"format": {**STRING, **TAKEN}},
        "properties": {"format": {"const": TAKEN, "default": TAKEN}, "enum": {**STRING, **TAKEN}},
        "anyOf": [{"enum": [TAKEN]}, {**STRING, **TAKEN}],
        "format": {"not": "a text"},
    }
    assert without_unknown_formats(schema) == {
        "$defs": {"format": STRING},
        "properties": {"format": {"const": TAKEN, "default": TAKEN}, "enum": STRING},
        "anyOf": [{"enum": [TAKEN]}, STRING],
        "format": {"not": "a text"},
    }
