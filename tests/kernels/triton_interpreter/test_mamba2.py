"""The fused Mamba2 kernels, interpreted, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from milepost.kernels.platform.device import probe
from tests.kernels.mixers import (
    Batch,
    Pools,
    assert_pools_match,
    make_pools,
    make_projected,
)
from tests.kernels.ssd import (
    GROUPS,
    ONE_GROUP,
    Shapes,
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
    "norm_before_gate": {},
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
    shapes = replace(shapes, norm_before_gate=variant == "norm_before_gate")
    projected, weights = make_projected(shapes, 6), make_weights(shapes, **VARIANTS[variant])
    pools, ours = make_pools(shapes, 8), make_pools(shapes, 8)
    expected = run(shapes, projected[:4], weights, pools, batch)
    output = fused(shapes, projected, weights, ours, batch, num_sequences=6, num_tokens=6)
    assert relative_error(output[:4], expected) < TOLERANCE
    assert (output[4:] == 0).all()
    assert_pools_match(ours, pools, TOLERANCE)


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
    shapes = replace(shapes, norm_before_gate=variant == "norm_before_gate")
    batch, weights = BATCHES[name], make_weights(shapes, **VARIANTS[variant])
    projected = make_projected(shapes, sum(batch.lengths))
    pools, ours = make_pools(shapes, 14), make_pools(shapes, 14)
    expected = run(shapes, projected, weights, pools, batch)
    output = fused(shapes, projected, weights, ours, batch)
    assert relative_error(output, expected) < TOLERANCE
    assert_pools_match(ours, pools, TOLERANCE)
