"""Triton: gathers the rows of few tokens in blocks that share an expert, in one launch.

A program takes one routed token and counts how many of its expert's come before it. A program for
all of a token's experts would have to exchange numbers between warps repeatedly.

Legend: T tokens, X experts, N experts of a token, P = T * N routed tokens, M rows of a block, B
blocks, D scales of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import next_power_of_2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Blocks of rows, ordered by expert and then by token. Rows past an expert's last one and past
    the last block are not written."""

    rows: Tensor
    """[B * M, I]"""
    scales: Tensor | None
    """[D, B * M] float32, if rows are rounded."""
    routed: Tensor
    """[B * M] int32: each row's routed token; -1 after an expert's last row."""
    experts: Tensor
    """[B] int32: each block's expert."""
    counters: Tensor
    """[B] int32 zeros, counters for the next kernel."""
    count: Tensor
    """[1] int32: number of blocks."""


class GatheredLists(NamedTuple):
    """Integer lists of `Gathered` as kernel arguments."""

    routed: Any
    experts: Any
    counters: Any
    count: Any


def gather(
    rows: Tensor, scales: Tensor | None, experts: Tensor, num_experts: int, block_rows: int
) -> Gathered:
    """Gathers `rows` [T or more, I] of 8 or 16 bits, with `scales` [D, T or more], by `experts`
    [T, N] int32, where no token has an expert twice. M is `block_rows`."""
    num_routed, num_chosen = experts.numel(), experts.shape[1]
    num_inputs = rows.shape[1]
    num_blocks = min(num_routed, num_experts + num_routed // block_rows)
    num_rows = num_blocks * block_rows
    gathered = rows.new_empty(num_rows, num_inputs)
    gathered_scales = None if scales is None else scales.new_empty(len(scales), num_rows)
    bits = torch.uint8 if rows.itemsize == 1 else torch.int16
    lists = torch.empty(num_rows + 2 * num_blocks + 1, dtype=torch.int32, device=rows.device)
    routed, owners, counters, count = lists.split([num_rows, num_blocks, num_blocks, 1])
    _gather_kernel[(num_routed,)](
        rows.view(bits),
        scales,
        experts,
        gathered.view(bits),
        gathered_scales,
        GatheredLists(routed, owners, counters, count),
        num_routed,
        rows.stride(0),
        0 if scales is None else scales.shape[1],
        num_rows,
        TOP_K=num_chosen,
        INPUTS=num_inputs,
        SCALES=0 if scales is None else len(scales),
        EXPERTS=num_experts,
        BINS=max(32, next_power_of_2(num_experts - 1)),
        CHUNK=max(32, next_power_of_2(num_routed)),
        ROWS=block_rows,
        num_warps=4,
        **OVERLAPPED,
    )
    return Gathered(
        rows=gathered,
        scales=gathered_scales,
        routed=routed,
        experts=owners,
        counters=counters,
        count=count,
    )


@quick
@triton.jit(do_not_specialize=("num_routed", "stride", "num_rows"))
def _gather_kernel(
    rows,
    scales,
    experts,
    gathered,
    gathered_scales,
    lists,
    num_routed,
    pitch,
    stride,
    num_rows,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copies one routed token's row to its place. There are no atomics, so results are always the
    same.

    Its inputs are complete before the next launch may start, so that launch may read them at once.
    """
    wait_for_inputs()
    launch_dependents()
    i_p = tl.program_id(0)
    i_t = i_p // TOP_K
    o_p, o_k = tl.arange(0, CHUNK), tl.arange(0, triton.next_power_of_2(INPUTS))
    b_x = tl.load(experts + o_p, mask=o_p < num_routed, other=EXPERTS)
    expert = tl.load(experts + i_p)
    b_row = tl.load(rows + i_t * pitch + o_k, mask=o_k < INPUTS)
    if SCALES > 0:
        o_d = tl.arange(0, triton.next_power_of_2(SCALES))
        b_scale = tl.load(scales + o_d * stride + i_t, mask=o_d < SCALES)
    # The number of the expert's tokens, plus 2^16 times those before this one.
    both = tl.sum(tl.where(b_x == expert, tl.where(o_p < i_t * TOP_K, 65537, 1), 0))
    rank, size = both >> 16, both & 65535
    # All other experts' blocks stand before the last one's, so it needs no bin.
    is_other = b_x < EXPERTS - 1
    b_taken = (tl.histogram(b_x, BINS, mask=is_other) + ROWS - 1) // ROWS
    place = tl.sum(tl.where(tl.arange(0, BINS) < expert, b_taken, 0)) * ROWS + rank
    tl.store(gathered + place * INPUTS + o_k, b_row, mask=o_k < INPUTS)
    if SCALES > 0:
        tl.store(gathered_scales + o_d * num_rows + place, b_scale, mask=o_d < SCALES)
    tl.store(lists.routed + place, i_p)
    if rank % ROWS == 0:
        tl.store(lists.experts + place // ROWS, expert)
        tl.store(lists.counters + place // ROWS, 0)
    if rank == size - 1:
        o_m = 1 + tl.arange(0, ROWS)
        tl.store(lists.routed + place + o_m, -1, mask=place % ROWS + o_m < ROWS)
    if i_p == 0:
        num_last = num_routed - tl.sum(is_other.to(tl.int32))
        tl.store(lists.count, tl.sum(b_taken) + (num_last + ROWS - 1) // ROWS)
