"""Triton: rows of few tokens in blocks of those that an expert is chosen by, in one launch.

A program has one routed token and counts by itself who is before it: with a program for all of a
token's, whose numbers pass between warps again and again, a launch for 16 tokens takes 5.4 us in
place of 1.8. Of many routed tokens, counting is most of the work, and is shared by a few.

Legend: T tokens, X experts, N experts of a token, P = T * N routed tokens, M rows of a block, B
blocks, D scales of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tiles import cdiv, next_power_of_2

_MANY_ROUTED, _SHARING = 512, 4
"""Beyond so many routed tokens (64 tokens, say, with nine experts) a program has so many of them:
a step of 64 of the 35B takes 0.6 % less, one of 16 would take 0.4 % more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Blocks of an expert's rows, by expert, and in them by token. What no row fills is not
    written: rows behind an expert's last, and all behind the last block."""

    rows: Tensor
    """[B * M, I]"""
    scales: Tensor | None
    """[D, B * M] float32, of rows that are rounded."""
    routed: Tensor
    """[B * M] int32: which routed token each row is; -1 behind an expert's last."""
    experts: Tensor
    """[B] int32: each block's."""
    counters: Tensor
    """[B] int32 zeros, for whoever needs some."""
    count: Tensor
    """[1] int32: how many blocks there are."""


def gather(
    rows: Tensor, scales: Tensor | None, experts: Tensor, num_experts: int, block_rows: int
) -> Gathered:
    """Of `rows` [T or more, I] of 8 or 16 bits, with `scales` [D, T or more], by `experts` [T, N]
    int32, in which no token has an expert twice. M is `block_rows`."""
    num_routed, num_chosen = experts.numel(), experts.shape[1]
    num_inputs = rows.shape[1]
    num_blocks = min(num_routed, num_experts + num_routed // block_rows)
    num_rows = num_blocks * block_rows
    gathered = rows.new_empty(num_rows, num_inputs)
    gathered_scales = None if scales is None else scales.new_empty(len(scales), num_rows)
    bits = torch.uint8 if rows.itemsize == 1 else torch.int16
    lists = torch.empty(num_rows + 2 * num_blocks + 1, dtype=torch.int32, device=rows.device)
    routed, owners, counters, count = lists.split([num_rows, num_blocks, num_blocks, 1])
    each = _SHARING if num_routed > _MANY_ROUTED else 1
    _gather_kernel[(cdiv(num_routed, each),)](
        rows.view(bits),
        scales,
        experts,
        gathered.view(bits),
        gathered_scales,
        routed,
        owners,
        counters,
        count,
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
        EACH=each,
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
    routed,
    owners,
    counters,
    count,
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
    EACH: tl.constexpr,
):
    """EACH routed tokens, of the last program some again. No atomics: always the same.

    What this reads is complete once the next launch starts, which may read it at once."""
    wait_for_inputs()
    launch_dependents()
    o_p = tl.arange(0, CHUNK)
    o_k = tl.arange(0, triton.next_power_of_2(INPUTS))
    b_x = tl.load(experts + o_p, mask=o_p < num_routed, other=EXPERTS)
    members = ()
    for i in tl.static_range(EACH):
        i_p = tl.program_id(0) * EACH + i
        if EACH > 1:
            i_p = tl.minimum(i_p, num_routed - 1)
        i_t = i_p // TOP_K
        expert = tl.load(experts + i_p)
        b_row = tl.load(rows + i_t * pitch + o_k, mask=o_k < INPUTS)
        b_scale = expert
        if SCALES > 0:
            o_d = tl.arange(0, triton.next_power_of_2(SCALES))
            b_scale = tl.load(scales + o_d * stride + i_t, mask=o_d < SCALES)
        # The expert's tokens, and times 2^16 those before this one.
        b_weight = tl.where(o_p < i_t * TOP_K, 65537, 1)
        both = tl.sum(tl.where(b_x == expert, b_weight, 0))
        members += ((i_p, expert, b_row, b_scale, both),)
    # Before the last expert's blocks are all others', so it needs no bin: half as many may do.
    is_other = b_x < EXPERTS - 1
    b_taken = (tl.histogram(b_x, BINS, mask=is_other) + ROWS - 1) // ROWS
    for i in tl.static_range(EACH):
        i_p, expert, b_row, b_scale, both = members[i]
        rank, size = both >> 16, both & 65535
        place = tl.sum(tl.where(tl.arange(0, BINS) < expert, b_taken, 0)) * ROWS + rank
        tl.store(gathered + place * INPUTS + o_k, b_row, mask=o_k < INPUTS)
        if SCALES > 0:
            o_d = tl.arange(0, triton.next_power_of_2(SCALES))
            tl.store(gathered_scales + o_d * num_rows + place, b_scale, mask=o_d < SCALES)
        tl.store(routed + place, i_p)
        if rank % ROWS == 0:
            tl.store(owners + place // ROWS, expert)
            tl.store(counters + place // ROWS, 0)
        if rank == size - 1:
            o_m = 1 + tl.arange(0, ROWS)
            tl.store(routed + place + o_m, -1, mask=place % ROWS + o_m < ROWS)
    if tl.program_id(0) == 0:
        num_last = num_routed - tl.sum(is_other.to(tl.int32))
        tl.store(count, tl.sum(b_taken) + (num_last + ROWS - 1) // ROWS)
