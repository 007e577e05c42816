"""KDA's mixer: the chunked reference against the recurrence, token by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from milepost.kernels.layout.chunks import lay_out_chunks
from milepost.kernels.platform.device import probe
from milepost.kernels.recurrent.reference import delta as reference
from tests.kernels.kimi import (
    BOUNDED,
    HALF,
    ODD,
    REAL,
    SMALL,
    Shapes,
    make_weights,
    recur,
    run,
)
from tests.kernels.mixers import Batch, make_pools, make_projected
from tests.numbers import relative_error

SEVERAL = Batch(
    starts=[100, 5, 64, 0, 63],
    lengths=[40, 1, 130, 2, 3],
    slot_in=[1, 1, 2, 0, 0],
    slot_out=[3, 4, 2, 5, 6],
    exports=[(2, 128, 7), (0, 101, 8), (0, 129, 9), (2, 66, 10), (0, 140, 11), (3, 1, 12)],
)
DECODES = Batch(starts=(), lengths=(), slot_in=(0, 1, 2, 1), slot_out=(4, 5, 2, 6))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-13)], ids=str
)
@pytest.mark.parametrize("shapes", [ODD, SMALL, BOUNDED], ids=["odd", "small", "bounded"])
@pytest.mark.parametrize("batch", [SEVERAL, DECODES], ids=["prefill", "decode"])
def test_it_matches_the_recurrence(
    batch: Batch, shapes: Shapes, dtype: torch.dtype, tolerance: float
) -> None:
    """Every output, and every state that is written; no other slot is touched."""
    lengths = list(batch.lengths or [1] * len(batch.slot_out))
    projected, weights = make_projected(shapes, sum(lengths), dtype), make_weights(shapes, dtype)
    pools = make_pools(shapes, 14, dtype, state_dtype=dtype)
    before = pools.clone()
    output = run(shapes, projected, weights, pools, batch)
    assert output.dtype == dtype
    expected = []
    for number, rows in enumerate(projected.split(lengths)):
        first = [pool[batch.slot_in[number]] for pool in (before.conv, before.recurrent)]
        stops = {p - batch.starts[number]: slot for n, p, slot in batch.exports if n == number}
        for stop, slot in (*stops.items(), (len(rows), batch.slot_out[number])):
            y, conv_state, state = recur(shapes, rows[:stop], weights, *first)
            assert relative_error(pools.conv[slot], conv_state) < 1e-7
            assert relative_error(pools.recurrent[slot], state) < tolerance
        expected.append(y)
    assert relative_error(output, torch.cat(expected)) < tolerance
    written = {*batch.slot_out, *(slot for *_, slot in batch.exports)}
    kept = [slot for slot in range(14) if slot not in written]
    for ours, theirs in ((pools.conv, before.conv), (pools.recurrent, before.recurrent)):
        assert torch.equal(ours[kept].nan_to_num(9), theirs[kept].nan_to_num(9))


def test_exports_equal_prefills_that_end_there_and_go_on_alike() -> None:
    """The recurrence alone: elementwise functions before it may round otherwise in the last few of
    many numbers."""
    random = torch.Generator().manual_seed(0)
    shapes = (2, 2, 16), (2, 16), (2, 16), (2,)
    tokens = [torch.randn(130, *shape, generator=random) for shape in shapes]
    tokens[2:] = -tokens[2].exp(), tokens[3].sigmoid()

    def scan(pool: torch.Tensor, begin: int, end: int, slot_in: int, *exports: tuple):
        layout = lay_out_chunks([begin], [end - begin], exports, chunk=64)
        slots = torch.tensor([slot_in]), torch.tensor([3])
        own = (each[begin - 10 : end - 10] for each in tokens)
        return reference.prefill(*own, pool, *slots, layout)

    whole, parts = (make_pools(SMALL, 8).recurrent for _ in range(2))
    exports = [(0, position, 4 + index) for index, position in enumerate((64, 71, 128))]
    expected = scan(whole, 10, 140, 1, *exports)
    outputs, slot_in = [], 1
    for begin, end in pairwise((10, 64, 71, 128, 140)):
        outputs.append(scan(parts, begin, end, slot_in))
        slot_in = 3
        slot = next((slot for _, position, slot in exports if position == end), 3)
        assert torch.equal(parts[3], whole[slot])
    assert torch.equal(torch.cat(outputs), expected)


@pytest.mark.parametrize(("shapes", "reason"), [(REAL, ""), (HALF, ""), (ODD, "multiples of 64")])
def test_heads_of_other_widths_are_left_to_the_reference(shapes: Shapes, reason: str) -> None:
    found = shapes.operation.why_reference(probe(torch.device("cpu")))
    assert reason in found
    assert bool(reason) == bool(found)
