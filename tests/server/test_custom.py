"""The input of custom tools, read out of a call's arguments as they are written."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.server.tools import CustomInput


def read(text, cuts=()):
    """(All that was passed on, piece by piece; how much of it before the end.)"""
    reading, places = CustomInput(), [0, *sorted(cuts), len(text)]
    pieces = [reading.feed(text[a:b]) for a, b in itertools.pairwise(places)]
    early = "".join(pieces)
    return early + reading.finish(), early


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ['"', "\\", "\\u0041", "🙂", "\\ud83d", "\\\\ud83d\\ude42", "a\nb\t", "*** Begin Patch\n+x"]
)


@given(TEXTS, st.booleans(), st.data())
def test_any_text_comes_back_however_it_is_cut(text, is_ascii, data):
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = data.draw(st.lists(st.integers(0, len(written)), max_size=8))
    assert read(written, cuts) == (text, text)


@given(TEXTS, st.data())
def test_a_call_that_was_cut_has_the_beginning_of_its_input(text, data):
    written = json.dumps({"input": text})
    end = data.draw(st.integers(len('{"input": "'), len(written)))
    found, _ = read(written[:end])
    assert text.startswith(found)
    assert len(found) >= len(text) - 1 or end < len(written) - 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"patch": "a"}', "a"),
        ('{"a": 1, "input": "b"}', "b"),
        ('{"a": "1", "b": "2"}', '{"a": "1", "b": "2"}'),
        ("{}", "{}"),
        ("no JSON", "no JSON"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "lone \\ud83d half"}', "lone � half"),
        ('{"input": "no \\q escape"}', "no \\q escape"),
        ('{"input": "a", "more": 1}', "a"),
    ],
)
def test_arguments_of_another_form(arguments, expected):
    assert read(arguments)[0] == expected
    assert read(arguments, range(1, len(arguments)))[0] == expected
