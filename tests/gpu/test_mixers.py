"""Fused mixers with states in slots, on a GPU at real shapes, beside the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from milepost.kernels.platform.device import probe, why_no_gluon
from tests.kernels import kimi, ssd
from tests.kernels.mixers import (
    LONG_BATCHES,
    Batch,
    assert_pools_equal,
    assert_pools_match,
    make_pools,
    make_projected,
)
from tests.numbers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True)
class Mixer:
    shapes: Any
    make_weights: Callable[..., Any]
    run: Callable[..., torch.Tensor]
    dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCES)
    """That the fused kernels are known to compile for: states of 256 in float32 are none."""

    def fused(self, projected, weights, pools, batch: Batch, **capacities: int):
        chip = probe(torch.device("cuda", 0))
        return self.run(self.shapes, projected, weights, pools, batch, chip=chip, **capacities)


def mamba2(shapes: ssd.Shapes) -> Mixer:
    return Mixer(shapes=shapes, make_weights=ssd.make_weights, run=ssd.run)


def kda(shapes: kimi.Shapes) -> Mixer:
    return Mixer(shapes=shapes, make_weights=kimi.make_weights, run=kimi.run)


MIXERS = {
    "nemotron": mamba2(ssd.NEMOTRON),
    "bamba": mamba2(ssd.BAMBA),
    "falcon": replace(mamba2(replace(ssd.BAMBA, state_size=256)), dtypes=(torch.bfloat16,)),
    "mamba2-odd": mamba2(replace(ssd.ONE_GROUP, chunk=64)),
    "kimi": kda(kimi.REAL),
    "kda-64": kda(kimi.HALF),
    "kda with a bound": kda(replace(kimi.REAL, least_decay=-5.0)),
}


CASES = [(name, dtype) for name, mixer in MIXERS.items() for dtype in mixer.dtypes]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_decode_matches_reference(name: str, dtype: torch.dtype) -> None:
    mixer = MIXERS[name]
    shapes, weights = mixer.shapes, mixer.make_weights(mixer.shapes, dtype, "cuda")
    slot_in, slot_out = [0, 1, 1, *range(10, 39)], [3, 4, 5, *range(10, 39)]
    batch = Batch(starts=[], lengths=[], slot_in=slot_in, slot_out=slot_out)
    projected, pools = (
        make_projected(shapes, 33, dtype, "cuda"),
        make_pools(shapes, 40, dtype, "cuda"),
    )
    for slot in range(10, 39):
        pools.conv[slot], pools.recurrent[slot] = pools.conv[2], pools.recurrent[2]
    before, ours = pools.clone(), pools.clone()
    expected = mixer.run(shapes, projected[:32], weights, pools, batch)
    padded = {"num_sequences": 33, "num_tokens": 33}
    output = mixer.fused(projected, weights, ours, batch, **padded)
    assert relative_error(output[:32], expected) < TOLERANCES[dtype]
    assert (output[32] == 0).all()
    assert torch.equal(ours.conv.nan_to_num(9), pools.conv.nan_to_num(9))
    assert_pools_match(ours, pools, TOLERANCES[dtype])
    # Whichever program of a head or group comes last, the bits are the same.
    for _ in range(100):
        again = before.clone()
        assert torch.equal(mixer.fused(projected, weights, again, batch, **padded), output)
        assert torch.equal(again.conv.nan_to_num(9), ours.conv.nan_to_num(9))


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("batch", LONG_BATCHES)
def test_prefill_matches_reference(batch: str, name: str, dtype: torch.dtype) -> None:
    mixer, shapes = MIXERS[name], MIXERS[name].shapes
    projected = make_projected(shapes, sum(LONG_BATCHES[batch].lengths), dtype, "cuda")
    weights, pools = (
        mixer.make_weights(shapes, dtype, "cuda"),
        make_pools(shapes, 14, dtype, "cuda"),
    )
    ours = pools.clone()
    expected = mixer.run(shapes, projected, weights, pools, LONG_BATCHES[batch])
    output = mixer.fused(projected, weights, ours, LONG_BATCHES[batch])
    assert relative_error(output, expected) < TOLERANCES[dtype]
    assert torch.equal(ours.conv.nan_to_num(9), pools.conv.nan_to_num(9))
    assert_pools_match(ours, pools, TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["nemotron", "bamba", "kimi"])
def test_exports_equal_prefills_that_end_there(name: str) -> None:
    mixer, shapes, dtype = MIXERS[name], MIXERS[name].shapes, torch.bfloat16
    projected = make_projected(shapes, 900, dtype, "cuda")
    weights = mixer.make_weights(shapes, dtype, "cuda")
    exports = [(0, 512, 4), (0, 700, 5), (0, 1000, 6)]
    batch = Batch(starts=[100], lengths=[900], slot_in=[1], slot_out=[3], exports=exports)
    whole, parts = (make_pools(shapes, 8, dtype, "cuda") for _ in range(2))
    expected = mixer.fused(projected, weights, whole, batch)
    outputs, begin, slot_in = [], 100, 1
    for _, position, slot in exports:
        part = Batch(starts=[begin], lengths=[position - begin], slot_in=[slot_in], slot_out=[3])
        outputs.append(mixer.fused(projected[begin - 100 : position - 100], weights, parts, part))
        assert torch.equal(parts.recurrent[3], whole.recurrent[slot])
        assert torch.equal(parts.conv[3], whole.conv[slot])
        begin, slot_in = position, 3
    assert torch.equal(torch.cat(outputs), expected)


@pytest.mark.parametrize("batch", LONG_BATCHES)
def test_on_hopper_long_prefills_of_kda_have_the_same_bits(monkeypatch, batch: str) -> None:
    mixer, rows, outcomes = MIXERS["kimi"], LONG_BATCHES[batch], []
    shapes, dtype = mixer.shapes, torch.bfloat16
    projected = make_projected(shapes, sum(rows.lengths), dtype, "cuda")
    if why_no_gluon(probe(projected.device)):
        pytest.skip("needs the kernels for Hopper")
    from milepost.kernels.recurrent import table

    weights = mixer.make_weights(shapes, dtype, "cuda")
    for fewest in (1 << 20, 0):
        monkeypatch.setattr(table, "HOST_BOUND_TOKENS", fewest)
        pools = make_pools(shapes, 14, dtype, "cuda")
        outcomes.append((mixer.fused(projected, weights, pools, rows), pools))
    (expected, theirs), (output, ours) = outcomes
    assert torch.equal(output, expected)
    assert_pools_equal(ours, theirs)
