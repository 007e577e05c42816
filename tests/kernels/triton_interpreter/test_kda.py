"""The fused KDA kernels, interpreted, against the reference."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.platform.device import probe
from tests.kernels.kimi import BOUNDED, ODD, SMALL, Shapes, make_weights, run
from tests.kernels.mixers import (
    Batch,
    Pools,
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


@pytest.mark.parametrize("shapes", [ODD, SMALL, BOUNDED], ids=["odd", "small", "bounded"])
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
    ("shapes", "batch"),
    [(ODD, TWO), (BOUNDED, TWO), (FEW, SEVERAL)],
    ids=["odd", "bounded", "several"],
)
def test_prefill_matches_reference(shapes: Shapes, batch: Batch) -> None:
    projected, weights = make_projected(shapes, sum(batch.lengths)), make_weights(shapes)
    pools, ours = make_pools(shapes, 14), make_pools(shapes, 14)
    expected = run(shapes, projected, weights, pools, batch)
    output = fused(shapes, projected, weights, ours, batch)
    assert relative_error(output, expected) < TOLERANCE
    assert_pools_match(ours, pools, TOLERANCE)
