"""Steps that verify, by the references: however an answer's tokens fall into steps and drafts,
states and outputs are those of one token at a time, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

from milepost.kernels.attention import PagedKV, rows_per_page
from milepost.kernels.attention import reference as attention
from milepost.kernels.attention.pages import lay_out
from milepost.kernels.platform.tables import SumOrder
from tests.batches import Part, build_batch, build_pages
from tests.kernels import kimi, ssd
from tests.kernels.mixers import MixerShapes, Shapes, make_projected
from tests.kernels.verifying import Kind, Mixer, Plain, is_equal, play
from tests.numbers import relative_error

SHAPES: Mapping[str, MixerShapes] = {
    "gated_delta": Shapes(key_heads=2, value_heads=4, key_dim=16, value_dim=8),
    "kda": kimi.Shapes(heads=3, head_dim=16, taps=3),
    "mamba2": ssd.Shapes(heads=6, head_dim=8, groups=2, state_size=16),
}


@pytest.fixture(params=SHAPES)
def shapes(request: pytest.FixtureRequest) -> MixerShapes:
    return SHAPES[request.param]


@cache
def run_plain(shapes: MixerShapes, dtype: torch.dtype) -> Plain:
    return Plain(Kind(shapes=shapes, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_any_split_gives_the_states_of_one_token_at_a_time(
    shapes: MixerShapes, dtype: torch.dtype, seed: int
) -> None:
    play(run_plain(shapes, dtype), random.Random(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequence_by_sequence_any_split_gives_the_same_states(
    shapes: MixerShapes, dtype: torch.dtype
) -> None:
    """In a FIXED order, as pieces of a step, each of which has one sequence."""
    play(Plain(Kind(shapes=shapes, dtype=dtype, order=SumOrder.FIXED)), random.Random(0))


def test_a_prefill_beside_verifying_sequences_is_what_it_is_alone(shapes: MixerShapes) -> None:
    kind = Kind(shapes=shapes, dtype=torch.float32)
    plain, beside, alone = run_plain(shapes, torch.float32), Mixer(kind), Mixer(kind)
    prompt = make_projected(shapes, 70, seed=5)
    output = beside.step({0: (0, plain.tokens[0][:3]), 1: (0, plain.tokens[1][:1])}, prompt)
    expected = alone.step({}, prompt)
    assert torch.equal(output[4:], expected)
    assert is_equal(beside.state(3), alone.state(3))
    assert torch.equal(output[0], plain.outputs[0][0])
    assert is_equal(beside.state(0), plain.states[0][1])


def test_drafts_leave_no_trace_but_their_records(shapes: MixerShapes) -> None:
    mixer, plain = Mixer(Kind(shapes=shapes, dtype=torch.float32)), run_plain(shapes, torch.float32)
    tokens = plain.tokens[1]
    mixer.step({1: (0, tokens[:3])})
    assert mixer.records[[0, 2]].isnan().all()
    assert torch.equal(mixer.records[1, :2], tokens[1:3, list(shapes.recorded)])
    assert mixer.records[1, 2:].isnan().all()
    assert is_equal(mixer.state(1), plain.states[1][1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_drafts_attend_as_the_tokens_that_they_are_would(dtype: torch.dtype) -> None:
    heads, kv_heads, size, page_size = 6, 3, 16, 16
    random = torch.Generator().manual_seed(0)
    starts, lengths, pages = [15, 40, 3], [4, 1, 3], [[2, 5], [1, 7, 3], [4]]
    pool = build_pages(9, page_size, kv_heads, size, dtype)
    pool.copy_(torch.randn(pool.shape, generator=random))
    query, key, value = (
        torch.randn(sum(lengths), each, size, generator=random).to(dtype)
        for each in (heads, kv_heads, kv_heads)
    )

    def attend(lengths: list[int], chosen: list[int]) -> Tensor:
        parts = [
            Part(pages=pages[s], start=starts[s], length=n, slot_in=1, slot_out=1)
            for s, n in enumerate(lengths)
        ]
        rows = lay_out(build_batch(parts, page_size, rows_per_page(pool), len(parts)))
        kv = PagedKV(pool)
        attention.store(kv, key[chosen], value[chosen], rows.tokens, rows.kv_rows)
        return attention.decode(query[chosen], kv, *rows.decodes, size**-0.5)

    together, begins = attend(lengths, list(range(sum(lengths)))), [0, 4, 5]
    for place in range(max(lengths)):
        now = [s for s, n in enumerate(lengths) if place < n]
        one = attend([int(s in now) for s in range(3)], [begins[s] + place for s in now])
        theirs = together[[begins[s] + place for s in now]]
        assert relative_error(one, theirs) < (1e-14 if dtype == torch.float64 else 2e-6)
        starts = [start + (s in now) for s, start in enumerate(starts)]


@pytest.mark.parametrize("order", [SumOrder.FREE, SumOrder.FIXED])
def test_sequences_that_only_fold_attend_to_nothing(order: SumOrder) -> None:
    pool = build_pages(4, 16, 3, 16, torch.float32)
    parts = [Part(pages=[p], start=5, length=0, slot_in=1, slot_out=1) for p in (1, 2)]
    batch = build_batch(parts, 16, rows_per_page(pool), len(parts))
    rows = lay_out(batch, order=order)
    query = torch.empty(0, 6, 16)
    assert attention.attend(query, None, PagedKV(pool), rows, 1.0).shape == (0, 96)
