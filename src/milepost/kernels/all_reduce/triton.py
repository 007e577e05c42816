"""Triton: a row a program. It sends its row, waits for the other ranks', and goes on with the sum.

A row's slot takes turns between two places. A rank writes a place again two turns later, and so
not before all have signalled the turn between: they had ended reading by then, since a program
waits for all launches before its own. Turns are counted on the device, so a captured graph goes on
counting whenever it is run; all ranks run the same launches in the same order.

Rows are whole pieces of 16 bytes, so that they are moved in such.

Programs wait for those of the same slot on other devices, which start in the order of slots
everywhere, so the lowest slot that is waited for is always under way.

Legend: T tokens, P partials of this rank, C hidden size, S slots, R ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.all_reduce import NUM_SLOTS, OneShotBuffers
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs


def add_norm(
    hidden: Tensor,
    partials: Tensor,
    scale: Tensor,
    eps: float,
    mail: OneShotBuffers,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See `all_reduce.add_norm`; rows of `hidden` and `partials` may lie apart. Sums are
    float32."""
    total = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    normed = torch.empty_like(total)
    _launch(hidden, partials, scale, total, normed, eps, mail, multiplier)
    return total, normed


def add_up(values: Tensor, mail: OneShotBuffers) -> Tensor:
    """See `all_reduce.add_up`."""
    total = torch.empty_like(values, memory_format=torch.contiguous_format)
    _launch(None, values[:, None], None, total, None, 0.0, mail, 1.0)
    return total


def _launch(
    hidden: Tensor | None,
    partials: Tensor,
    scale: Tensor | None,
    total: Tensor,
    normed: Tensor | None,
    eps: float,
    mail: OneShotBuffers,
    multiplier: float,
) -> None:
    num_tokens, num_parts, size = partials.shape
    columns = triton.next_power_of_2(size)
    _exchange_kernel[(num_tokens,)](
        hidden,
        partials,
        scale,
        total,
        normed,
        mail.values,
        mail.signals,
        mail.turns,
        0 if hidden is None else hidden.stride(0),
        partials.stride(0),
        partials.stride(1),
        eps,
        SIZE=size,
        COLUMNS=columns,
        PARTS=num_parts,
        NORMS=hidden is not None,
        MULTIPLIER=multiplier,
        RANK=mail.rank,
        RANKS=mail.size,
        SLOTS=NUM_SLOTS,
        num_warps=min(16, max(1, columns // 256)),
        **OVERLAPPED,
    )


@quick
@triton.jit
def _exchange_kernel(
    hidden,
    partials,
    scale,
    total,
    normed,
    values,
    signals,
    turns,
    hidden_stride,
    token_stride,
    part_stride,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    NORMS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    launch_dependents()
    element = total.dtype.element_ty
    i_slot = tl.program_id(0)
    i_t = i_slot.to(tl.int64)
    o_h = tl.arange(0, COLUMNS)
    is_h = o_h < SIZE
    if NORMS:
        b_scale = tl.load(scale + o_h, mask=is_h, other=0.0).to(tl.float32)
    wait_for_inputs()
    turn = tl.load(turns + i_slot) + 1
    b_own = tl.zeros([COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        p_partial = partials + i_t * token_stride + part * part_stride + o_h
        b_own += tl.load(p_partial, mask=is_h, other=0.0).to(tl.float32)
    acc = _exchange(
        b_own.to(element), values, signals, i_slot, turn, SIZE, COLUMNS, RANK, RANKS, SLOTS
    )
    tl.store(turns + i_slot, turn)
    o_target = i_t * SIZE + o_h
    if NORMS:
        if MULTIPLIER != 1:
            acc *= MULTIPLIER
        b_x = tl.load(hidden + i_t * hidden_stride + o_h, mask=is_h, other=0.0)
        # What the next layer reads is what is normed, so the sum is rounded first.
        b_x = (b_x.to(tl.float32) + acc).to(element)
        tl.store(total + o_target, b_x, mask=is_h)
        tl.store(normed + o_target, norm_row(b_x, b_scale, eps, SIZE), mask=is_h)
    else:
        tl.store(total + o_target, acc.to(element), mask=is_h)


@triton.jit
def _exchange(
    b_own,
    values,
    signals,
    i_slot,
    turn,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The sum [COLUMNS] of what all ranks send, this one's `b_own` among it."""
    o_h = tl.arange(0, COLUMNS)
    is_h = o_h < SIZE
    o_place = ((turn & 1) * SLOTS + i_slot).to(tl.int64) * SIZE + o_h
    p_mine = tl.load(values + RANK).to(tl.pointer_type(b_own.dtype)) + o_place
    tl.store(tl.multiple_of(p_mine, 16), b_own, mask=is_h)
    tl.debug_barrier()  # the signal stands for what all threads have written
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            p_theirs = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(p_theirs + i_slot * RANKS + RANK, turn, sem="release", scope="sys")
    p_heard = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + i_slot * RANKS
    acc = tl.zeros([COLUMNS], tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            acc += b_own.to(tl.float32)
        else:
            wait_for_turn(p_heard + rank, turn)
            p_theirs = tl.load(values + rank).to(tl.pointer_type(b_own.dtype)) + o_place
            b_sent = tl.load(
                tl.multiple_of(p_theirs, 16), mask=is_h, other=0.0, cache_modifier=".cg"
            )
            acc += b_sent.to(tl.float32)
    return acc


@triton.jit
def wait_for_turn(signal, turn):
    """Until another rank has written what it wrote before it set this."""
    # The difference, since turns begin again some day.
    behind = turn - tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    while behind > 0:
        behind = turn - tl.atomic_add(signal, 0, sem="acquire", scope="sys")


@triton.jit
def norm_row(b_x, b_scale, eps, SIZE: tl.constexpr):
    """The norm of a row, in its type; what is behind its end is 0."""
    b_wide = b_x.to(tl.float32)
    mean = tl.sum(b_wide * b_wide) / SIZE
    return (b_wide * tl.rsqrt(mean + eps) * b_scale).to(b_x.dtype)
