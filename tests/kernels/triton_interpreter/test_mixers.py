"""What the fused kernels of every mixer with states in slots keep to, interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from milepost.kernels.platform.device import probe
from tests.batches import spread
from tests.kernels import kimi, ssd
from tests.kernels.mixers import (
    Batch,
    Pools,
    assert_pools_equal,
    assert_pools_match,
    make_pools,
    make_projected,
)
from tests.numbers import relative_error

CHIP = probe(torch.device("cpu"))
DECODES = Batch(starts=(), lengths=(), slot_in=(1, 2), slot_out=(3, 2))


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """Of few numbers: the interpreter takes its time."""

    shapes: Any
    make_weights: Callable[..., Any]
    reference: Callable[..., torch.Tensor]
    launch: Callable[..., torch.Tensor]
    batch: Batch
    """Two sequences and an export, 23 tokens."""
    edges: tuple[int, ...]
    """Where a prefill begins, keeps states on its chunks' grid and off it, and ends."""

    def fused(self, projected, weights, pools: Pools, batch: Batch, **capacities: int):
        return self.reference(
            self.shapes, projected, weights, pools, batch, chip=CHIP, **capacities
        )


KDA = Mixer(
    shapes=kimi.Shapes(heads=1, head_dim=4, taps=3),
    make_weights=kimi.make_weights,
    reference=kimi.run,
    launch=kimi.launch,
    batch=Batch(
        starts=[50, 0], lengths=[20, 3], slot_in=[1, 0], slot_out=[1, 3], exports=[(0, 59, 4)]
    ),
    edges=(40, 64, 77, 128, 140),
)
BOUNDED = replace(KDA, shapes=replace(KDA.shapes, least_decay=-5.0))
MAMBA2 = Mixer(
    shapes=ssd.Shapes(heads=2, head_dim=4, groups=2, state_size=6, taps=3),
    make_weights=ssd.make_weights,
    reference=ssd.run,
    launch=ssd.launch,
    batch=Batch(
        starts=[10, 0], lengths=[20, 3], slot_in=[1, 0], slot_out=[1, 3], exports=[(0, 19, 4)]
    ),
    edges=(10, 16, 29, 32, 64, 70),
)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What kernels hand on begins as NaN: what an earlier test left there may be right."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[KDA, BOUNDED, MAMBA2], ids=["kda", "kda with a bound", "mamba2"])
def mixer(request) -> Mixer:
    return request.param


@pytest.mark.parametrize(
    ("decodes", "dtype", "tolerance"),
    [(False, torch.float16, 5e-3), (True, torch.bfloat16, 1e-2)],
    ids=["prefill", "decode"],
)
def test_half_inputs(mixer: Mixer, decodes: bool, dtype: torch.dtype, tolerance: float) -> None:
    # The interpreter has no products of bfloat16.
    batch = DECODES if decodes else mixer.batch
    projected = make_projected(mixer.shapes, sum(batch.lengths) or 2, dtype)
    weights, pools = mixer.make_weights(mixer.shapes, dtype), make_pools(mixer.shapes, 14, dtype)
    ours = pools.clone()
    expected = mixer.reference(mixer.shapes, projected, weights, pools, batch)
    output = mixer.fused(projected, weights, ours, batch)
    assert output.dtype == dtype
    assert relative_error(output, expected) < tolerance
    assert_pools_match(ours, pools, tolerance)


def test_layers_share_what_counts_the_programs_that_have_arrived(mixer: Mixer) -> None:
    projected, weights = make_projected(mixer.shapes, 2), mixer.make_weights(mixer.shapes)
    layout, slots = ssd.lay_out(mixer.shapes, DECODES, projected.device, CHIP, {})
    outputs = []
    for _ in range(2):
        pools = make_pools(mixer.shapes, 4)
        outputs.append(mixer.launch(mixer.shapes, projected, weights, pools, layout, slots))
        assert pools.conv[3].isfinite().all()
    assert torch.equal(*outputs)


def test_slots_may_lie_far_apart(mixer: Mixer) -> None:
    """The last ones where 32 bits do not count the elements."""
    shapes, (start, edge, *_) = mixer.shapes, mixer.edges
    weights, projected = mixer.make_weights(shapes), make_projected(shapes, 30)
    pools = make_pools(shapes, 6)
    for pool in (pools.conv, pools.recurrent):
        pool[5] = pool[1]
    far = Pools(conv=spread(pools.conv), recurrent=spread(pools.recurrent))
    batch = Batch(starts=[start], lengths=[30], slot_in=[5], slot_out=[5], exports=[(0, edge, 4)])
    expected = mixer.fused(projected, weights, pools, batch)
    assert torch.equal(mixer.fused(projected, weights, far, batch), expected)
    decodes = Batch(starts=[], lengths=[], slot_in=[4, 5], slot_out=[3, 5])
    expected = mixer.fused(projected[:2], weights, pools, decodes)
    assert torch.equal(mixer.fused(projected[:2], weights, far, decodes), expected)
    assert_pools_equal(far, pools)


def test_prefill_padding_changes_nothing(mixer: Mixer) -> None:
    batch, weights = mixer.batch, mixer.make_weights(mixer.shapes)
    tokens = sum(batch.lengths)
    projected = make_projected(mixer.shapes, 60)
    projected[tokens:] = torch.nan
    exact, padded = make_pools(mixer.shapes, 6), make_pools(mixer.shapes, 6)
    expected = mixer.fused(projected[:tokens], weights, exact, batch)
    capacities = {"num_tokens": 60, "num_sequences": 3, "num_exports": 2}
    output = mixer.fused(projected, weights, padded, batch, **capacities)
    assert torch.equal(output[:tokens], expected)
    assert (output[tokens:] == 0).all()
    assert_pools_equal(padded, exact)


def test_exports_equal_prefills_that_end_there_and_go_on_alike(mixer: Mixer) -> None:
    start, *edges, end = mixer.edges
    weights, projected = mixer.make_weights(mixer.shapes), make_projected(mixer.shapes, end - start)
    exports = [(0, position, 4 + index) for index, position in enumerate(edges)]
    batch = Batch(starts=[start], lengths=[end - start], slot_in=[1], slot_out=[3], exports=exports)
    whole, parts = make_pools(mixer.shapes, 9), make_pools(mixer.shapes, 9)
    expected = mixer.fused(projected, weights, whole, batch)
    outputs, slot_in = [], 1
    for begin, stop in pairwise(mixer.edges):
        part = Batch(starts=[begin], lengths=[stop - begin], slot_in=[slot_in], slot_out=[3])
        outputs.append(mixer.fused(projected[begin - start : stop - start], weights, parts, part))
        slot_in = 3
        slot = next((slot for _, position, slot in exports if position == stop), 3)
        assert torch.equal(parts.recurrent[3], whole.recurrent[slot])
        assert torch.equal(parts.conv[3], whole.conv[slot])
    assert torch.equal(torch.cat(outputs), expected)


def test_nan_in_one_sequence_stays_there(mixer: Mixer) -> None:
    projected, weights = make_projected(mixer.shapes, 40), mixer.make_weights(mixer.shapes)
    pools = make_pools(mixer.shapes, 5)
    projected[20:] = torch.nan
    batch = Batch(starts=[0, 0], lengths=[20, 20], slot_in=[0, 0], slot_out=[3, 4])
    output = mixer.fused(projected, weights, pools, batch)
    assert output[:20].isfinite().all()
    assert output[20:].isnan().all()
    assert pools.recurrent[3].isfinite().all()
    assert pools.recurrent[4].isnan().all()
