"""The fused Gated DeltaNet kernels on a GPU at real shapes, against the references."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from milepost.kernels.platform.device import probe, why_no_gluon
from milepost.kernels.recurrent import LayerStates
from tests.kernels.mixers import (
    LONG_BATCHES,
    ODD,
    OLMO,
    REAL,
    SPACING,
    Batch,
    Shapes,
    assert_pools_equal,
    assert_pools_match,
    captured_prefill,
    expected_decode,
    expected_prefill,
    fused_decode,
    fused_prefill,
    make_pools,
    make_projected,
    make_weights,
)
from tests.numbers import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {"real": REAL, "odd": ODD, "olmo": OLMO, "beyond-1": replace(REAL, max_beta=2.0)}
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("spacing", [0, SPACING])
def test_decode_matches_reference(shapes: Shapes, dtype: torch.dtype, spacing: int) -> None:
    slot_in, slot_out = [0, 1, 1, *range(10, 39)], [3, 4, 5, *range(10, 39)]
    batch = Batch(starts=[], lengths=[], slot_in=slot_in, slot_out=slot_out)
    padded = Batch(starts=[], lengths=[], slot_in=[*slot_in, 1], slot_out=[*slot_out, -1])
    projected = make_projected(shapes, 33, dtype, "cuda")
    weights, pools = make_weights(shapes, dtype, "cuda"), make_pools(shapes, 40, dtype, "cuda")
    for slot in range(10, 39):
        pools.conv[slot], pools.recurrent[slot] = pools.conv[2], pools.recurrent[2]
    ours = pools.clone(spacing)
    expected = expected_decode(shapes, projected[:32], weights, pools, batch)
    output = fused_decode(shapes, projected, weights, ours, padded)
    assert relative_error(output[:32], expected) < TOLERANCES[dtype]
    assert (output[32] == 0).all()
    assert torch.equal(ours.conv.nan_to_num(9), pools.conv.nan_to_num(9))
    assert_pools_match(ours, pools, 1e-5)


def _decode_on_hopper(projected, weights, states: LayerStates, arrivals) -> torch.Tensor:
    from milepost.kernels.recurrent import fused
    from milepost.kernels.recurrent.hopper import delta_decode

    operation = REAL.operation
    mixer = fused.describe(projected, weights, operation.sizes, operation.order)
    output = projected.new_empty(len(projected), REAL.values)
    delta_decode.run(mixer, states.decodes(), output, arrivals)
    return output


@pytest.mark.parametrize("num_real", [1, 3])
def test_value_heads_in_programs_of_their_own_leave_the_same_bits(num_real: int) -> None:
    """Few sequences, in place, token after token; the last one is padding."""
    slots = list(range(1, num_real + 1))
    batch = Batch(starts=[], lengths=[], slot_in=[*slots, 0], slot_out=[*slots, -1])
    weights = make_weights(REAL, torch.bfloat16, "cuda")
    pools = make_pools(REAL, 4, torch.bfloat16, "cuda")
    pools.conv[3], pools.recurrent[3] = pools.conv[1], pools.recurrent[1]
    others = pools.clone()
    arrivals = torch.zeros(num_real + 1, REAL.key_heads, dtype=torch.int32, device="cuda")
    for seed in range(30):
        projected = make_projected(REAL, num_real + 1, torch.bfloat16, "cuda", seed=seed)
        of_slots = batch.slots(projected.device)
        own, common = (
            _decode_on_hopper(projected, weights, each.states(of_slots), places)
            for each, places in ((others, arrivals), (pools, None))
        )
        assert torch.equal(own, common)
        assert_pools_equal(others, pools)
        assert not arrivals.any()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", LONG_BATCHES)
@pytest.mark.parametrize("spacing", [0, SPACING])
def test_prefill_matches_reference(
    name: str, shapes: Shapes, dtype: torch.dtype, spacing: int
) -> None:
    batch = LONG_BATCHES[name]
    projected = make_projected(shapes, sum(batch.lengths), dtype, "cuda")
    weights, pools = make_weights(shapes, dtype, "cuda"), make_pools(shapes, 14, dtype, "cuda")
    ours = pools.clone(spacing)
    expected = expected_prefill(shapes, projected, weights, pools, batch)
    output = fused_prefill(shapes, projected, weights, ours, batch)
    assert relative_error(output, expected) < TOLERANCES[dtype]
    assert torch.equal(ours.conv.nan_to_num(9), pools.conv.nan_to_num(9))
    assert_pools_match(ours, pools, TOLERANCES[dtype])


def test_export_equals_prefill_that_ends_there() -> None:
    start, end, dtype = 100, 1500, torch.bfloat16
    projected = make_projected(REAL, end - start, dtype, "cuda")
    weights = make_weights(REAL, dtype, "cuda")
    positions = (150, 192, 1024, 1497, end)
    exports = [(0, position, 4 + index) for index, position in enumerate(positions)]
    batch = Batch(starts=[start], lengths=[end - start], slot_in=[1], slot_out=[3], exports=exports)
    pools = make_pools(REAL, 10, dtype, "cuda")
    fused_prefill(REAL, projected, weights, pools, batch)
    for index, position in enumerate(positions):
        length = position - start
        alone = Batch(
            starts=[start], lengths=[length], slot_in=[1], slot_out=[3], exports=exports[:index]
        )
        shorter = make_pools(REAL, 10, dtype, "cuda")
        fused_prefill(REAL, projected[:length], weights, shorter, alone)
        assert torch.equal(pools.recurrent[4 + index], shorter.recurrent[3])
        assert torch.equal(pools.conv[4 + index], shorter.conv[3])


def test_prefill_in_parts_beside_others_gives_the_same_bits() -> None:
    dtype, length = torch.bfloat16, 1000
    projected = make_projected(REAL, length, dtype, "cuda")
    others = make_projected(REAL, 40, dtype, "cuda", seed=5)
    weights = make_weights(REAL, dtype, "cuda")
    whole, parts = make_pools(REAL, 6, dtype, "cuda"), make_pools(REAL, 6, dtype, "cuda")
    batch = Batch(starts=[20], lengths=[length], slot_in=[1], slot_out=[3])
    expected = fused_prefill(REAL, projected, weights, whole, batch)
    outputs, slot_in, edges = [], 1, (20, 64, 512, 960, 1020)
    for begin, end in pairwise(edges):
        part = Batch(
            starts=[0, begin], lengths=[40, end - begin], slot_in=[2, slot_in], slot_out=[4, 3]
        )
        rows = torch.cat((others, projected[begin - 20 : end - 20]))
        outputs.append(fused_prefill(REAL, rows, weights, parts, part)[40:])
        slot_in = 3
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(parts.recurrent[3], whole.recurrent[3])
    assert torch.equal(parts.conv[3], whole.conv[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shapes", [REAL, replace(REAL, key_heads=8, value_heads=16)])
@pytest.mark.parametrize("name", LONG_BATCHES)
def test_on_hopper_long_prefills_have_the_same_bits(
    monkeypatch, name: str, shapes: Shapes, dtype: torch.dtype
) -> None:
    batch, outcomes = LONG_BATCHES[name], []
    projected = make_projected(shapes, sum(batch.lengths), dtype, "cuda")
    if why_no_gluon(probe(projected.device)):
        pytest.skip("needs the kernels for Hopper")
    from milepost.kernels.recurrent import table

    weights = make_weights(shapes, dtype, "cuda")
    for fewest in (1 << 20, 0):
        monkeypatch.setattr(table, "HOST_BOUND_TOKENS", fewest)
        pools = make_pools(shapes, 14, dtype, "cuda")
        outcomes.append((fused_prefill(shapes, projected, weights, pools, batch), pools))
    (expected, theirs), (output, ours) = outcomes
    assert torch.equal(output, expected)
    assert_pools_equal(ours, theirs)


def test_captured_prefill_replays_other_batches() -> None:
    dtype = torch.bfloat16
    capacities = {"max_tokens": 384, "max_sequences": 8, "max_exports": 4}
    weights = make_weights(REAL, dtype, "cuda")
    pools = make_pools(REAL, 14, dtype, "cuda")
    replay = captured_prefill(REAL, weights, pools, capacities)
    for name in ("suffix", "mixed"):
        batch = LONG_BATCHES[name]
        tokens = sum(batch.lengths)
        projected = make_projected(REAL, 384, dtype, "cuda")
        fresh, expected_pools = (
            make_pools(REAL, 14, dtype, "cuda"),
            make_pools(REAL, 14, dtype, "cuda"),
        )
        expected = fused_prefill(REAL, projected[:tokens], weights, expected_pools, batch)
        pools.conv.copy_(fresh.conv)
        pools.recurrent.copy_(fresh.recurrent)
        output = replay(projected, batch)
        assert torch.equal(output[:tokens], expected)
        assert (output[tokens:] == 0).all()
        for ours, theirs in (
            (pools.conv, expected_pools.conv),
            (pools.recurrent, expected_pools.recurrent),
        ):
            assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9))
