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

from milepost.kernels.all_reduce import NUM_SLOTS, Mail
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs


def add_norm(
    hidden: Tensor,
    partials: Tensor,
    scale: Tensor,
    eps: float,
    mail: Mail,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See `all_reduce.add_norm`; rows of `hidden` and `partials` may lie apart. Sums are
    float32."""
    total = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    normed = torch.empty_like(total)
    _launch(hidden, partials, scale, total, normed, eps, mail, multiplier)
    return total, normed


def add_up(values: Tensor, mail: Mail) -> Tensor:
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
    mail: Mail,
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
    let_next_start()
    element = total.dtype.element_ty
    slot = tl.program_id(0)
    token = slot.to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_column = column < SIZE
    if NORMS:
        scales = tl.load(scale + column, mask=is_column, other=0.0).to(tl.float32)
    wait_for_inputs()
    turn = tl.load(turns + slot) + 1
    own = tl.zeros([COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        source = partials + token * token_stride + part * part_stride + column
        own += tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    added = _exchange(
        own.to(element), values, signals, slot, turn, SIZE, COLUMNS, RANK, RANKS, SLOTS
    )
    tl.store(turns + slot, turn)
    target = token * SIZE + column
    if NORMS:
        if MULTIPLIER != 1:
            added *= MULTIPLIER
        x = tl.load(hidden + token * hidden_stride + column, mask=is_column, other=0.0)
        # What the next layer reads is what is normed, so the sum is rounded first.
        x = (x.to(tl.float32) + added).to(element)
        tl.store(total + target, x, mask=is_column)
        tl.store(normed + target, norm_row(x, scales, eps, SIZE), mask=is_column)
    else:
        tl.store(total + target, added.to(element), mask=is_column)


@triton.jit
def _exchange(
    own,
    values,
    signals,
    slot,
    turn,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The sum [COLUMNS] of what all ranks send, this one's `own` among it."""
    column = tl.arange(0, COLUMNS)
    is_column = column < SIZE
    place = ((turn & 1) * SLOTS + slot).to(tl.int64) * SIZE + column
    mine = tl.load(values + RANK).to(tl.pointer_type(own.dtype)) + place
    tl.store(tl.multiple_of(mine, 16), own, mask=is_column)
    tl.debug_barrier()  # the signal stands for what all threads have written
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + slot * RANKS + RANK, turn, sem="release", scope="sys")
    heard = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + slot * RANKS
    added = tl.zeros([COLUMNS], tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            added += own.to(tl.float32)
        else:
            wait_for_turn(heard + rank, turn)
            theirs = tl.load(values + rank).to(tl.pointer_type(own.dtype)) + place
            sent = tl.load(
                tl.multiple_of(theirs, 16), mask=is_column, other=0.0, cache_modifier=".cg"
            )
            added += sent.to(tl.float32)
    return added


@triton.jit
def wait_for_turn(signal, turn):
    """Until another rank has written what it wrote before it set this."""
    # The difference, since turns begin again some day.
    behind = turn - tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    while behind > 0:
        behind = turn - tl.atomic_add(signal, 0, sem="acquire", scope="sys")


@triton.jit
def norm_row(x, scales, eps, SIZE: tl.constexpr):
    """The norm of a row, in its type; what is behind its end is 0."""
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide) / SIZE
    return (wide * tl.rsqrt(mean + eps) * scales).to(x.dtype)
