"""Triton: from logits to tokens, as `runner.sampling` defines it, without sorting.

Up to seven short launches, each over the blocks of all rows side by side; the host waits for none
and knows nothing of their results: biases, penalties and masks (`triton_adjust`); for rows with
top_k or top_p the lowest logit that is kept (`triton_search`); then here

- draw: adds noise to what is kept; the best of each block;
- take: the best of all blocks, counted in the table of the answer's tokens.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import quick
from milepost.kernels.sampling.rows import StepRows, Workspace
from milepost.kernels.sampling.triton_adjust import adjust
from milepost.kernels.sampling.triton_parts import (
    COUNTS,
    DRAWS,
    FLOOR,
    INDEX,
    INTS,
    PLAIN,
    SEARCHES,
    SEED_HIGH,
    SEED_LOW,
    distance_of,
    top_of,
)
from milepost.kernels.sampling.triton_search import search


def draw(
    logits: Tensor, best: Tensor, counts: Tensor, rows: StepRows, work: Workspace, *, searches: bool
) -> Tensor:
    """Token ids [R] int64 of `logits` [R, V] of any float type but float64.

    `best` [R] are the likeliest tokens as they are, taken where a row is plain. `counts` [rows, V]
    int16 holds how often an answer has each token, less 2^15 where its prompt has it too; the
    tokens chosen are counted. `searches` if any row has a top_k or top_p.
    """
    num_rows = len(logits)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    for first in range(0, num_rows, work.num_rows):
        last = min(first + work.num_rows, num_rows)
        adjust(logits, counts, rows, work, first, last)
        if searches:
            search(rows, work, first, last)
        _choose(best, counts, rows, work, token_ids, first, last)
    return token_ids


def _choose(
    best: Tensor,
    counts: Tensor,
    rows: StepRows,
    work: Workspace,
    token_ids: Tensor,
    first: int,
    last: int,
) -> None:
    blocks = triton.next_power_of_2(work.num_blocks)
    _draw_kernel[(work.num_blocks, last - first)](
        work.adjusted,
        work.found,
        work.best,
        work.columns,
        rows.ints,
        rows.floats,
        work.tops,
        first,
        work.vocab_size,
        BLOCK=work.block,
        BLOCKS=blocks,
        num_warps=8,
    )
    _take_kernel[(last - first,)](
        work.best,
        work.columns,
        best,
        counts,
        token_ids,
        rows.ints,
        first,
        work.vocab_size,
        work.num_blocks,
        BLOCKS=blocks,
        num_warps=1,
    )


@quick
@triton.jit(do_not_specialize=["first"])
def _draw_kernel(
    adjusted,
    found,
    best,
    columns,
    ints,
    floats,
    tops,
    first,
    vocab_size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = i_r + first
    kind = tl.load(ints + row * INTS)
    o_best = i_r * tl.num_programs(0) + i_b
    if kind & PLAIN == 0:
        o_v = i_b * BLOCK + tl.arange(0, BLOCK)
        p_x = adjusted + i_r * vocab_size + o_v
        best_here = tl.load(tops + o_best)
        if kind & DRAWS == 0:
            b_x = tl.load(p_x, mask=o_v < vocab_size, other=float("-inf"))
            _store_best(b_x, i_b * BLOCK, best + o_best, columns + o_best)
        else:
            top = top_of(tops, i_r, tl.num_programs(0), BLOCKS)
            temperature = tl.load(floats + row * 4)
            lowest = tl.load(ints + row * INTS + FLOOR)
            if kind & SEARCHES != 0:
                lowest = tl.load(found + i_r * 4 + 3)
            if distance_of(best_here, top, temperature) <= lowest:
                b_x = tl.load(p_x, mask=o_v < vocab_size, other=float("nan"))
                b_distance = distance_of(b_x, top, temperature)
                index = tl.load(ints + row * INTS + INDEX)
                b_noise = gumbel(ints + row * INTS, index, i_b * (BLOCK // 4), BLOCK)
                b_x = b_noise - b_distance.to(tl.float32, bitcast=True)
                b_x = tl.where(b_distance <= lowest, b_x, float("-inf"))
                _store_best(b_x, i_b * BLOCK, best + o_best, columns + o_best)
            else:
                tl.store(best + o_best, float("-inf"))
                tl.store(columns + o_best, i_b * BLOCK)


@triton.jit
def _store_best(b_x, start, p_best, p_column):
    """The first of the greatest."""
    top, where = tl.max(b_x, 0, return_indices=True)
    tl.store(p_best, top)
    tl.store(p_column, start + where)


@triton.jit
def gumbel(ints, index, first_quad, BLOCK: tl.constexpr):
    """See `reference.gumbel`."""
    low = tl.load(ints + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(ints + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    o_quad = first_quad + tl.arange(0, BLOCK // 4)
    b_zero = o_quad * 0
    w0, w1, w2, w3 = tl.philox(high << 32 | low, o_quad, b_zero + index, b_zero, b_zero)
    b_words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape([BLOCK])
    b_uniform = ((b_words >> 9).to(tl.int32) * 2 + 1).to(tl.float32) * (1 / 16777216)
    return -_log(-_log(1 - b_uniform))


@triton.jit
def _log(x):
    """Of a normal number, near 1 too as exact as float32 holds it: a GPU's own is not."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    x = (bits - (exponent << 23)).to(tl.float32, bitcast=True)  # from sqrt(1/2) to sqrt(2)
    ratio = (x - 1) / (x + 1)
    square = ratio * ratio
    series = 2 / 7 + square * (2 / 9 + square * (2 / 11))
    series = 2 + square * (2 / 3 + square * (2 / 5 + square * series))
    return ratio * series + exponent.to(tl.float32) * 0.6931471805599453


@quick
@triton.jit(do_not_specialize=["first"])
def _take_kernel(
    best,
    columns,
    likeliest,
    counts,
    token_ids,
    ints,
    first,
    vocab_size,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    row, o_b = i_r + first, tl.arange(0, BLOCKS)
    if tl.load(ints + row * INTS) & PLAIN != 0:
        tl.store(token_ids + row, tl.load(likeliest + row))
    else:
        is_b = o_b < num_blocks
        b_tops = tl.load(best + i_r * num_blocks + o_b, mask=is_b, other=float("-inf"))
        _, winner = tl.max(b_tops, 0, return_indices=True)
        winner = tl.minimum(winner, num_blocks - 1)
        # Among NaN the greatest may be found where there is no token.
        token = tl.minimum(tl.load(columns + i_r * num_blocks + winner), vocab_size - 1)
        tl.store(token_ids + row, token.to(tl.int64))
        count_row = tl.load(ints + row * INTS + COUNTS).to(tl.int64)
        if count_row >= 0:
            p_count = counts + count_row * vocab_size + token
            counted = tl.load(p_count).to(tl.int32)
            # Beyond the largest that there is room for it stays.
            step = tl.where((counted & 0x7FFF) < 0x7FFF, 1, 0)
            tl.store(p_count, (counted + step).to(tl.int16))
