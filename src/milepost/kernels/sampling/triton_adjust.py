"""The first stage of a draw: biases, penalties and masks; the best logit of each block.

Legend: R rows, V vocabulary, W words of a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import quick
from milepost.kernels.sampling.rows import StepRows, Workspace
from milepost.kernels.sampling.triton_parts import BEYOND, COUNTS, INTS, MASK, NUM_BOUNDS, PLAIN


def adjust(
    logits: Tensor, counts: Tensor, rows: StepRows, work: Workspace, first: int, last: int
) -> None:
    """Of the rows from `first` to `last`."""
    _adjust_kernel[(work.num_blocks, last - first)](
        logits,
        work.adjusted,
        counts,
        rows.starts,
        rows.entry_ids,
        rows.entry_values,
        rows.masks,
        work.sums,
        work.found,
        rows.ints,
        rows.floats,
        work.tops,
        first,
        work.vocab_size,
        logits.stride(0),
        rows.masks.shape[1],
        work.num_rows,
        BLOCK=work.block,
        num_warps=16,
    )


@quick
@triton.jit(do_not_specialize=["first"])
def _adjust_kernel(
    logits,
    adjusted,
    counts,
    starts,
    entry_ids,
    entry_values,
    masks,
    sums,
    found,
    ints,
    floats,
    tops,
    first,
    vocab_size,
    stride,
    num_words,
    num_rows,
    BLOCK: tl.constexpr,
):
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = i_r + first
    kind = tl.load(ints + row * INTS)
    if kind & PLAIN == 0:
        o_v = i_b * BLOCK + tl.arange(0, BLOCK)
        is_v = o_v < vocab_size
        b_x = tl.load(logits + row * stride + o_v, mask=is_v, other=float("-inf"))
        b_x = b_x.to(tl.float32)
        b_x = tl.where(b_x == b_x, b_x, float("-inf"))  # NaN is not chosen
        p_entries = starts + row * (tl.num_programs(0) + 1) + i_b
        for entry in range(tl.load(p_entries), tl.load(p_entries + 1)):
            token = tl.load(entry_ids + entry)
            b_x = tl.where(o_v == token, b_x + tl.load(entry_values + entry), b_x)
        count_row = tl.load(ints + row * INTS + COUNTS).to(tl.int64)
        if count_row >= 0:
            b_x = _penalized(b_x, counts + count_row * vocab_size + o_v, is_v, floats + row * 4)
        mask_row = tl.load(ints + row * INTS + MASK).to(tl.int64)
        if mask_row >= 0:
            p_words = masks + mask_row * num_words + o_v // 32
            b_allowed = tl.load(p_words, mask=is_v, other=0) >> (o_v % 32) & 1
            b_x = tl.where(b_allowed != 0, b_x, float("-inf"))
        tl.store(adjusted + i_r * vocab_size + o_v, b_x, mask=is_v)
        tl.store(tops + i_r * tl.num_programs(0) + i_b, tl.max(b_x, 0))
        if i_b == 0:
            o_bound = tl.arange(0, NUM_BOUNDS)
            b_zeros = tl.zeros([NUM_BOUNDS], tl.int64)
            tl.store(sums + i_r * NUM_BOUNDS + o_bound, b_zeros)
            tl.store(sums + (num_rows + i_r) * NUM_BOUNDS + o_bound, b_zeros)
            tl.store(found + i_r * 4, 0)
            tl.store(found + i_r * 4 + 1, BEYOND)
            tl.store(found + i_r * 4 + 2, -1)


@triton.jit
def _penalized(b_x, p_counts, is_v, p_floats):
    """As the penalties change logits whose counts lie there."""
    repetition, frequency = tl.load(p_floats + 1), tl.load(p_floats + 2)
    presence = tl.load(p_floats + 3)
    b_counted = tl.load(p_counts, mask=is_v, other=0).to(tl.int32)
    b_count = (b_counted & 0x7FFF).to(tl.float32)
    b_repeated = tl.where(b_x > 0, tl.div_rn(b_x, repetition), b_x * repetition)
    b_x = tl.where(b_counted != 0, b_repeated, b_x)
    return tl.where(b_count > 0, b_x - (frequency * b_count + presence), b_x)
