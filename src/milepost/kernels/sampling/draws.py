"""From logits to tokens, as `runner.sampling` defines it, without sorting.

Up to seven short launches, each over the blocks of all rows; the host waits for none and reads no
results:

- adjust: biases, penalties and masks; the best logit of each block; - for rows with top_k or top_p,
the lowest logit that is kept (`search`); - draw: adds noise to what is kept; the best of each
block; - take: the best of all blocks, counted in the table of the answer's tokens.

Legend: R rows, V vocabulary, W words of a mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import quick
from milepost.kernels.platform.tensors import next_power_of_2
from milepost.kernels.sampling import StepRows, Workspace
from milepost.kernels.sampling.likeliest import (
    BEYOND,
    COUNTS,
    DRAWS,
    FLOOR,
    INDEX,
    INTS,
    MASK,
    NUM_BOUNDS,
    PLAIN,
    SEARCHES,
    distance_of,
    gumbel,
    top_of,
)
from milepost.kernels.sampling.search import search


class Biases(NamedTuple):
    """Biases of tokens, as in `StepRows`."""

    starts: Any
    ids: Any
    added: Any


def draw(
    logits: Tensor, best: Tensor, counts: Tensor, rows: StepRows, work: Workspace, *, searches: bool
) -> Tensor:
    """Returns token ids [R] int64 of `logits` [R, V] of any float type but float64.

    `best` [R] are the tokens with the greatest raw logits, which plain rows take. `counts` [rows,
    V] int16 hold how often each token occurs in an answer, less 2^15 if it occurs in the prompt
    too; the tokens drawn are added. `searches` says whether any row has a top_k or top_p.
    """
    num_rows, blocks = len(logits), next_power_of_2(work.num_blocks)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    biases = Biases(rows.starts, rows.entry_ids, rows.entry_values)
    for first in range(0, num_rows, work.num_rows):
        last = min(first + work.num_rows, num_rows)
        grid = (work.num_blocks, last - first)
        common = rows.settings, work.scratch, first, work.vocab_size
        _adjust_kernel[grid](
            *common,
            logits,
            counts,
            biases,
            rows.masks,
            logits.stride(0),
            rows.masks.shape[1],
            work.num_rows,
            BLOCK=work.block,
            num_warps=16,
        )
        if searches:
            search(rows, work, first, last)
        _draw_kernel[grid](*common, BLOCK=work.block, BLOCKS=blocks, num_warps=8)
        _take_kernel[(last - first,)](
            *common, best, counts, token_ids, work.num_blocks, BLOCKS=blocks, num_warps=1
        )
    return token_ids


@quick
@triton.jit(do_not_specialize=["first"])
def _adjust_kernel(
    rows,
    scratch,
    first,
    vocab_size,
    logits,
    counts,
    biases,
    masks,
    stride,
    num_words,
    num_rows,
    BLOCK: tl.constexpr,
):
    """Applies biases, penalties and masks to a block of logits, and finds its best logit."""
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = i_r + first
    kind = tl.load(rows.ints + row * INTS)
    if kind & PLAIN == 0:
        o_v = i_b * BLOCK + tl.arange(0, BLOCK)
        is_v = o_v < vocab_size
        b_x = tl.load(logits + row * stride + o_v, mask=is_v, other=float("-inf"))
        b_x = b_x.to(tl.float32)
        b_x = tl.where(b_x == b_x, b_x, float("-inf"))  # NaN is not chosen
        p_entries = biases.starts + row * (tl.num_programs(0) + 1) + i_b
        for entry in range(tl.load(p_entries), tl.load(p_entries + 1)):
            token = tl.load(biases.ids + entry)
            b_x = tl.where(o_v == token, b_x + tl.load(biases.added + entry), b_x)
        count_row = tl.load(rows.ints + row * INTS + COUNTS).to(tl.int64)
        if count_row >= 0:
            p_counts = counts + count_row * vocab_size + o_v
            b_x = _penalized(b_x, p_counts, is_v, rows.floats + row * 4)
        mask_row = tl.load(rows.ints + row * INTS + MASK).to(tl.int64)
        if mask_row >= 0:
            p_words = masks + mask_row * num_words + o_v // 32
            b_allowed = tl.load(p_words, mask=is_v, other=0) >> (o_v % 32) & 1
            b_x = tl.where(b_allowed != 0, b_x, float("-inf"))
        tl.store(scratch.adjusted + i_r * vocab_size + o_v, b_x, mask=is_v)
        tl.store(scratch.tops + i_r * tl.num_programs(0) + i_b, tl.max(b_x, 0))
        if i_b == 0:
            o_bound = tl.arange(0, NUM_BOUNDS)
            b_zeros = tl.zeros([NUM_BOUNDS], tl.int64)
            tl.store(scratch.sums + i_r * NUM_BOUNDS + o_bound, b_zeros)
            tl.store(scratch.sums + (num_rows + i_r) * NUM_BOUNDS + o_bound, b_zeros)
            tl.store(scratch.found + i_r * 4, 0)
            tl.store(scratch.found + i_r * 4 + 1, BEYOND)
            tl.store(scratch.found + i_r * 4 + 2, -1)


@triton.jit
def _penalized(b_x, p_counts, is_v, p_floats):
    """Returns logits with penalties applied, by the counts at `p_counts`."""
    repetition, frequency = tl.load(p_floats + 1), tl.load(p_floats + 2)
    presence = tl.load(p_floats + 3)
    b_counted = tl.load(p_counts, mask=is_v, other=0).to(tl.int32)
    b_count = (b_counted & 0x7FFF).to(tl.float32)
    b_repeated = tl.where(b_x > 0, tl.div_rn(b_x, repetition), b_x * repetition)
    b_x = tl.where(b_counted != 0, b_repeated, b_x)
    return tl.where(b_count > 0, b_x - (frequency * b_count + presence), b_x)


@quick
@triton.jit(do_not_specialize=["first"])
def _draw_kernel(rows, scratch, first, vocab_size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Adds noise to the logits that are kept in a block, and finds the best sum."""
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = i_r + first
    kind = tl.load(rows.ints + row * INTS)
    o_best = i_r * tl.num_programs(0) + i_b
    if kind & PLAIN == 0:
        o_v = i_b * BLOCK + tl.arange(0, BLOCK)
        p_x = scratch.adjusted + i_r * vocab_size + o_v
        best_here = tl.load(scratch.tops + o_best)
        if kind & DRAWS == 0:
            b_x = tl.load(p_x, mask=o_v < vocab_size, other=float("-inf"))
            _store_best(b_x, i_b * BLOCK, scratch, o_best)
        else:
            top = top_of(scratch.tops, i_r, tl.num_programs(0), BLOCKS)
            temperature = tl.load(rows.floats + row * 4)
            lowest = tl.load(rows.ints + row * INTS + FLOOR)
            if kind & SEARCHES != 0:
                lowest = tl.load(scratch.found + i_r * 4 + 3)
            if distance_of(best_here, top, temperature) <= lowest:
                b_x = tl.load(p_x, mask=o_v < vocab_size, other=float("nan"))
                b_distance = distance_of(b_x, top, temperature)
                index = tl.load(rows.ints + row * INTS + INDEX)
                b_noise = gumbel(rows.ints + row * INTS, index, i_b * (BLOCK // 4), BLOCK)
                b_x = b_noise - b_distance.to(tl.float32, bitcast=True)
                b_x = tl.where(b_distance <= lowest, b_x, float("-inf"))
                _store_best(b_x, i_b * BLOCK, scratch, o_best)
            else:
                tl.store(scratch.best + o_best, float("-inf"))
                tl.store(scratch.columns + o_best, i_b * BLOCK)


@triton.jit
def _store_best(b_x, start, scratch, o_best):
    """Stores the greatest number and its token, the first of equal ones."""
    top, where = tl.max(b_x, 0, return_indices=True)
    tl.store(scratch.best + o_best, top)
    tl.store(scratch.columns + o_best, start + where)


@quick
@triton.jit(do_not_specialize=["first"])
def _take_kernel(
    rows, scratch, first, vocab_size, likeliest, counts, token_ids, num_blocks, BLOCKS: tl.constexpr
):
    """Takes the best token of all blocks, and counts it in the answer's counts."""
    i_r = tl.program_id(0).to(tl.int64)
    row, o_b = i_r + first, tl.arange(0, BLOCKS)
    if tl.load(rows.ints + row * INTS) & PLAIN != 0:
        tl.store(token_ids + row, tl.load(likeliest + row))
    else:
        is_b = o_b < num_blocks
        b_tops = tl.load(scratch.best + i_r * num_blocks + o_b, mask=is_b, other=float("-inf"))
        _, winner = tl.max(b_tops, 0, return_indices=True)
        winner = tl.minimum(winner, num_blocks - 1)
        # With NaN, the maximum may be found past the last token.
        token = tl.minimum(tl.load(scratch.columns + i_r * num_blocks + winner), vocab_size - 1)
        tl.store(token_ids + row, token.to(tl.int64))
        count_row = tl.load(rows.ints + row * INTS + COUNTS).to(tl.int64)
        if count_row >= 0:
            p_count = counts + count_row * vocab_size + token
            counted = tl.load(p_count).to(tl.int32)
            # Counts saturate at the largest that fits.
            step = tl.where((counted & 0x7FFF) < 0x7FFF, 1, 0)
            tl.store(p_count, (counted + step).to(tl.int16))
