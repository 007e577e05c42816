"""The fused KDA kernels, interpreted, against the reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from milepost.kernels.device import probe
from tests.batches import spread
from tests.kernels.kimi import ODD, SMALL, Shapes, make_weights, run
from tests.kernels.mixers import (
    Batch,
    Pools,
    assert_pools_equal,
    assert_pools_match,
    make_pools,
    make_projected,
)
from tests.numbers import relative_error

TOLERANCE = 1e-4 / 20
CHIP = probe(torch.device("cpu"))
FEW = Shapes(heads=1, head_dim=4, taps=3)
"""Where bits are compared with bits and the interpreter takes its time."""
SEVERAL = Batch(
    starts=[100, 5, 64, 63],
    lengths=[40, 1, 67, 2],
    slot_in=[1, 1, 2, 0],
    slot_out=[3, 4, 2, 5],
    exports=[(2, 128, 7), (0, 101, 8), (0, 129, 9), (2, 66, 10), (0, 140, 11), (3, 64, 12)],
)


TWO = Batch(starts=[50, 0], lengths=[20, 3], slot_in=[1, 0], slot_out=[1, 3], exports=[(0, 59, 4)])


def fused(shapes: Shapes, projected, weights, pools: Pools, batch: Batch, **capacities: int):
    return run(shapes, projected, weights, pools, batch, chip=CHIP, **capacities)


@pytest.mark.parametrize("shapes", [ODD, SMALL], ids=["odd", "small"])
def test_decode_matches_reference(shapes: Shapes) -> None:
    # Slot 0 and slot 1 are read by several, slot 2 is moved on in place; two rows are padding.
    batch = Batch(starts=(), lengths=(), slot_in=(0, 1, 2, 1), slot_out=(4, 5, 2, 6))
    projected, weights = make_projected(shapes, 6), make_weights(shapes)
    pools, ours = make_pools(shapes, 8), make_pools(shapes, 8)
    expected = run(shapes, projected[:4], weights, pools, batch)
    output = fused(shapes, projected, weights, ours, batch, num_sequences=6, num_tokens=6)
    assert relative_error(output[:4], expected) < TOLERANCE
    assert (output[4:] == 0).all()
    assert_pools_match(ours, pools, TOLERANCE)


@pytest.mark.parametrize(
    ("shapes", "batch"), [(ODD, TWO), (SMALL, TWO), (FEW, SEVERAL)], ids=["odd", "small", "several"]
)
def test_prefill_matches_reference(shapes: Shapes, batch: Batch) -> None:
    projected, weights = make_projected(shapes, sum(batch.lengths)), make_weights(shapes)
    pools, ours = make_pools(shapes, 14), make_pools(shapes, 14)
    expected = run(shapes, projected, weights, pools, batch)
    output = fused(shapes, projected, weights, ours, batch)
    assert relative_error(output, expected) < TOLERANCE
    assert_pools_match(ours, pools, TOLERANCE)


@pytest.mark.parametrize(
    ("batch", "dtype", "tolerance"),
    [
        (TWO, torch.float16, 5e-3),
        (Batch(starts=(), lengths=(), slot_in=(1, 2), slot_out=(3, 2)), torch.bfloat16, 1e-2),
    ],
    ids=["prefill", "decode"],
)
def test_half_inputs(batch: Batch, dtype: torch.dtype, tolerance: float) -> None:
    # The interpreter has no products of bfloat16.
    projected = make_projected(FEW, sum(batch.lengths) or 2, dtype)
    weights, pools = make_weights(FEW, dtype), make_pools(FEW, 14, dtype)
    ours = pools.clone()
    expected = run(FEW, projected, weights, pools, batch)
    output = fused(FEW, projected, weights, ours, batch)
    assert output.dtype == dtype
    assert relative_error(output, expected) < tolerance
    assert_pools_match(ours, pools, tolerance)


def test_slots_may_lie_far_apart() -> None:
    """The last ones where 32 bits do not count the elements."""
    weights, projected = make_weights(FEW), make_projected(FEW, 20)
    pools = make_pools(FEW, 6)
    for pool in (pools.conv, pools.recurrent):
        pool[5] = pool[1]
    far = Pools(conv=spread(pools.conv), recurrent=spread(pools.recurrent))
    batch = Batch(starts=[60], lengths=[20], slot_in=[5], slot_out=[5], exports=[(0, 64, 4)])
    expected = fused(FEW, projected, weights, pools, batch)
    assert torch.equal(fused(FEW, projected, weights, far, batch), expected)
    decodes = Batch(starts=[], lengths=[], slot_in=[4, 5], slot_out=[3, 5])
    expected = fused(FEW, projected[:2], weights, pools, decodes)
    assert torch.equal(fused(FEW, projected[:2], weights, far, decodes), expected)
    assert_pools_equal(far, pools)


def test_prefill_padding_changes_nothing() -> None:
    batch, weights, tokens = TWO, make_weights(FEW), sum(TWO.lengths)
    projected = make_projected(FEW, 60)
    projected[tokens:] = torch.nan
    exact, padded = make_pools(FEW, 6), make_pools(FEW, 6)
    expected = fused(FEW, projected[:tokens], weights, exact, batch)
    capacities = {"num_tokens": 60, "num_sequences": 3, "num_exports": 2}
    output = fused(FEW, projected, weights, padded, batch, **capacities)
    assert torch.equal(output[:tokens], expected)
    assert (output[tokens:] == 0).all()
    assert_pools_equal(padded, exact)


def test_exports_equal_prefills_that_end_there_and_go_on_alike() -> None:
    start, end, weights = 40, 140, make_weights(FEW)
    projected = make_projected(FEW, end - start)
    exports = [(0, position, 4 + index) for index, position in enumerate((64, 77, 128))]
    batch = Batch(starts=[start], lengths=[end - start], slot_in=[1], slot_out=[3], exports=exports)
    whole, parts = make_pools(FEW, 9), make_pools(FEW, 9)
    expected = fused(FEW, projected, weights, whole, batch)
    outputs, slot_in = [], 1
    for begin, stop in pairwise((start, 64, 77, 128, end)):
        part = Batch(starts=[begin], lengths=[stop - begin], slot_in=[slot_in], slot_out=[3])
        outputs.append(fused(FEW, projected[begin - start : stop - start], weights, parts, part))
        slot_in = 3
        slot = next((slot for _, position, slot in exports if position == stop), 3)
        assert torch.equal(parts.recurrent[3], whole.recurrent[slot])
        assert torch.equal(parts.conv[3], whole.conv[slot])
    assert torch.equal(torch.cat(outputs), expected)


def test_nan_in_one_sequence_stays_there() -> None:
    projected, weights, pools = make_projected(FEW, 40), make_weights(FEW), make_pools(FEW, 5)
    projected[20:] = torch.nan
    batch = Batch(starts=[0, 0], lengths=[20, 20], slot_in=[0, 0], slot_out=[3, 4])
    output = fused(FEW, projected, weights, pools, batch)
    assert output[:20].isfinite().all()
    assert output[20:].isnan().all()
    assert pools.recurrent[3].isfinite().all()
    assert pools.recurrent[4].isnan().all()
