"""Items of attention cover every token's KV exactly once, whatever the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from milepost.kernels.attention import items as work
from milepost.kernels.attention.tiles import (
    BEGIN,
    END,
    FIRST,
    ORDINAL,
    POSITION,
    ROW,
    TOKENS,
    UNIT,
    ItemShapes,
)
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.tables import SumOrder

PAGE_SIZE, NUM_PAGES = 64, 40
STARTS = st.one_of(st.integers(0, 300), st.integers(600, 2000))
LENGTHS = st.one_of(st.just(1), st.integers(0, 5), st.integers(1, 400))


@dataclass(frozen=True)
class Step:
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    shared_pages: int

    def tables(self) -> np.ndarray:
        """Sequence i has row i."""
        tables = np.arange(len(self.starts) * NUM_PAGES).reshape(-1, NUM_PAGES)
        tables[:, : self.shared_pages] = np.arange(self.shared_pages) + 10_000
        return tables.astype(np.int32)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    shared_pages = draw(st.sampled_from((0, 0, 9, 15)))
    sequences = draw(st.lists(st.tuples(STARTS, LENGTHS), min_size=1, max_size=12))
    assume(any(length for _, length in sequences))
    starts, lengths = zip(*sequences, strict=True)
    return Step(starts, lengths, shared_pages)


SHAPES = ItemShapes._fields


def lay_out(
    step: Step, heads_per_kv: int, tables: np.ndarray | None = None, **options: object
) -> work.AttentionItems:
    shapes = {name: options.pop(name) for name in list(options) if name in SHAPES}
    tiling = work.Tiling(
        heads_per_kv,
        num_kv_heads=2,
        page_size=PAGE_SIZE,
        shapes=ItemShapes(**shapes),
        **{"num_programs": 132, **options},
    )
    return work.lay_out(step.starts, step.lengths, range(len(step.starts)), tiling, tables)


def test_a_short_sequence_is_cut_into_whole_units() -> None:
    step = Step((190,), (1,), 0)
    (whole,) = lay_out(step, 8).narrow
    assert (whole[BEGIN], whole[END]) == (0, 191)
    items = lay_out(step, 8, narrow_unit=32).narrow
    assert items[:, BEGIN].tolist() == list(range(0, 191, 32))


@pytest.mark.parametrize(
    ("start", "length", "order", "are_whole"),
    [
        (1000, 60, SumOrder.LIKE_MANY, True),
        (1000, 60, SumOrder.FREE, False),
        (1000, 300, SumOrder.LIKE_MANY, True),
        (0, 1300, SumOrder.LIKE_MANY, True),
        (0, 1300, SumOrder.FREE, True),
        (4000, 60, SumOrder.LIKE_MANY, False),  # it would take more than `LIKE_MANY_COST` longer
    ],
)
def test_wide_tiles_after_a_hit_are_whole_where_that_costs_little(
    start: int, length: int, *, order: SumOrder, are_whole: bool
) -> None:
    items = lay_out(Step((start,), (length,), 0), 8, order=order)
    assert (items.room.num_partials == 0) == are_whole
    assert bool((items.wide[:, ORDINAL] == -1).all()) == are_whole


@given(
    steps(),
    st.sampled_from((1, 3, 8, 32)),
    st.booleans(),
    st.booleans(),
    st.sampled_from((1, 132)),
    st.sampled_from((32, UNIT)),
    st.sampled_from((1, 2, 4)),
)
def test_every_token_attends_to_what_it_sees_once(
    step: Step,
    heads_per_kv: int,
    share: bool,
    roomy: bool,
    num_programs: int,
    narrow_unit: int,
    narrow_waves: int,
) -> None:
    tables = step.tables()
    capacity = Capacity(num_tokens=sum(step.lengths) + 7, num_sequences=len(step.lengths))
    items = lay_out(
        step,
        heads_per_kv,
        tables=tables if share else None,
        capacity=capacity if roomy else None,
        num_programs=num_programs,
        narrow_unit=narrow_unit,
        narrow_waves=narrow_waves,
    )
    owners = np.repeat(np.arange(len(step.lengths)), step.lengths)
    positions = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(step.starts, step.lengths, strict=True)]
    )
    seen = np.zeros((len(owners), 2500), int)
    ordinals: list[list[int]] = [[] for _ in owners]
    for item in np.concatenate((items.narrow, items.wide)):
        assert item[BEGIN] % min(narrow_unit, UNIT) == 0
        assert item[TOKENS] == 0 or item[BEGIN] < item[END]
        for ahead in range(item[TOKENS]):
            token = item[FIRST] + ahead
            end = min(item[END], item[POSITION] + ahead + 1)
            seen[token, item[BEGIN] : end] += 1
            ordinals[token].append(int(item[ORDINAL]))
            pages = slice(item[BEGIN] // PAGE_SIZE, -(-end // PAGE_SIZE))
            assert np.array_equal(tables[item[ROW], pages], tables[owners[token], pages])
    assert np.array_equal(seen, np.arange(2500) <= positions[:, None])
    counts = np.diff(items.bases)
    for found, count in zip(ordinals, counts[: len(ordinals)], strict=True):
        assert sorted(found) == (list(range(count)) if count else [-1])
    assert not counts[len(ordinals) :].any()
    assert items.room.num_partials >= items.bases[-1]
    assert not counts[items.room.num_combined :].any()


@given(steps(), st.integers(0, 500), st.integers(0, 8))
def test_sizes_depend_on_capacity_alone(step: Step, more: int, others: int) -> None:
    capacity = Capacity(
        num_tokens=sum(step.lengths) + more, num_sequences=len(step.lengths) + others
    )
    items = lay_out(step, 8, tables=step.tables(), capacity=capacity)
    least = lay_out(Step((0,), (1,), 0), 8, capacity=capacity)
    for name in ("narrow", "wide", "bases", "dequantised"):
        assert getattr(items, name).shape == getattr(least, name).shape
        assert getattr(items, name).dtype == np.int32
    assert items.room.num_partials == least.room.num_partials
    assert items.room.num_combined == least.room.num_combined


@settings(max_examples=50)
@given(steps(), st.booleans())
def test_dequantised_pages_are_those_that_wide_items_read(step: Step, share: bool) -> None:
    options = {"tables": step.tables() if share else None}
    plain, gathered = (
        lay_out(step, 8, max_dequantised=most, **options) for most in (0, 12 * NUM_PAGES)
    )
    pages: list[tuple[int, int]] = []
    for row, count, before, _ in gathered.dequantised:
        assert before == len(pages)
        pages += [(row, index) for index in range(count)]
    assert gathered.room.num_dequantised == len(pages)
    assert np.array_equal(plain.narrow, gathered.narrow)
    assert np.array_equal(np.delete(plain.wide, ROW, 1), np.delete(gathered.wide, ROW, 1))
    for expected, item in zip(plain.wide, gathered.wide, strict=True):
        for index in range(item[BEGIN] // PAGE_SIZE, -(-item[END] // PAGE_SIZE)):
            assert pages[item[ROW] + index] == (expected[ROW], index)
    if pages:
        few = lay_out(step, 8, max_dequantised=len(pages) - 1, **options)
        assert (few.room.num_dequantised, few.wide.tolist()) == (0, plain.wide.tolist())


def test_shared_pages_are_read_once_for_neighbours() -> None:
    step = Step((700,) * 6, (1,) * 6, 10)
    items = lay_out(step, 8, tables=step.tables(), num_programs=1)
    assert [item[[TOKENS, BEGIN, END]].tolist() for item in items.wide] == [[6, 0, 640]]
    assert items.narrow[:, BEGIN].tolist() == [640] * 6


def test_one_long_decode_is_cut_for_all_programs() -> None:
    items = lay_out(Step((2047,), (1,), 0), 8)
    assert len(items.narrow) == 2048 // UNIT


@pytest.mark.parametrize("num_programs", [2, 16, 132])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_lone_decode_has_room_for_as_many_pieces_as_run_at_a_time(
    num_programs: int, num_tokens: int
) -> None:
    """It never has more: padding would wait for places that its own programs hold."""
    capacity = Capacity(num_tokens=num_tokens, num_sequences=1, decodes=True)
    options = {"num_programs": num_programs, "num_beside": 2, "narrow_waves": 4}
    for num_units in (*range(1, 300), *range(300, 9000, 97)):
        step = Step((UNIT * num_units - num_tokens,), (num_tokens,), 0)
        alone = lay_out(step, 8, **options)
        items = lay_out(step, 8, capacity=capacity, **options)
        assert len(items.narrow) == num_programs
        assert np.array_equal(items.narrow[: len(alone.narrow)], alone.narrow)
        assert not items.narrow[len(alone.narrow) :].any()


@pytest.mark.parametrize(("narrow_waves", "pieces"), [(1, 3), (2, 5), (4, 8)])
def test_long_decodes_are_cut_so_that_programs_finish_together(
    narrow_waves: int, pieces: int
) -> None:
    """Of 132 programs a head, those of 64 decodes in 3 pieces leave 72 idle half of the time."""
    step = Step((32767,) * 64, (1,) * 64, 0)
    items = lay_out(step, 8, num_beside=2, narrow_waves=narrow_waves)
    assert len(items.narrow) == 64 * pieces


def test_more_heads_than_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="heads_per_kv=200"):
        lay_out(Step((0,), (1,), 0), 200)


@pytest.mark.parametrize("lengths", [(4,), (1, 4, 3, 2, 4), (4,) * 40], ids=["one", "few", "many"])
def test_sequences_that_move_on_have_the_items_of_a_step_that_is_laid_out_anew(
    monkeypatch, lengths: tuple[int, ...]
) -> None:
    """Whatever is remembered of steps like it; and what was laid out before stays as it is."""
    rng, num = np.random.default_rng(0), len(lengths)
    capacity = Capacity(num_tokens=4 * num, num_sequences=num, decodes=True, num_drafts=3)
    starts = rng.integers(1, 900, num)
    found, kept = [], []
    for _ in range(120):
        starts = starts + rng.integers(1, 5, num)
        step = Step(tuple(starts.tolist()), lengths, 0)
        found.append((step, lay_out(step, 4, capacity=capacity)))
        kept.append(found[-1][1].narrow.copy())
    monkeypatch.setattr(work, "may_share", lambda *_: True)
    num_cuts = set()
    for (step, items), narrow in zip(found, kept, strict=True):
        anew = lay_out(step, 4, capacity=capacity)
        for name in ("narrow", "wide", "bases"):
            assert (getattr(items, name) == getattr(anew, name)).all()
        assert (items.narrow == narrow).all()
        num_cuts.add(int((narrow[:, TOKENS] > 0).sum()))
    assert num == 40 or len(num_cuts) > 1, "sequences pass from one cut to another"


def pieces_of(items: work.AttentionItems, num_tokens: int) -> list[set[tuple[object, ...]]]:
    """The ranges of KV of each token's items, and whether these are wide."""
    found: list[set[tuple[object, ...]]] = [set() for _ in range(num_tokens)]
    for is_wide, array in ((False, items.narrow), (True, items.wide)):
        for item in array:
            for token in range(item[FIRST], item[FIRST] + item[TOKENS]):
                is_last = item[ORDINAL] in (-1, items.bases[token + 1] - items.bases[token] - 1)
                end = None if is_last else int(item[END])
                found[token].add((is_wide, int(item[BEGIN]), end))
    return found


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 9000), st.booleans()), min_size=1, max_size=5),
    st.sampled_from((1, 4, 6, 8, 16)),
    st.data(),
)
def test_with_batch_invariant_items_depend_on_a_tokens_position_alone(
    sequences: list[tuple[int, bool]], heads_per_kv: int, data: st.DataObject
) -> None:
    """However many others there are, and however much of a prompt is in the step."""
    sequences.sort(key=lambda each: not each[1])
    decodes = sum(each[1] for each in sequences)
    starts = [end if decodes else end // 64 * 64 for end, decodes in sequences]
    lengths = [data.draw(st.integers(1, 3 if is_decode else 300)) for _, is_decode in sequences]
    tiling = work.Tiling(
        heads_per_kv=heads_per_kv,
        num_kv_heads=2,
        page_size=PAGE_SIZE,
        num_programs=132,
        order=SumOrder.FIXED,
    )
    own = range(len(starts))
    items = work.lay_out(starts, lengths, own, tiling, None, decodes)
    lasts = items.wide[:, POSITION] + items.wide[:, TOKENS] - 1
    assert (items.wide[:, POSITION] // 64 == lasts // 64).all()
    together = pieces_of(items, sum(lengths))
    first = 0
    for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        is_decode = sequence < decodes
        token = data.draw(st.integers(0, length - 1))
        begin = start + token if is_decode else (start + token) // 64 * 64
        alone = work.lay_out([begin], [start + token + 1 - begin], [0], tiling, None, is_decode)
        assert pieces_of(alone, start + token + 1 - begin)[-1] == together[first + token]
        first += length
