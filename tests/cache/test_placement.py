"""The contract of every placement policy, and what each is for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.cache.placement import POLICIES, Kind, PromptFacts, floor, rounded

GRID = 64
LENGTH = 2000
POSITION = st.integers(1, LENGTH)
FACTS = st.builds(
    PromptFacts,
    prompt_length=POSITION,
    grid=st.just(GRID),
    marks=st.lists(POSITION, max_size=3).map(tuple),
    branch_points=st.lists(POSITION, max_size=2).map(tuple),
    block_size=st.sampled_from([64, 128, 192, 512]),
)
CUTS = st.lists(st.integers(1, LENGTH // GRID).map(lambda n: n * GRID), max_size=6)


@given(facts=FACTS, start=st.integers(0, LENGTH), length=st.integers(1, LENGTH))
@pytest.mark.parametrize("mode", POLICIES)
def test_contract(mode, facts, start, length):
    """Grid positions, marks and branch points inside the chunk, ascending; the same for the same
    facts, which stay.
    """
    before = replace(facts)
    end = start + length
    found = POLICIES[mode](facts, start, end)
    named = {*facts.marks, *facts.branch_points}
    assert all(start < position <= end for position in found)
    assert all(position % GRID == 0 or position in named for position in found)
    assert list(found) == sorted(found)
    assert all(isinstance(kind, Kind) for kind in found.values())
    assert POLICIES[mode](facts, start, end) == found
    assert facts == before


@given(facts=FACTS, cuts=CUTS)
@pytest.mark.parametrize("mode", ["auto", "all", "none"])
def test_positions_do_not_depend_on_how_a_prompt_is_cut(mode, facts, cuts):
    edges = [0, *sorted(set(cuts)), LENGTH + 64]
    place = POLICIES[mode]
    pieces = [place(facts, *edge) for edge in pairwise(edges)]
    assert {p: kind for piece in pieces for p, kind in piece.items()} == place(facts, 0, edges[-1])


@given(facts=FACTS)
def test_auto_keeps_the_prompts_end_marks_and_branch_points(facts):
    found = POLICIES["auto"](facts, 0, LENGTH)
    last = facts.prompt_length - 1
    wanted = {floor(last, GRID), *(rounded(mark, GRID) for mark in facts.marks if mark <= last)}
    assert set(found) == (wanted | set(facts.branch_points)) - {0}


@pytest.mark.parametrize(
    ("position", "expected"),
    [(3, 0), (15, 0), (16, 16), (100, 100), (64, 64), (71, 64), (72, 72), (400, 384), (639, 576)],
)
def test_rounding_gives_up_a_tenth_at_most(position, expected):
    assert rounded(position, GRID) == expected


@given(facts=FACTS, start=st.integers(0, LENGTH), length=st.integers(1, LENGTH))
def test_align_keeps_the_last_block_of_a_chunk(facts, start, length):
    """Of the prompt alone, and never all of it: its last token is computed in any case."""
    found = POLICIES["align"](facts, start, start + length)
    end = min(start + length, facts.prompt_length - 1)
    blocks = [p for p in range(0, end + 1, facts.block_size) if p > start]
    assert list(found) == blocks[-1:]


@given(facts=FACTS, start=st.integers(0, LENGTH), length=st.integers(1, LENGTH))
def test_all_keeps_every_block(facts, start, length):
    found = POLICIES["all"](facts, start, start + length)
    assert list(found) == [
        p for p in range(start + 1, start + length + 1) if not p % facts.block_size
    ]


@given(facts=FACTS)
def test_none_keeps_nothing(facts):
    assert POLICIES["none"](facts, 0, LENGTH) == {}


@pytest.mark.parametrize(
    ("length", "new_from", "expected"),
    [
        (17_000, 0, [4096, 8192, 12_288, 16_384]),
        (17_000, 5000, [8192, 12_288, 16_384]),
        (8192, 0, [4096]),
    ],
)
def test_auto_offers_sparse_states_where_a_prompt_is_new(length, new_from, expected):
    """What of it is cached has its states already, or is not worth them; and none lies behind the
    prompt's last token, which is computed for its logits."""
    facts = PromptFacts(prompt_length=length, grid=GRID, new_from=new_from)
    found = POLICIES["auto"](facts, 64, length)
    assert [position for position, kind in found.items() if kind is Kind.SPARSE] == expected
