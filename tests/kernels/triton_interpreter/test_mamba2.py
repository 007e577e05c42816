"""The fused Mamba2 kernels, interpreted, against the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from milepost.kernels.device import probe
from milepost.kernels.mamba2 import mix
from tests.batches import spread
from tests.kernels.mixers import (
    Batch,
    Pools,
    assert_pools_equal,
    assert_pools_match,
    make_pools,
    make_projected,
)
from tests.kernels.ssd import (
    GROUPS,
    ONE_GROUP,
    Shapes,
    lay_out,
    make_weights,
    run,
)
from tests.numbers import relative_error

TOLERANCE = 1e-4 / 20
CHIP = probe(torch.device("cpu"))
FEW = Shapes(heads=2, head_dim=4, groups=2, state_size=6, taps=3)
"""Where bits are compared with bits and the interpreter takes its time."""
VARIANTS = {
    "plain": {},
    "no_bias": {"conv_bias": None, "dt_limit": (0.2, 0.6)},
    "norm_before_gate": {"norm_before_gate": True},
    "no_norm": {"norm": None},
}


def fused(shapes: Shapes, projected, weights, pools: Pools, batch: Batch, **capacities: int):
    return run(shapes, projected, weights, pools, batch, chip=CHIP, **capacities)


@pytest.mark.parametrize(
    ("shapes", "variant"),
    [*((ONE_GROUP, variant) for variant in VARIANTS), (GROUPS, "plain")],
    ids=[*VARIANTS, "groups"],
)
def test_decode_matches_reference(shapes: Shapes, variant: str) -> None:
    # Slot 0 and slot 1 are read by several, slot 2 is moved on in place; two rows are padding.
    batch = Batch(starts=(), lengths=(), slot_in=(0, 1, 2, 1), slot_out=(4, 5, 2, 6))
    projected, weights = make_projected(shapes, 6), make_weights(shapes, **VARIANTS[variant])
    pools, ours = make_pools(shapes, 8), make_pools(shapes, 8)
    expected = run(shapes, projected[:4], weights, pools, batch)
    output = fused(shapes, projected, weights, ours, batch, num_sequences=6, num_tokens=6)
    assert relative_error(output[:4], expected) < TOLERANCE
    assert (output[4:] == 0).all()
    assert_pools_match(ours, pools, TOLERANCE)


def test_layers_share_what_counts_the_heads_that_have_arrived() -> None:
    batch = Batch(starts=(), lengths=(), slot_in=(1, 2), slot_out=(3, 2))
    projected, weights = make_projected(ONE_GROUP, 2), make_weights(ONE_GROUP)
    layout, slots = lay_out(ONE_GROUP, batch, projected.device, CHIP, {})
    outputs = []
    for _ in range(2):
        pools = make_pools(ONE_GROUP, 4)
        outputs.append(mix(projected, weights, pools.conv, pools.recurrent, *slots, layout))
        assert pools.conv[3].isfinite().all()
    assert torch.equal(*outputs)


BATCHES = {
    "fresh": Batch(starts=[0], lengths=[70], slot_in=[0], slot_out=[3]),
    "two": Batch(
        starts=[10, 0], lengths=[20, 3], slot_in=[1, 0], slot_out=[1, 3], exports=[(0, 19, 4)]
    ),
    "several": Batch(
        starts=[30, 5, 16, 0, 15],
        lengths=[40, 1, 70, 2, 3],
        slot_in=[1, 1, 2, 0, 0],
        slot_out=[3, 4, 2, 5, 6],
        exports=[(2, 64, 7), (0, 31, 8), (0, 48, 9), (2, 18, 10), (0, 70, 11), (3, 1, 12)],
    ),
}


@pytest.mark.parametrize(
    ("name", "shapes", "variant"),
    [
        ("fresh", replace(ONE_GROUP, chunk=128), "plain"),
        ("several", ONE_GROUP, "no_bias"),
        ("two", GROUPS, "plain"),
        ("several", FEW, "norm_before_gate"),
        ("several", FEW, "no_norm"),
    ],
    ids=["fresh", "one_group", "groups", "before_gate", "no_norm"],
)
def test_prefill_matches_reference(name: str, shapes: Shapes, variant: str) -> None:
    batch, weights = BATCHES[name], make_weights(shapes, **VARIANTS[variant])
    projected = make_projected(shapes, sum(batch.lengths))
    pools, ours = make_pools(shapes, 14), make_pools(shapes, 14)
    expected = run(shapes, projected, weights, pools, batch)
    output = fused(shapes, projected, weights, ours, batch)
    assert relative_error(output, expected) < TOLERANCE
    assert_pools_match(ours, pools, TOLERANCE)


@pytest.mark.parametrize(
    ("batch", "dtype", "tolerance"),
    [
        (BATCHES["several"], torch.float16, 5e-3),
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
    batch = Batch(starts=[10], lengths=[20], slot_in=[5], slot_out=[5], exports=[(0, 16, 4)])
    expected = fused(FEW, projected, weights, pools, batch)
    assert torch.equal(fused(FEW, projected, weights, far, batch), expected)
    decodes = Batch(starts=[], lengths=[], slot_in=[4, 5], slot_out=[3, 5])
    expected = fused(FEW, projected[:2], weights, pools, decodes)
    assert torch.equal(fused(FEW, projected[:2], weights, far, decodes), expected)
    assert_pools_equal(far, pools)


def test_prefill_padding_changes_nothing() -> None:
    batch, weights = BATCHES["two"], make_weights(FEW)
    tokens = sum(batch.lengths)
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
    start, end, weights = 10, 70, make_weights(FEW)
    projected = make_projected(FEW, end - start)
    exports = [(0, position, 4 + index) for index, position in enumerate((16, 29, 32, 64))]
    batch = Batch(starts=[start], lengths=[end - start], slot_in=[1], slot_out=[3], exports=exports)
    whole, parts = make_pools(FEW, 9), make_pools(FEW, 9)
    expected = fused(FEW, projected, weights, whole, batch)
    outputs, slot_in = [], 1
    for begin, stop in pairwise((start, 16, 29, 32, 64, end)):
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
