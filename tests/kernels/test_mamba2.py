"""Mamba2's mixer: the chunked reference against the recurrence, token by token."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from milepost.kernels.layout.chunks import lay_out_chunks
from milepost.kernels.recurrent import choose_chunk
from milepost.kernels.recurrent.reference import mamba2 as reference
from tests.kernels.mixers import Batch, Pools, make_pools, make_projected
from tests.kernels.ssd import (
    GROUPS,
    ONE_GROUP,
    Shapes,
    make_weights,
    recur,
    run,
    split,
)
from tests.numbers import relative_error

SEVERAL = Batch(
    starts=[30, 5, 16, 0, 15],
    lengths=[40, 1, 70, 2, 3],
    slot_in=[1, 1, 2, 0, 0],
    slot_out=[3, 4, 2, 5, 6],
    exports=[(2, 64, 7), (0, 31, 8), (0, 48, 9), (2, 18, 10), (0, 70, 11), (3, 1, 12)],
)
VARIANTS = {
    "plain": {},
    "no_bias": {"conv_bias": None},
    "limits": {"dt_limit": (0.2, 0.6)},
    "norm_before_gate": {},
    "no_norm": {"norm": None},
}


def check(shapes: Shapes, weights, pools: Pools, batch: Batch, tolerance: float) -> None:
    """Every output, and every state that is written, is the recurrence's."""
    lengths = batch.lengths or [1] * len(batch.slot_out)
    projected = make_projected(shapes, sum(lengths), pools.conv.dtype)
    before = pools.clone()
    output = run(shapes, projected, weights, pools, batch)
    assert output.dtype == projected.dtype
    expected = []
    for number, rows in enumerate(split(projected, lengths)):
        first = [pool[batch.slot_in[number]] for pool in (before.conv, before.recurrent)]
        own = {position: slot for owner, position, slot in batch.exports if owner == number}
        end = len(rows)
        stops = {position - batch.starts[number]: slot for position, slot in own.items()}
        for stop, slot in (*stops.items(), (end, batch.slot_out[number])):
            y, conv_state, state = recur(shapes, rows[:stop], weights, *first)
            assert relative_error(pools.conv[slot], conv_state) < 1e-7
            assert relative_error(pools.recurrent[slot], state) < tolerance
        expected.append(y)
    assert relative_error(output, torch.cat(expected)) < tolerance
    written = {*batch.slot_out, *(slot for *_, slot in batch.exports)}
    kept = [slot for slot in range(len(pools.conv)) if slot not in written]
    for ours, theirs in ((pools.conv, before.conv), (pools.recurrent, before.recurrent)):
        assert torch.equal(ours[kept].nan_to_num(9), theirs[kept].nan_to_num(9))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-13)], ids=str
)
@pytest.mark.parametrize("shapes", [ONE_GROUP, GROUPS], ids=["one_group", "groups"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_match_the_recurrence(variant, shapes, dtype, tolerance):
    shapes = replace(shapes, norm_before_gate=variant == "norm_before_gate")
    weights = make_weights(shapes, dtype, **VARIANTS[variant])
    check(shapes, weights, make_pools(shapes, 14, dtype, state_dtype=dtype), SEVERAL, tolerance)
    decodes = Batch(starts=(), lengths=(), slot_in=(0, 1, 2, 1), slot_out=(4, 5, 2, 6))
    check(shapes, weights, make_pools(shapes, 8, dtype, state_dtype=dtype), decodes, tolerance)


def scan(tokens: list[torch.Tensor], pool, start, slot_in, exports=()) -> torch.Tensor:
    """The recurrence alone, into slot 3: elementwise functions before it may round otherwise in the
    last few of many numbers."""
    layout = lay_out_chunks([start], [len(tokens[0])], exports, chunk=16)
    rate, skip = make_weights(GROUPS).rate, make_weights(GROUPS).skip
    slots = torch.tensor([slot_in]), torch.tensor([3])
    x, b, c, dt = tokens
    b_c = torch.stack((b, c), 1)
    return reference.prefill(x, b_c, dt, pool, *slots, layout, small=(rate, skip))


def make_tokens(count: int) -> list[torch.Tensor]:
    """x, b, c, dt."""
    random = torch.Generator().manual_seed(0)
    shapes = ((16, 4), (8, 6), (8, 6), (16,))
    x, b, c, dt = (torch.randn(count, *shape, generator=random) for shape in shapes)
    return [x, b, c, dt.exp()]


@pytest.mark.parametrize("start", [0, 37])
def test_export_equals_prefill_that_ends_there(start):
    tokens = make_tokens(70 - start)
    exports = [(0, position, 4 + index) for index, position in enumerate((39, 48, 64, 70))]
    pool = make_pools(GROUPS, 9).recurrent
    scan(tokens, pool, start, 1, exports)
    for index, (_, position, slot) in enumerate(exports):
        # Chunks that end at earlier exports end there in both.
        shorter = make_pools(GROUPS, 9).recurrent
        scan([each[: position - start] for each in tokens], shorter, start, 1, exports[:index])
        assert torch.equal(pool[slot], shorter[3])


def test_prefill_in_parts_on_the_grid_gives_the_same_bits():
    tokens = make_tokens(60)
    whole, parts = (make_pools(GROUPS, 5).recurrent for _ in range(2))
    expected = scan(tokens, whole, 10, 1, [(0, 41, 4)])
    outputs, slot_in = [], 1
    for begin, end in pairwise((10, 32, 41, 64, 70)):
        part = [each[begin - 10 : end - 10] for each in tokens]
        outputs.append(scan(part, parts, begin, slot_in))
        slot_in = 3
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(parts[3], whole[3])


def test_a_long_time_step_forgets_and_overflows_nothing():
    shapes, weights = ONE_GROUP, make_weights(ONE_GROUP)
    weights.dt_bias.fill_(200.0)
    pools = make_pools(shapes, 4)
    projected = make_projected(shapes, 20)
    batch = Batch(starts=[3], lengths=[20], slot_in=[1], slot_out=[3])
    output = run(shapes, projected, weights, pools, batch)
    assert output.isfinite().all()
    fresh = make_pools(shapes, 4)
    batch = Batch(starts=[3], lengths=[20], slot_in=[2], slot_out=[3])
    run(shapes, projected, weights, fresh, batch)
    assert torch.equal(pools.recurrent[3], fresh.recurrent[3])


@pytest.mark.parametrize("broken", [0, 1])
def test_nan_in_one_sequence_stays_there(broken):
    projected, pools = make_projected(GROUPS, 60), make_pools(GROUPS, 5)
    rows, others = (slice(30 * each, 30 * each + 30) for each in (broken, 1 - broken))
    projected[rows] = torch.nan
    batch = Batch(starts=[0, 0], lengths=[30, 30], slot_in=[0, 0], slot_out=[3, 4])
    output = run(GROUPS, projected, make_weights(GROUPS), pools, batch)
    assert output[rows].isnan().all()
    assert output[others].isfinite().all()
    assert pools.recurrent[4 - broken].isfinite().all()


@pytest.mark.parametrize("size", [64, 128, 256, 1024])
def test_chunks_that_outgrow_a_program_are_refused(size: int) -> None:
    chunk = choose_chunk(size)
    assert replace(ONE_GROUP, chunk=chunk).operation.chunk == chunk
    if size > chunk:
        with pytest.raises(AssertionError, match="outgrows"):
            _ = replace(ONE_GROUP, chunk=size).operation
