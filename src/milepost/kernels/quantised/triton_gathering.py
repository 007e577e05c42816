"""Triton: rounded rows of few tokens in blocks of those that an expert is chosen by, in one launch.

Legend: T tokens, X experts, N experts of a token, P = T * N routed tokens, M rows of a block, B
blocks, D scales of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.launches import quick
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.tiles import next_power_of_2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Blocks of an expert's rows, by expert, and in them by token. What no row fills is not
    written: rows behind an expert's last, and all behind the last block."""

    rows: Tensor
    """[B * M, I] float8"""
    scales: Tensor
    """[D, B * M] float32"""
    routed: Tensor
    """[B * M] int32: which routed token each row is; -1 behind an expert's last."""
    experts: Tensor
    """[B] int32: each block's."""
    counters: Tensor
    """[B] int32 zeros, for whoever needs some."""
    count: Tensor
    """[1] int32: how many blocks there are."""


def gather(
    rows: Tensor, scales: Tensor, experts: Tensor, num_experts: int, block_rows: int
) -> Gathered:
    """Of `rows` [T or more, I] float8 with `scales` [D, T or more], by `experts` [T, N] int32, in
    which no token has an expert twice. M is `block_rows`."""
    num_tokens, num_chosen = experts.shape
    num_routed, num_inputs = experts.numel(), rows.shape[1]
    num_blocks = min(num_routed, num_experts + num_routed // block_rows)
    num_rows = num_blocks * block_rows
    gathered = rows.new_empty(num_rows, num_inputs)
    gathered_scales = scales.new_empty(len(scales), num_rows)
    lists = torch.empty(num_rows + 2 * num_blocks + 1, dtype=torch.int32, device=rows.device)
    routed, owners, counters, count = lists.split([num_rows, num_blocks, num_blocks, 1])
    chunk = max(32, next_power_of_2(num_routed))
    _gather_kernel[(num_tokens,)](
        rows.view(torch.uint8),
        scales,
        experts,
        gathered.view(torch.uint8),
        gathered_scales,
        routed,
        owners,
        counters,
        count,
        num_routed,
        scales.shape[1],
        num_rows,
        TOP_K=num_chosen,
        INPUTS=num_inputs,
        SCALES=len(scales),
        EXPERTS=num_experts,
        BINS=max(32, next_power_of_2(num_experts - 1)),
        CHUNK=chunk,
        ROWS=block_rows,
        num_warps=8 if chunk <= 256 else 16,
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
    """One token. No atomics: always the same."""
    let_next_start()
    wait_for_inputs()
    i_t, o_p = tl.program_id(0), tl.arange(0, CHUNK)
    o_n = tl.arange(0, triton.next_power_of_2(TOP_K))
    is_n, i_p = o_n < TOP_K, i_t * TOP_K + o_n
    o_k = tl.arange(0, triton.next_power_of_2(INPUTS))[None, :]
    o_d = tl.arange(0, triton.next_power_of_2(SCALES))[None, :]
    b_x = tl.load(experts + o_p, mask=o_p < num_routed, other=EXPERTS)
    b_own = tl.load(experts + i_p, mask=is_n, other=0)
    b_row = tl.load(rows + i_t * INPUTS + o_k, mask=o_k < INPUTS)
    b_scale = tl.load(scales + o_d * stride + i_t, mask=o_d < SCALES)
    # Before the last expert's blocks are all others', so it needs no bin: half as many may do. It
    # and what is no routed token are counted with the first one's, and taken off.
    o_x, is_other = tl.arange(0, BINS), b_x < EXPERTS - 1
    num_others = tl.sum(is_other.to(tl.int32))
    b_counts = tl.histogram(tl.where(is_other, b_x, 0), BINS)
    b_counts -= tl.where(o_x == 0, CHUNK - num_others, 0)
    b_taken = (b_counts + ROWS - 1) // ROWS
    # An expert's tokens, and times 2^16 those before this one.
    b_weight = tl.where(o_p < i_t * TOP_K, 65537, 1)
    both = tl.sum(tl.where(b_x[None, :] == b_own[:, None], b_weight[None, :], 0), 1)
    rank, size = both >> 16, both & 65535
    is_before = o_x[None, :] < b_own[:, None]
    first = tl.sum(tl.where(is_before, b_taken[None, :], 0), 1)
    place = first * ROWS + rank
    mask = is_n[:, None]
    tl.store(gathered + place[:, None] * INPUTS + o_k, b_row, mask=mask & (o_k < INPUTS))
    p_scale = gathered_scales + o_d * num_rows + place[:, None]
    tl.store(p_scale, b_scale, mask=mask & (o_d < SCALES))
    tl.store(routed + place, i_p, mask=is_n)
    block, o_m = place // ROWS, 1 + tl.arange(0, ROWS)[None, :]
    tl.store(owners + block, b_own, mask=is_n & (rank % ROWS == 0))
    tl.store(counters + block, 0, mask=is_n & (rank % ROWS == 0))
    is_end = (is_n & (rank == size - 1))[:, None]
    is_free = place[:, None] % ROWS + o_m < ROWS
    tl.store(routed + place[:, None] + o_m, -1, mask=is_end & is_free)
    if i_t == 0:
        num_last = (num_routed - num_others + ROWS - 1) // ROWS
        tl.store(count, tl.sum(b_taken) + num_last)
