"""Gated short convolution against a sum written out, and the states it leaves beside pages."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from milepost.kernels import short_conv
from milepost.kernels.short_conv import ShortConvOperation
from tests.batches import Part, build_batch
from tests.kernels.short_conv_cases import play
from tests.numbers import relative_error

CHANNELS, PAGE_SIZE = 6, 4


def make_pool(num_taps: int) -> Tensor:
    """Row 0 zeros, the others NaN until they are written."""
    pool = torch.full((9, CHANNELS, num_taps - 1), torch.nan, dtype=torch.float64)
    pool[0] = 0
    return pool


def make_inputs(count: int, num_taps: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(count)
    shapes = (count, 3 * CHANNELS), (CHANNELS, num_taps), (CHANNELS,)
    draws = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    return draws[0], draws[1], draws[2]


def convolve(projected: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs [T, C] of a fresh sequence, and what the convolution reads, behind its zeros."""
    before, behind, x = projected.chunk(3, -1)
    num_taps = weight.shape[1]
    history = torch.cat((torch.zeros(num_taps - 1, CHANNELS), before * x))
    sums = [(history[t : t + num_taps] * weight.T).sum(0) for t in range(len(projected))]
    return behind * (torch.stack(sums) + (0 if bias is None else bias)), history


def step(
    parts: list[Part], inputs: list[Tensor], weights: tuple[Tensor, Tensor | None], pool: Tensor
) -> Tensor:
    weight, bias = weights
    num_decodes = sum(part.length == 1 for part in parts)
    batch = build_batch(parts, PAGE_SIZE, 2 * PAGE_SIZE, num_decodes)
    layout = ShortConvOperation(num_taps=weight.shape[1]).lay_out(batch)
    return short_conv.mix(torch.cat(inputs), weight, bias, pool, layout)


def part(pages: list[int], start: int, end: int, write_from: int = 0) -> Part:
    return Part(
        pages=pages,
        start=start,
        length=end - start,
        slot_in=0,
        slot_out=0,
        write_from=write_from,
    )


@pytest.mark.parametrize("num_taps", [2, 4, 7])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("edges", [[0, 14], [0, 4, 8, 14], [0, 12, 13, 14], list(range(15))])
def test_however_it_is_cut_states_stand_at_every_pages_end(num_taps, has_bias, edges):
    projected, weight, bias = make_inputs(14, num_taps)
    weights = weight, bias if has_bias else None
    expected, history = convolve(projected, *weights)
    pages, pool = [3, 0, 7, 5], make_pool(num_taps)
    outputs = [
        step([part(pages, *edge)], [projected[slice(*edge)]], weights, pool)
        for edge in pairwise(edges)
    ]
    assert relative_error(torch.cat(outputs), expected) < 1e-14
    for page, position in zip(pages, (4, 8, 12, 14), strict=True):
        assert torch.equal(pool[page + 1], history[position : position + num_taps - 1].T)
    assert not pool[0].any()
    untouched = [row for row in range(1, 9) if row - 1 not in pages]
    assert pool[untouched].isnan().all()


def test_a_shared_page_keeps_its_state():
    """Two sequences resume beside one page, compute what a second has already, and write theirs."""
    projected, weight, _ = make_inputs(14, 3)
    weights, pool = (weight, None), make_pool(3)
    expected, history = convolve(projected, *weights)
    step([part([0, 1], 0, 8)], [projected[:8]], weights, pool)
    pool[2] += 1  # as no rounding would
    shared = pool[1:3].clone()
    parts = [part([0, 1], 4, 8, write_from=8), part([0, 1, 2, 4], 4, 14, write_from=8)]
    output = step(parts, [projected[4:8], projected[4:]], weights, pool)
    assert relative_error(output, torch.cat((expected[4:8], expected[4:]))) < 1e-14
    assert torch.equal(pool[1:3], shared)
    assert torch.equal(pool[3], history[12:14].T)
    assert torch.equal(pool[5], history[14:].T)
    assert pool[4].isnan().all()


def test_one_token_that_a_shared_page_has_writes_nothing():
    projected, weight, _ = make_inputs(8, 3)
    weights, pool = (weight, None), make_pool(3)
    expected, _ = convolve(projected, *weights)
    step([part([0, 1], 0, 7)], [projected[:7]], weights, pool)
    before = pool.clone()
    output = step([part([0, 1], 7, 8, write_from=8)], [projected[7:]], weights, pool)
    assert relative_error(output, expected[7:]) < 1e-14
    assert torch.equal(pool.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_taps", [2, 3, 7])
def test_however_tokens_fall_into_drafts_states_are_those_of_one_at_a_time(dtype, num_taps):
    for seed in range(4):
        play(num_taps, seed, dtype)
