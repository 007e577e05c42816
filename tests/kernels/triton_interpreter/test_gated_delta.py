"""The fused Gated DeltaNet kernels, interpreted, against the references."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from milepost.kernels.recurrent import CHUNK
from tests.batches import spread
from tests.kernels.mixers import (
    FEW_HEADS,
    ODD,
    SMALL,
    SPACING,
    Batch,
    Pools,
    Shapes,
    assert_pools_equal,
    assert_pools_match,
    expected_decode,
    expected_prefill,
    fused_decode,
    fused_prefill,
    make_pools,
    make_projected,
    make_weights,
)
from tests.numbers import relative_error

TOLERANCE = 1e-4 / 20
DECODES = Batch(starts=(), lengths=(), slot_in=(1, 2), slot_out=(3, 2))


@pytest.mark.parametrize("spacing", [0, SPACING])
@pytest.mark.parametrize("shapes", [ODD, SMALL], ids=["odd", "small"])
def test_decode_matches_reference(shapes: Shapes, spacing: int) -> None:
    # Slot 0 and slot 1 are read by several, slot 2 is moved on in place; two rows are padding.
    batch = Batch(starts=(), lengths=(), slot_in=(0, 1, 2, 1, 0), slot_out=(4, 5, 2, 6, 7))
    padded = Batch(
        starts=(), lengths=(), slot_in=(*batch.slot_in, 1, -1), slot_out=(*batch.slot_out, -1, -1)
    )
    projected, weights = make_projected(shapes, 7), make_weights(shapes)
    pools, ours = make_pools(shapes, 10), make_pools(shapes, 10, spacing=spacing)
    expected = expected_decode(shapes, projected[:5], weights, pools, batch)
    output = fused_decode(shapes, projected, weights, ours, padded)
    assert relative_error(output[:5], expected) < TOLERANCE
    assert (output[5:] == 0).all()
    assert_pools_match(ours, pools, TOLERANCE)


def test_heads_may_be_gated_by_sigmoids() -> None:
    """As Qwen3.8-Flash-Next's may be."""
    shapes, weights = replace(SMALL, gates_by_sigmoid=True), make_weights(SMALL)
    for batch, make, expect in (
        (DECODES, fused_decode, expected_decode),
        (BATCHES["in place"], fused_prefill, expected_prefill),
    ):
        projected = make_projected(SMALL, sum(batch.lengths) or 2)
        pools = make_pools(SMALL, 4)
        ours = pools.clone()
        expected = expect(shapes, projected, weights, pools, batch)
        assert relative_error(make(shapes, projected, weights, ours, batch), expected) < TOLERANCE
        assert_pools_match(ours, pools, TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_decode_half_inputs(dtype: torch.dtype) -> None:
    batch = DECODES
    projected, weights = make_projected(SMALL, 2, dtype), make_weights(SMALL, dtype)
    pools = make_pools(SMALL, 4, dtype, state_dtype=dtype)
    ours = pools.clone()
    expected = expected_decode(SMALL, projected, weights, pools, batch)
    output = fused_decode(SMALL, projected, weights, ours, batch)
    assert output.dtype == dtype
    assert relative_error(output, expected) < 1e-2
    assert_pools_match(ours, pools, 1e-2)


BATCHES = {
    "one token": Batch(starts=[5], lengths=[1], slot_in=[1], slot_out=[3]),
    "fresh": Batch(starts=[0], lengths=[130], slot_in=[0], slot_out=[3]),
    "in place": Batch(starts=[62], lengths=[68], slot_in=[2], slot_out=[2]),
    "several": Batch(
        starts=[100, 5, 64, 0, 63],
        lengths=[40, 1, 130, 2, 3],
        slot_in=[1, 1, 2, 0, 0],
        slot_out=[3, 4, 2, 5, 6],
        exports=[(2, 128, 7), (0, 101, 8), (0, 129, 9), (2, 66, 10), (0, 140, 11), (3, 1, 12)],
    ),
}
TWO = Batch(
    starts=[100, 0], lengths=[40, 3], slot_in=[1, 0], slot_out=[1, 3], exports=[(0, 129, 4)]
)
PAIRS = replace(ODD, value_heads=4)
"""Two value heads for each key head, and odd sizes."""


@pytest.mark.parametrize(
    ("name", "shapes", "spacing"),
    [
        *((name, PAIRS, SPACING) for name in BATCHES),
        *((name, SMALL, SPACING) for name in ("one token", "in place")),
        ("several", FEW_HEADS, 0),
    ],
    ids=str,
)
def test_prefill_matches_reference(name: str, shapes: Shapes, spacing: int) -> None:
    batch = BATCHES[name]
    projected, weights = make_projected(shapes, sum(batch.lengths)), make_weights(shapes)
    pools, ours = make_pools(shapes, 14), make_pools(shapes, 14, spacing=spacing)
    expected = expected_prefill(shapes, projected, weights, pools, batch)
    output = fused_prefill(shapes, projected, weights, ours, batch)
    assert relative_error(output, expected) < TOLERANCE
    assert_pools_match(ours, pools, TOLERANCE)


def test_slots_may_lie_far_apart() -> None:
    """The last ones where 32 bits do not count the elements."""
    weights, projected = make_weights(SMALL), make_projected(SMALL, 97)
    pools = make_pools(SMALL, 6)
    for pool in (pools.conv, pools.recurrent):
        pool[5] = pool[1]
    far = Pools(conv=spread(pools.conv), recurrent=spread(pools.recurrent))
    batch = Batch(starts=[100], lengths=[97], slot_in=[5], slot_out=[5], exports=[(0, 128, 4)])
    expected = fused_prefill(SMALL, projected, weights, pools, batch)
    assert torch.equal(fused_prefill(SMALL, projected, weights, far, batch), expected)
    decodes = Batch(starts=[], lengths=[], slot_in=[4, 5], slot_out=[3, 5])
    expected = fused_decode(SMALL, projected[:2], weights, pools, decodes)
    assert torch.equal(fused_decode(SMALL, projected[:2], weights, far, decodes), expected)
    assert_pools_equal(far, pools)


def test_prefill_padding_changes_nothing() -> None:
    batch, weights = TWO, make_weights(FEW_HEADS)
    tokens = sum(batch.lengths)
    projected = make_projected(FEW_HEADS, 120)
    projected[tokens:] = torch.nan
    exact, padded = make_pools(FEW_HEADS, 6), make_pools(FEW_HEADS, 6)
    expected = fused_prefill(FEW_HEADS, projected[:tokens], weights, exact, batch)
    output = fused_prefill(
        FEW_HEADS, projected, weights, padded, batch, max_tokens=120, max_sequences=4, max_exports=3
    )
    assert torch.equal(output[:tokens], expected)
    assert (output[tokens:] == 0).all()
    assert_pools_equal(padded, exact)


def test_prefill_half_inputs() -> None:
    batch = BATCHES["several"]
    projected = make_projected(SMALL, sum(batch.lengths), torch.float16)
    weights, pools = make_weights(SMALL, torch.float16), make_pools(SMALL, 14, torch.float16)
    ours = pools.clone()
    expected = expected_prefill(SMALL, projected, weights, pools, batch)
    output = fused_prefill(SMALL, projected, weights, ours, batch)
    assert output.dtype == torch.float16
    assert relative_error(output, expected) < 5e-3
    assert_pools_match(ours, pools, 5e-3)


@pytest.mark.parametrize(("start", "cuts", "end"), [(0, (1, 126, 128), 134), (20, (64, 110), 120)])
def test_exports_equal_prefills_that_end_there_and_go_on_alike(
    start: int, cuts: tuple[int, ...], end: int
) -> None:
    """Where a chunk ends anyway no export has to cut it."""
    weights, projected = make_weights(FEW_HEADS), make_projected(FEW_HEADS, end - start)
    named = [cut for cut in (*cuts, end) if cut % CHUNK or not start]
    slots = {cut: 4 + index for index, cut in enumerate(named)}
    batch = Batch(
        starts=[start],
        lengths=[end - start],
        slot_in=[1],
        slot_out=[3],
        exports=[(0, cut, slot) for cut, slot in slots.items()],
    )
    whole, parts = make_pools(FEW_HEADS, 10), make_pools(FEW_HEADS, 10)
    expected = fused_prefill(FEW_HEADS, projected, weights, whole, batch)
    outputs, slot_in = [], 1
    for begin, stop in pairwise((start, *cuts, end)):
        part = Batch(starts=[begin], lengths=[stop - begin], slot_in=[slot_in], slot_out=[3])
        rows = projected[begin - start : stop - start]
        outputs.append(fused_prefill(FEW_HEADS, rows, weights, parts, part))
        slot_in = 3
        if stop in slots:
            assert torch.equal(parts.recurrent[3], whole.recurrent[slots[stop]])
            assert torch.equal(parts.conv[3], whole.conv[slots[stop]])
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(parts.recurrent[3], whole.recurrent[3])
    assert torch.equal(parts.conv[3], whole.conv[3])


def test_nan_in_one_sequence_stays_there() -> None:
    projected, weights, pools = (
        make_projected(FEW_HEADS, 80),
        make_weights(FEW_HEADS),
        make_pools(FEW_HEADS, 5),
    )
    projected[40:] = torch.nan
    batch = Batch(starts=[0, 0], lengths=[40, 40], slot_in=[0, 0], slot_out=[3, 4])
    output = fused_prefill(FEW_HEADS, projected, weights, pools, batch)
    assert output[:40].isfinite().all()
    assert output[40:].isnan().all()
    assert pools.recurrent[3].isfinite().all()
