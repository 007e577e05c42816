"""The arrays of a step, and the graphs that it may run in."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.cache.placement import Kind
from milepost.cache.plans import Export
from milepost.kernels.attention import AttentionOperation
from milepost.kernels.attention.table import MOST_CAPTURED_TOKENS
from milepost.kernels.attention.tiles import END, FIRST, POSITION, ROW, TOKENS
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.recurrent import MixerSizes, RecurrentOperation, RecurrentRule
from milepost.runner.arrays import Geometry, build
from milepost.runner.graphs import exact_capacity, ladder, largest_step, smallest
from milepost.runner.staging import num_staged_bytes
from milepost.runner.tables import HostTables, RecordRows
from milepost.scheduler.plans import SequencePlan, StepPlan

ATTENTION = AttentionOperation(num_heads=8, num_kv_heads=2, head_dim=128)
ENDING = replace(ATTENTION, last_tokens_only=True)
MIXER = MixerSizes(rule=RecurrentRule.GATED_DELTA, units=16, group=2, shared=128, own=128, taps=4)
GATED_DELTA = RecurrentOperation(sizes=MIXER)
GEOMETRY = Geometry(
    operations=(ATTENTION, ENDING, GATED_DELTA),
    page_size=64,
    page_rows=1000,
    device=torch.device("cpu"),
    chip=Chip(
        arch="sm_90",
        capability=(9, 0),
        is_amd=False,
        num_sms=132,
        shared_bytes=227 << 10,
    ),
)


def sequence(start: int, tokens: list[int], slot: int, **changes) -> SequencePlan:
    """The first of its request, which is named after its slot."""
    num_pages = -(-(start + len(tokens)) // 64)
    defaults = {
        "number": slot,
        "start": start,
        "num_tokens": len(tokens),
        "tokens": array("I", tokens).tobytes(),
        "new_pages": tuple(10 * slot + page for page in range(num_pages)),
        "write_from": start,
        "slot_in": slot,
        "slot_out": slot,
        "samples": True,
    }
    return SequencePlan(**(defaults | changes))


def steps(*sequences: SequencePlan, ended: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(sequences=sequences, ended=ended)


@pytest.fixture
def tables() -> HostTables:
    return HostTables(8, max_pages=16, page_size=64)


@pytest.mark.parametrize(
    ("capability", "has_float8_kv", "num_heads", "head_dim", "rows"),
    [
        ((9, 0), True, 16, 256, 8),
        ((9, 0), True, 32, 256, 16),
        ((9, 0), True, 64, 256, 32),
        ((9, 0), True, 16, 128, 16),
        ((9, 0), False, 16, 256, 16),
        ((8, 9), True, 16, 256, 16),
    ],
)
def test_decodes_over_float8_have_eight_rows_where_hoppers_kernel_takes_them(
    tables,
    capability: tuple[int, int],
    has_float8_kv: bool,
    num_heads: int,
    head_dim: int,
    rows: int,
) -> None:
    pytest.importorskip("triton")
    chip = replace(GEOMETRY.chip, capability=capability)
    operation = AttentionOperation(num_heads=num_heads, num_kv_heads=2, head_dim=head_dim)
    geometry = replace(GEOMETRY, operations=(operation,), chip=chip, has_float8_kv=has_float8_kv)
    plan = steps(sequence(63, [1], 1))
    tables.update(plan)
    layout = build(plan, tables, geometry, exact_capacity(plan)).layouts[operation]
    assert layout.tiling.shapes.narrow_rows == rows
    assert [int(tokens) for tokens in layout.narrow[:, 1]] == [1]


@pytest.mark.parametrize(
    ("capability", "has_float8_kv", "num_tokens", "rows", "num_copied"),
    [
        ((8, 0), True, 200, 64, 0),
        ((8, 0), True, 600, 64, 0),
        ((8, 0), True, 701, 128, 11),
        ((8, 0), True, 900, 64, 0),
        ((8, 0), False, 200, 128, 0),
        ((8, 9), True, 200, 128, 0),
        ((8, 9), True, 600, 128, 0),
        ((8, 9), True, 701, 128, 11),
        ((8, 9), True, 900, 128, 0),
        ((9, 0), True, 600, 128, 10),
        ((9, 0), True, 900, 128, 15),
        ((9, 0), True, 200, 128, 0),
        ((9, 0), False, 600, 128, 0),
    ],
)
def test_large_heads_have_fewer_rows_where_float8_is_taken_apart(
    monkeypatch,
    tables,
    capability: tuple[int, int],
    has_float8_kv: bool,
    num_tokens: int,
    rows: int,
    num_copied: int,
) -> None:
    """Only Hopper's kernel needs all pages in 16 bits; elsewhere a copy's memory is limited."""
    pytest.importorskip("triton")
    table = "milepost.kernels.attention.table"
    monkeypatch.setattr(f"{table}.COPIED_BYTES", 800 * 4 * 2 * 256)
    monkeypatch.setattr(f"{table}.MOST_CAPTURED_TOKENS", 700)
    chip = replace(GEOMETRY.chip, arch="sm", capability=capability, shared_bytes=163 << 10)
    large = replace(ATTENTION, head_dim=256)
    geometry = replace(GEOMETRY, operations=(large,), chip=chip, has_float8_kv=has_float8_kv)
    plan = steps(sequence(0, [1] * num_tokens, 1))
    tables.update(plan)
    layout = build(plan, tables, geometry, exact_capacity(plan)).layouts[large]
    assert (layout.tiling.shapes.wide_rows, layout.room.num_dequantised) == (rows, num_copied)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_no_graph_depends_on_how_many_float8_pages_its_steps_read(
    monkeypatch, tables, capability: tuple[int, int]
) -> None:
    """Few pages and many are laid out the same way for every size that may be captured."""
    pytest.importorskip("triton")
    monkeypatch.setattr("milepost.kernels.attention.table.COPIED_BYTES", 1 << 20)
    chip = replace(GEOMETRY.chip, arch="sm", capability=capability, shared_bytes=99 << 10)
    large = replace(ATTENTION, head_dim=256)
    geometry = replace(GEOMETRY, operations=(large,), chip=chip, has_float8_kv=True)
    captured = ladder(max_num_seqs=4, max_num_batched_tokens=8192, most_launched=8192)
    sizes = {each.num_tokens for each in captured if not each.decodes}
    assert max(sizes) <= MOST_CAPTURED_TOKENS
    plans = [steps(sequence(start, [1] * 20, slot)) for slot, start in ((1, 0), (2, 900))]
    for plan in plans:
        tables.update(plan)
    for num_tokens in sizes:
        capacity = Capacity(num_tokens=num_tokens, num_sequences=4)
        found = set()
        for plan in plans:
            layout = build(plan, tables, geometry, capacity).layouts[large]
            found.add(
                (layout.tiling.shapes.wide_rows, layout.room.num_dequantised, layout.wide.shape)
            )
        assert len(found) == 1, num_tokens


def test_tokens_positions_and_kv_rows(tables):
    plan = steps(
        sequence(70, [5], 3),
        sequence(62, [7, 8, 9, 6], 2, write_from=64, slot_in=5, samples=False),
    )
    tables.update(plan)
    step = build(plan, tables, GEOMETRY, exact_capacity(plan))
    assert step.token_ids.tolist() == [5, 7, 8, 9, 6]
    assert step.positions.tolist() == [70, 62, 63, 64, 65]
    # Page 1 of slot 3 is page 31, and of slot 2 page 21; shared pages are not written.
    assert step.kv_rows.tolist() == [31 * 1000 + 6, -1, -1, 21 * 1000, 21 * 1000 + 1]
    assert step.slot_in.tolist() == [3, 5]
    assert step.slot_out.tolist() == [3, 2]
    assert step.last_tokens.tolist() == [0, 0]
    assert step.num_real.tolist() == [plan.num_tokens]


def test_behind_the_last_cache_only_those_that_are_sampled_attend(tables):
    plan = steps(
        sequence(70, [5], 3),
        sequence(62, [7, 8, 9, 6], 2, samples=False),
        sequence(130, [1] * 40, 4),
    )
    tables.update(plan)
    step = build(plan, tables, GEOMETRY, exact_capacity(plan))
    layout, rows = step.layouts[ENDING], tables.places(plan.sequences)
    found = [
        (int(item[FIRST]), int(item[TOKENS]), int(item[ROW]), int(item[POSITION]), int(item[END]))
        for item in layout.narrow
    ]
    assert sorted(found) == [(0, 1, rows[0], 70, 71), (1, 1, rows[2], 169, 170)]
    assert not len(layout.wide)
    assert step.num_sampled.tolist() == [2]
    assert step.last_tokens.tolist()[:2] == [0, 44]


def test_decodes_have_no_ends_of_their_own(tables):
    plan = steps(sequence(70, [5], 3), sequence(62, [7], 2))
    tables.update(plan)
    assert build(plan, tables, GEOMETRY, exact_capacity(plan)).layouts[ENDING] is None
    drafted = steps(drafting(1, 2), sequence(0, [1] * 30, 4))
    tables.update(drafted)
    records = RecordRows(4)
    records.follow(drafted)
    step = build(drafted, tables, GEOMETRY, exact_capacity(drafted), records=records)
    assert step.layouts[ENDING] is None


def test_padding_names_nothing(tables):
    capacity = Capacity(num_tokens=4, num_sequences=3, num_exports=0, decodes=True)
    plan = steps(sequence(10, [5], 1))
    tables.update(plan)
    step = build(plan, tables, GEOMETRY, capacity, sources=[2])
    assert step.token_ids.tolist() == [5, 0, 0, 0]
    assert step.kv_rows.tolist() == [10 * 1000 + 10, -1, -1, -1]
    assert step.slot_out.tolist() == [1, -1, -1]
    assert step.sources.tolist() == [2, 0, 0]
    assert not step.layouts[GATED_DELTA].arrivals.any()
    empty = build(steps(), tables, GEOMETRY, capacity)
    assert [array.shape for array in _arrays(empty)] == [array.shape for array in _arrays(step)]


@pytest.mark.parametrize(("num_sequences", "shape"), [(4, (4, 16)), (5, None)])
def test_programs_of_a_key_head_arrive(tables, num_sequences, shape):
    """If each value head has an SM of its own, there is a place for each of 16 key heads; else no
    program waits for others, and nothing is sent."""
    capacity = Capacity(num_tokens=num_sequences, num_sequences=num_sequences, decodes=True)
    arrivals = build(steps(), tables, GEOMETRY, capacity).layouts[GATED_DELTA].arrivals
    assert (arrivals if arrivals is None else arrivals.shape) == shape
    assert arrivals is None or not arrivals.any()


def test_shapes_follow_from_the_capacity_alone(tables):
    capacity = Capacity(num_tokens=128, num_sequences=8, num_exports=4, decodes=False)
    export = Export(position=64, slot=7, kind=Kind.MARK)
    plans = [
        steps(),
        steps(sequence(0, [1] * 100, 1, exports=(export,))),
        steps(*(sequence(200 + i, [2], i + 1) for i in range(8)), ended=(1,)),
    ]
    shapes = []
    for plan in plans:
        tables.update(plan)
        step = build(plan, tables, GEOMETRY, capacity)
        shapes.append([array.shape for array in _arrays(step)])
        assert step.layouts[GATED_DELTA] is not None
    assert shapes[0] == shapes[1] == shapes[2]


def test_ladder_holds_every_small_step():
    capacities = ladder(max_num_seqs=20, max_num_batched_tokens=8192)
    assert len(set(capacities)) == len(capacities)
    for num in range(1, 21):
        plan = steps(*(sequence(10, [1], 1 + i) for i in range(num)))
        found = smallest(capacities, exact_capacity(plan))
        assert found is not None
        assert found.decodes
        assert num <= found.num_sequences <= max(2 * num, 1)
    for num_tokens in (2, 33, 512):
        found = smallest(capacities, exact_capacity(steps(sequence(0, [1] * num_tokens, 1))))
        assert found is not None
        assert not found.decodes
        assert found.num_tokens >= num_tokens
    exports = tuple(Export(position=1 + i, slot=2, kind=Kind.MARK) for i in range(40))
    for own in (sequence(0, [1] * 513, 1), sequence(0, [1] * 50, 1, exports=exports)):
        assert smallest(capacities, exact_capacity(steps(own))) is None


def test_longer_steps_have_graphs_where_launching_is_what_they_take():
    limits = {"max_num_seqs": 20, "max_num_batched_tokens": 8192}
    capacities = ladder(**limits, most_launched=1535)
    assert [c.num_tokens for c in capacities] == sorted(
        (c.num_tokens for c in capacities), reverse=True
    )
    for num_tokens, size in ((513, 768), (769, 1024), (1024, 1024)):
        found = smallest(capacities, exact_capacity(steps(sequence(0, [1] * num_tokens, 1))))
        assert found is not None
        assert (found.num_tokens, found.num_sequences) == (size, 20)
    assert smallest(capacities, exact_capacity(steps(sequence(0, [1] * 1025, 1)))) is None
    beside = [sequence(10, [1], 2 + i) for i in range(19)]
    found = smallest(capacities, exact_capacity(steps(*beside, sequence(0, [1] * 900, 1))))
    assert found is not None
    assert (found.num_tokens, found.num_sequences) == (1024, 20)
    budget = ladder(max_num_seqs=20, max_num_batched_tokens=800, most_launched=8192, num_drafts=3)
    assert max(c.num_tokens for c in budget) == 768
    drafts = ladder(**limits, most_launched=2048, num_drafts=3)
    mixed = steps(drafting(1, 3), sequence(0, [1] * 1500, 3))
    found = smallest(drafts, exact_capacity(mixed))
    assert found is not None
    assert (found.num_tokens, found.num_drafts) == (2048, 3)


def test_few_sequences_have_graphs_of_their_own():
    capacities = ladder(max_num_seqs=20, max_num_batched_tokens=8192)
    for num, room in ((1, 4), (4, 4), (5, 20), (20, 20)):
        plan = steps(*(sequence(10, [1, 2], 1 + i) for i in range(num)))
        found = smallest(capacities, exact_capacity(plan))
        assert found is not None
        assert (found.num_sequences, found.num_tokens) == (room, 64 if num == 20 else 32)


def test_ladder_stays_within_the_token_budget():
    capacities = ladder(max_num_seqs=4, max_num_batched_tokens=100)
    assert max(c.num_tokens for c in capacities) <= 100


@settings(max_examples=60)
@given(data=st.data())
def test_every_step_fits_what_is_staged_for_the_largest(data):
    """What an executor stages is sized by `largest_step`, with drafts and without."""
    budget, max_num_seqs = data.draw(st.sampled_from([(64, 3), (200, 8), (640, 40)]))
    num_drafts = data.draw(st.sampled_from([0, 3]))
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    largest = largest_step(**limits, num_drafts=num_drafts)
    tables, records = HostTables(max_num_seqs, max_pages=128, page_size=64), RecordRows(40)
    most = max(
        num_staged_bytes(build(steps(), tables, GEOMETRY, each))
        for each in (largest, largest_step(**limits))
    )
    sequences, num_exports = [], largest.num_exports
    for slot in range(1, data.draw(st.integers(1, max_num_seqs)) + 1):
        left = budget - sum(s.num_tokens for s in sequences)
        if not left:
            break
        start, length = data.draw(st.integers(0, 3000)), data.draw(st.integers(1, left))
        drafts = min(data.draw(st.integers(0, num_drafts)), left - 1)
        if drafts:
            sequences.append(sequence(start, [1] * (1 + drafts), slot, num_drafts=drafts))
            continue
        ends = data.draw(st.sets(st.integers(start + 1, start + length), max_size=num_exports))
        num_exports -= len(ends)
        exports = tuple(Export(position=end, slot=1, kind=Kind.MARK) for end in sorted(ends))
        sequences.append(sequence(start, [1] * length, slot, exports=exports))
    plan = steps(*sorted(sequences, key=lambda s: not s.is_decode))
    tables.update(plan)
    records.follow(plan)
    step = build(plan, tables, GEOMETRY, exact_capacity(plan), records=records)
    assert num_staged_bytes(step) <= most


def drafting(slot: int, num_drafts: int, fold: int = 0) -> SequencePlan:
    return sequence(100, [1] * (1 + num_drafts), slot, num_drafts=num_drafts, fold=fold)


def test_behind_each_draft_is_sampled_and_behind_the_token_before_it(tables):
    silent = sequence(0, [1] * 5, 4, samples=False)
    plan = steps(drafting(1, 2), drafting(2, 0), sequence(100, [], 3, samples=False), silent)
    tables.update(plan)
    records = RecordRows(4)
    records.follow(plan)
    step = build(plan, tables, GEOMETRY, exact_capacity(plan), records=records)
    assert step.last_tokens.tolist() == [0, 1, 2, 3, *[0] * (len(step.last_tokens) - 4)]
    assert plan.sampled_numbers == [1, 1, 1, 2]


def test_ladder_holds_small_steps_that_verify():
    """And no step that does not verify takes one of theirs."""
    capacities = ladder(max_num_seqs=20, max_num_batched_tokens=8192, num_drafts=3)
    plain = ladder(max_num_seqs=20, max_num_batched_tokens=8192)
    assert len(set(capacities)) == len(capacities) <= len(plain) + 16
    assert [c for c in capacities if not c.num_drafts] == plain
    for num in range(1, 21):
        sequences = [drafting(1 + i, i % 4) for i in range(num)]
        found = smallest(capacities, exact_capacity(steps(drafting(30, 1), *sequences[1:])))
        assert found is not None
        assert found.decodes
        assert found.num_drafts == 3
        assert num <= found.num_sequences <= max(2 * num, 1)
        found = smallest(
            capacities, exact_capacity(steps(*(sequence(9, [1], 1 + i) for i in range(num))))
        )
        assert found is not None
        assert not found.num_drafts
    mixed = steps(drafting(1, 3), drafting(2, 0, fold=2), sequence(0, [1] * 50, 3))
    found = smallest(capacities, exact_capacity(mixed))
    assert found is not None
    assert (found.num_tokens, found.num_drafts, found.decodes) == (64, 3, False)
    assert found.num_sampled == 64
    only_folds = steps(sequence(100, [], 1, fold=1, samples=False))
    found = smallest(capacities, exact_capacity(only_folds))
    assert found is not None
    assert found.num_sequences == 1
    assert smallest(capacities, exact_capacity(steps(drafting(1, 4)))) is None


def test_shapes_of_a_step_that_verifies_follow_from_the_capacity(tables):
    records = RecordRows(4)
    for decodes in (True, False):
        capacity = Capacity(
            num_tokens=128, num_sequences=6, num_exports=2, decodes=decodes, num_drafts=3
        )
        plans = [steps(), steps(drafting(1, 3), drafting(2, 0), ended=(3,)), steps(drafting(1, 2))]
        if not decodes:
            plans.append(steps(drafting(1, 1), sequence(0, [1] * 70, 3)))
        shapes = []
        for plan in plans:
            tables.update(plan)
            records.follow(plan)
            step = build(plan, tables, GEOMETRY, capacity, records=records)
            shapes.append([array.shape for array in _arrays(step)])
        assert all(each == shapes[0] for each in shapes)
        assert len(step.last_tokens) == 24


def test_the_largest_step_has_all_sequences_and_states():
    largest = largest_step(max_num_seqs=512, max_num_batched_tokens=8192)
    assert (largest.num_tokens, largest.num_sequences) == (8192, 512)
    assert largest.num_exports == 512 + 128
    assert not largest.decodes
    assert largest_step(max_num_seqs=512, max_num_batched_tokens=100).num_sequences == 100


def _arrays(step) -> list[np.ndarray]:
    from milepost.runner.staging import _arrays as walk

    return list(walk(step))


@pytest.mark.parametrize("follows", [False, True])
def test_prefills_alone_are_like_many(tables: HostTables, *, follows: bool) -> None:
    geometry = replace(GEOMETRY, follows_many=follows)
    prefill = steps(sequence(0, [1, 2, 3, 4], 1))
    tables.follow(prefill)
    order = SumOrder.LIKE_MANY if follows else SumOrder.FREE
    assert build(prefill, tables, geometry, exact_capacity(prefill)).order is order
    decode = StepPlan(sequences=(sequence(4, [5], 1, new_pages=()),))
    tables.follow(decode)
    assert build(decode, tables, geometry, exact_capacity(decode)).order is SumOrder.FREE
