"""The fused KDA kernels on a GPU at real shapes, against the reference."""

from __future__ import annotations

import pytest
import torch

from milepost.kernels.device import probe
from tests.kernels.kimi import ODD, REAL, Shapes, make_weights, run
from tests.kernels.mixers import LONG_BATCHES, Batch, make_pools, make_projected
from tests.numbers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
SHAPES = {"real": REAL, "odd": ODD}


def fused(shapes: Shapes, projected, weights, pools, batch: Batch, **capacities: int):
    chip = probe(torch.device("cuda", 0))
    return run(shapes, projected, weights, pools, batch, chip=chip, **capacities)


def check_states(ours, theirs, tolerance: float) -> None:
    assert torch.equal(ours.conv.nan_to_num(9), theirs.conv.nan_to_num(9))
    error = relative_error(ours.recurrent.nan_to_num(9), theirs.recurrent.nan_to_num(9))
    assert error < tolerance


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_decode_matches_reference(name: str, dtype: torch.dtype) -> None:
    shapes = SHAPES[name]
    slot_in, slot_out = [0, 1, 1, *range(10, 39)], [3, 4, 5, *range(10, 39)]
    batch = Batch(starts=[], lengths=[], slot_in=slot_in, slot_out=slot_out)
    projected = make_projected(shapes, 33, dtype, "cuda")
    weights, pools = make_weights(shapes, dtype, "cuda"), make_pools(shapes, 40, dtype, "cuda")
    for slot in range(10, 39):
        pools.conv[slot], pools.recurrent[slot] = pools.conv[2], pools.recurrent[2]
    ours = pools.clone()
    expected = run(shapes, projected[:32], weights, pools, batch)
    output = fused(shapes, projected, weights, ours, batch, num_sequences=33, num_tokens=33)
    assert relative_error(output[:32], expected) < TOLERANCES[dtype]
    assert (output[32] == 0).all()
    check_states(ours, pools, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("batch", LONG_BATCHES)
def test_prefill_matches_reference(batch: str, name: str, dtype: torch.dtype) -> None:
    shapes = SHAPES[name]
    projected = make_projected(shapes, sum(LONG_BATCHES[batch].lengths), dtype, "cuda")
    weights, pools = make_weights(shapes, dtype, "cuda"), make_pools(shapes, 14, dtype, "cuda")
    ours = pools.clone()
    expected = run(shapes, projected, weights, pools, LONG_BATCHES[batch])
    output = fused(shapes, projected, weights, ours, LONG_BATCHES[batch])
    assert relative_error(output, expected) < TOLERANCES[dtype]
    check_states(ours, pools, TOLERANCES[dtype])


def test_exports_equal_prefills_that_end_there() -> None:
    dtype = torch.bfloat16
    projected, weights = make_projected(REAL, 900, dtype, "cuda"), make_weights(REAL, dtype, "cuda")
    exports = [(0, 512, 4), (0, 700, 5), (0, 1000, 6)]
    batch = Batch(starts=[100], lengths=[900], slot_in=[1], slot_out=[3], exports=exports)
    whole, parts = (make_pools(REAL, 8, dtype, "cuda") for _ in range(2))
    expected = fused(REAL, projected, weights, whole, batch)
    outputs, begin, slot_in = [], 100, 1
    for _, position, slot in exports:
        part = Batch(starts=[begin], lengths=[position - begin], slot_in=[slot_in], slot_out=[3])
        rows = projected[begin - 100 : position - 100]
        outputs.append(fused(REAL, rows, weights, parts, part))
        assert torch.equal(parts.recurrent[3], whole.recurrent[slot])
        assert torch.equal(parts.conv[3], whole.conv[slot])
        begin, slot_in = position, 3
    assert torch.equal(torch.cat(outputs), expected)
