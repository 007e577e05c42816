"""Triton: which tokens an expert has, found on the device without waiting for it.

Routed tokens are sorted by expert, each expert's by number, so results do not depend on timing.

Legend: T tokens, X experts (the shared one included), N experts of a token, P = T * N routed tokens
(t * N + n is token t at its n-th expert), M rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

MANY_ROUTED = 6144
"""Beyond so many routed tokens the two more launches of `group_many` pay."""
_CHUNK = 4096
_COUNTED = 256
"""Routed tokens of a program of `group_many`, whose ranks are found by comparing all with all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Routed tokens by expert, and the blocks of rows that cover them."""

    order: Tensor
    """Routed tokens [P] int32, by expert and then by number; a row is an index into this."""
    blocks: Tensor
    """[3, capacity] int32: each block's expert (-1 for padding), first row, and end of the
    expert's rows, which may lie beyond the block."""
    num_blocks: Tensor | None = None
    """[1] int32, where no padding stands between blocks."""


def group_few(experts: Tensor, num_experts: int, block_rows: int) -> Groups:
    """Group the routed tokens of `experts` [T, N] int32 into blocks of M = `block_rows` rows, on
    the device.

    Expert x's blocks stand from x + (its first row) // M on, which leaves room for every
    distribution without knowing how many blocks the others have.
    """
    num_routed = experts.numel()
    capacity = num_experts + num_routed // block_rows
    order = torch.empty(num_routed, dtype=torch.int32, device=experts.device)
    blocks = torch.empty(3, capacity, dtype=torch.int32, device=experts.device)
    chunk = min(_CHUNK, max(32, triton.next_power_of_2(num_routed)))
    _group_kernel[(num_experts,)](
        experts,
        order,
        blocks,
        num_routed,
        capacity,
        ROWS=block_rows,
        CHUNK=chunk,
        num_warps=4 if chunk <= 1024 else 8,
        **OVERLAPPED,
    )
    return Groups(order=order, blocks=blocks)


@triton.jit(do_not_specialize=("num_routed", "capacity"))
def _group_kernel(
    experts, order, blocks, num_routed, capacity, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """One expert: count its rows and those before, then list them. No atomics: always the same."""
    let_next_start()
    wait_for_inputs()
    mine = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    before = tl.zeros([CHUNK], tl.int32)
    own = tl.zeros([CHUNK], tl.int32)
    # `while`, because the interpreter cannot take a range's end from a tensor under NumPy 2.4.
    first = 0
    while first < num_routed:
        routed = first + lane
        chosen = tl.load(experts + routed, mask=routed < num_routed, other=1 << 30)
        before += chosen < mine
        own += chosen == mine
        first += CHUNK
    start, count = tl.sum(before), tl.sum(own)
    end = start + count
    first_block, end_block = mine + start // ROWS, mine + 1 + end // ROWS
    begin = first_block
    while begin < end_block:
        block = begin + lane
        row = start + (block - first_block) * ROWS
        is_block = block < end_block
        tl.store(blocks + block, tl.where(row < end, mine, -1), mask=is_block)
        tl.store(blocks + capacity + block, row, mask=is_block)
        tl.store(blocks + 2 * capacity + block, end, mask=is_block)
        begin += CHUNK
    first = 0
    while first < num_routed:
        routed = first + lane
        chosen = tl.load(experts + routed, mask=routed < num_routed, other=-1)
        is_mine = (chosen == mine).to(tl.int32)
        tl.store(order + start + tl.cumsum(is_mine, 0) - 1, routed, mask=is_mine == 1)
        start += tl.sum(is_mine)
        first += CHUNK


def group_many(experts: Tensor, num_experts: int, block_rows: int) -> Groups:
    """As `group_few`, in three launches whose cost hardly grows, and without gaps between blocks:
    count each chunk's routed tokens, add up over the chunks, place them."""
    num_routed = experts.numel()
    capacity = num_experts + num_routed // block_rows
    chunks = triton.cdiv(num_routed, _COUNTED)
    # One bin more than experts takes what is no routed token.
    bins = triton.next_power_of_2(num_experts + 1)
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


@triton.jit(do_not_specialize=("num_routed",))
def _count_kernel(experts, counts, num_routed, BINS: tl.constexpr, CHUNK: tl.constexpr):
    let_next_start()
    wait_for_inputs()
    chunk, bins = tl.program_id(0), tl.arange(0, BINS)
    routed = chunk * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts + routed, mask=routed < num_routed, other=BINS - 1)
    tl.store(counts + chunk * BINS + bins, tl.histogram(chosen, BINS))


@triton.jit(do_not_specialize=("chunks",))
def _prefix_kernel(
    counts, totals, chunks, BINS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr
):
    """In place: an expert's count in each chunk becomes that of all chunks before it."""
    let_next_start()
    wait_for_inputs()
    bins = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    before = tl.zeros([WIDTH], tl.int32)
    for first in range(0, chunks, STEP):
        chunk = (first + tl.arange(0, STEP))[:, None]
        target = counts + chunk * BINS + bins[None, :]
        part = tl.load(target, mask=chunk < chunks, other=0)
        tl.store(target, before[None, :] + tl.cumsum(part, 0) - part, mask=chunk < chunks)
        before += tl.sum(part, 0)
    tl.store(totals + bins, before)


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
    """Place one chunk's routed tokens behind earlier chunks', and list a share of the blocks."""
    let_next_start()
    wait_for_inputs()
    mine, programs, bins = tl.program_id(0), tl.num_programs(0), tl.arange(0, BINS)
    total = tl.load(totals + bins, mask=bins < EXPERTS, other=0)
    starts = tl.cumsum(total, 0) - total
    lane = tl.arange(0, CHUNK)
    routed = mine * CHUNK + lane
    is_routed = routed < num_routed
    chosen = tl.load(experts + routed, mask=is_routed, other=BINS - 1)
    rank = tl.zeros([CHUNK], tl.int32)
    for first in range(0, CHUNK, PART):
        # Others go down the first axis, which lies in a thread's registers.
        lane_before = first + tl.arange(0, PART)
        others = tl.load(
            experts + mine * CHUNK + lane_before,
            mask=mine * CHUNK + lane_before < num_routed,
            other=BINS - 1,
        )
        is_before = (others[:, None] == chosen[None, :]) & (lane_before[:, None] < lane[None, :])
        rank += tl.sum(is_before.to(tl.int32), 0)
    base = starts + tl.load(counts + mine * BINS + bins)
    tl.store(order + tl.gather(base, chosen, 0) + rank, routed, mask=is_routed)

    taken = (total + ROWS - 1) // ROWS
    ends = tl.cumsum(taken, 0)
    tl.store(num_blocks, tl.sum(taken), mask=mine == 0)
    for first in range(mine * SHARE, capacity, programs * SHARE):
        block = first + tl.arange(0, SHARE)
        # The block's expert is the number of experts whose blocks end before it.
        expert = tl.sum((ends[:, None] <= block[None, :]).to(tl.int32), 0)
        is_real = expert < BINS
        expert = tl.minimum(expert, BINS - 1)
        row = tl.gather(starts - (ends - taken) * ROWS, expert, 0) + block * ROWS
        is_block = block < capacity
        tl.store(blocks + block, tl.where(is_real, expert, -1), mask=is_block)
        tl.store(blocks + capacity + block, row, mask=is_block)
        end = tl.gather(starts + total, expert, 0)
        tl.store(blocks + 2 * capacity + block, end, mask=is_block)
