"""Triton: finds the tokens of each expert on the device, without waiting for it.

Routed tokens are sorted by expert and then by number, so results do not depend on timing.

Legend: T tokens, X experts (the shared one included), N experts of a token, P = T * N routed tokens
(t * N + n is token t at its n-th expert), M rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import cdiv, next_power_of_2

MANY_ROUTED = 6144
"""Routed tokens above which the two additional launches of `group_many` pay."""
_CHUNK = 4096
_UNROLLED_BINS = tl.constexpr(512)
"""Largest number of bins for which the loop over a chunk's other tokens is unrolled; with more bins
unrolling gains nothing."""
_COUNTED = 256
"""Routed tokens per program of `group_many`, which ranks them by comparing all pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Routed tokens by expert, and the blocks of rows that cover them."""

    order: Tensor
    """Routed tokens [P] int32, by expert and then by number; a row is an index into this."""
    blocks: Tensor
    """[3, capacity] int32: each block's expert (-1 for padding), first row, and end of the
    expert's rows, which may lie beyond the block."""
    num_blocks: Tensor | None = None
    """[1] int32, if no padding stands between blocks."""


def group(experts: Tensor, num_experts: int, block_rows: int) -> Groups:
    """Groups the routed tokens of `experts` [T, N] int32 by expert, in the way that is faster for
    their number."""
    by = group_many if experts.numel() > MANY_ROUTED else group_few
    return by(experts, num_experts, block_rows)


def group_few(experts: Tensor, num_experts: int, block_rows: int) -> Groups:
    """Groups the routed tokens of `experts` [T, N] int32 into blocks of M = `block_rows` rows, on
    the device.

    Expert x's blocks begin at x + (its first row) // M, which leaves room for any distribution
    without knowing the other experts' numbers of blocks. Fewer rows than that have a place for a
    block each: launches have a program for every place, and most experts have no rows.
    """
    num_routed = experts.numel()
    capacity = num_experts + num_routed // block_rows
    by_row = num_routed < capacity
    capacity = min(capacity, num_routed)
    order = torch.empty(num_routed, dtype=torch.int32, device=experts.device)
    blocks = torch.empty(3, capacity, dtype=torch.int32, device=experts.device)
    chunk = min(_CHUNK, max(32, next_power_of_2(num_routed)))
    _group_kernel[(num_experts,)](
        experts,
        order,
        blocks,
        num_routed,
        capacity,
        ROWS=block_rows,
        BY_ROW=by_row,
        CHUNK=chunk,
        num_warps=4 if chunk <= 1024 else 8,
        **OVERLAPPED,
    )
    return Groups(order=order, blocks=blocks)


@quick
@triton.jit(do_not_specialize=("num_routed", "capacity"))
def _group_kernel(
    experts,
    order,
    blocks,
    num_routed,
    capacity,
    ROWS: tl.constexpr,
    BY_ROW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Counts one expert's rows and those before them, then lists them. Without atomics results are
    always the same."""
    launch_dependents()
    wait_for_inputs()
    i_x, o_c = tl.program_id(0), tl.arange(0, CHUNK)
    b_before = tl.zeros([CHUNK], tl.int32)
    b_own = tl.zeros([CHUNK], tl.int32)
    # `while`, because the interpreter cannot take a range's end from a tensor under NumPy 2.4.
    first = 0
    while first < num_routed:
        o_p = first + o_c
        b_x = tl.load(experts + o_p, mask=o_p < num_routed, other=1 << 30)
        b_before += b_x < i_x
        b_own += b_x == i_x
        first += CHUNK
    start, count = tl.sum(b_before), tl.sum(b_own)
    end = start + count
    if BY_ROW:
        first_block, end_block = start, end
    else:
        first_block, end_block = i_x + start // ROWS, i_x + 1 + end // ROWS
    begin = first_block
    while begin < end_block:
        o_b = begin + o_c
        if BY_ROW:
            o_m, is_real = o_b, (o_b - start) % ROWS == 0
        else:
            o_m = start + (o_b - first_block) * ROWS
            is_real = o_m < end
        is_b = o_b < end_block
        tl.store(blocks + o_b, tl.where(is_real, i_x, -1), mask=is_b)
        tl.store(blocks + capacity + o_b, o_m, mask=is_b)
        tl.store(blocks + 2 * capacity + o_b, end, mask=is_b)
        begin += CHUNK
    first = 0
    while first < num_routed:
        o_p = first + o_c
        b_x = tl.load(experts + o_p, mask=o_p < num_routed, other=-1)
        b_mine = (b_x == i_x).to(tl.int32)
        tl.store(order + start + tl.cumsum(b_mine, 0) - 1, o_p, mask=b_mine == 1)
        start += tl.sum(b_mine)
        first += CHUNK


def group_many(experts: Tensor, num_experts: int, block_rows: int) -> Groups:
    """Groups as `group_few` does, without gaps between blocks. Three launches count each chunk's
    routed tokens, add up over chunks, and place the tokens; their cost hardly grows with the number
    of tokens."""
    num_routed = experts.numel()
    capacity = num_experts + num_routed // block_rows
    chunks = cdiv(num_routed, _COUNTED)
    # One bin more than experts, for places after the last routed token.
    bins = next_power_of_2(num_experts + 1)
    order, blocks, num_blocks, counts, totals = (
        torch.empty(shape, dtype=torch.int32, device=experts.device)
        for shape in ((num_routed,), (3, capacity), (1,), (chunks, bins), (bins,))
    )
    _count_kernel[(chunks,)](
        experts, counts, num_routed, BINS=bins, CHUNK=_COUNTED, num_warps=4, **OVERLAPPED
    )
    width = min(bins, 16)
    _prefix_kernel[(bins // width,)](
        counts, totals, chunks, BINS=bins, WIDTH=width, STEP=256, num_warps=8, **OVERLAPPED
    )
    _place_kernel[(chunks,)](
        experts,
        counts,
        totals,
        order,
        blocks,
        num_blocks,
        num_routed,
        capacity,
        EXPERTS=num_experts,
        BINS=bins,
        ROWS=block_rows,
        CHUNK=_COUNTED,
        PART=16,
        SHARE=16,
        num_warps=8,
        **OVERLAPPED,
    )
    return Groups(order=order, blocks=blocks, num_blocks=num_blocks)


@quick
@triton.jit(do_not_specialize=("num_routed",))
def _count_kernel(experts, counts, num_routed, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Counts a chunk's routed tokens by expert."""
    launch_dependents()
    wait_for_inputs()
    i_c, o_x = tl.program_id(0), tl.arange(0, BINS)
    o_p = i_c * CHUNK + tl.arange(0, CHUNK)
    b_x = tl.load(experts + o_p, mask=o_p < num_routed, other=BINS - 1)
    tl.store(counts + i_c * BINS + o_x, tl.histogram(b_x, BINS))


@quick
@triton.jit(do_not_specialize=("chunks",))
def _prefix_kernel(
    counts, totals, chunks, BINS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr
):
    """Replaces an expert's count in each chunk by the sum of its counts in all chunks before."""
    launch_dependents()
    wait_for_inputs()
    o_x = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    b_before = tl.zeros([WIDTH], tl.int32)
    for first in range(0, chunks, STEP):
        o_c = (first + tl.arange(0, STEP))[:, None]
        p_counts = counts + o_c * BINS + o_x[None, :]
        b_counts = tl.load(p_counts, mask=o_c < chunks, other=0)
        b_sums = b_before[None, :] + tl.cumsum(b_counts, 0)
        tl.store(p_counts, b_sums - b_counts, mask=o_c < chunks)
        b_before += tl.sum(b_counts, 0)
    tl.store(totals + o_x, b_before)


@triton.jit
def _count_before(
    p_chunk, num_left, b_x, first, BINS: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr
):
    """For each of the chunk's routed tokens, counts those with the same expert that stand before
    it, among PART from `first` on."""
    # Others go down the first axis, which lies in a thread's registers.
    o_other, o_c = first + tl.arange(0, PART), tl.arange(0, CHUNK)
    b_other = tl.load(p_chunk + o_other, mask=o_other < num_left, other=BINS - 1)
    is_before = (b_other[:, None] == b_x[None, :]) & (o_other[:, None] < o_c[None, :])
    return tl.sum(is_before.to(tl.int32), 0)


@quick
@triton.jit(do_not_specialize=("num_routed", "capacity"))
def _place_kernel(
    experts,
    counts,
    totals,
    order,
    blocks,
    num_blocks,
    num_routed,
    capacity,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Places one chunk's routed tokens after earlier chunks', and lists some of the blocks."""
    launch_dependents()
    wait_for_inputs()
    i_c, num_chunks, o_x = tl.program_id(0), tl.num_programs(0), tl.arange(0, BINS)
    b_totals = tl.load(totals + o_x, mask=o_x < EXPERTS, other=0)
    b_starts = tl.cumsum(b_totals, 0) - b_totals
    o_c = tl.arange(0, CHUNK)
    o_p = i_c * CHUNK + o_c
    is_p = o_p < num_routed
    b_x = tl.load(experts + o_p, mask=is_p, other=BINS - 1)
    b_rank = tl.zeros([CHUNK], tl.int32)
    p_chunk, num_left = experts + i_c * CHUNK, num_routed - i_c * CHUNK
    if BINS <= _UNROLLED_BINS:
        for first in tl.static_range(0, CHUNK, PART):
            b_rank += _count_before(p_chunk, num_left, b_x, first, BINS, CHUNK, PART)
    else:
        for first in range(0, CHUNK, PART):
            b_rank += _count_before(p_chunk, num_left, b_x, first, BINS, CHUNK, PART)
    b_base = b_starts + tl.load(counts + i_c * BINS + o_x)
    tl.store(order + tl.gather(b_base, b_x, 0) + b_rank, o_p, mask=is_p)

    b_taken = (b_totals + ROWS - 1) // ROWS
    b_ends = tl.cumsum(b_taken, 0)
    tl.store(num_blocks, tl.sum(b_taken), mask=i_c == 0)
    for first in range(i_c * SHARE, capacity, num_chunks * SHARE):
        o_b = first + tl.arange(0, SHARE)
        # The block's expert is the number of experts whose blocks end before it.
        b_owner = tl.sum((b_ends[:, None] <= o_b[None, :]).to(tl.int32), 0)
        is_real = b_owner < BINS
        b_owner = tl.minimum(b_owner, BINS - 1)
        o_m = tl.gather(b_starts - (b_ends - b_taken) * ROWS, b_owner, 0) + o_b * ROWS
        is_b = o_b < capacity
        tl.store(blocks + o_b, tl.where(is_real, b_owner, -1), mask=is_b)
        tl.store(blocks + capacity + o_b, o_m, mask=is_b)
        b_end = tl.gather(b_starts + b_totals, b_owner, 0)
        tl.store(blocks + 2 * capacity + o_b, b_end, mask=is_b)
