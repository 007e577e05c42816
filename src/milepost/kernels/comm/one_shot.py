"""Sums of few rows: a program per row sends it, waits for the other ranks', and adds all up.

A row's slot alternates between two places. A rank writes a place again two turns later, and so not
before all have signalled the turn between: they had stopped reading by then, since a program waits
for all launches before its own. Turns are counted on the device, so a captured graph goes on
counting whenever it runs; all ranks run the same launches in the same order.

Rows are multiples of 16 bytes, and are moved in such pieces.

Programs wait for those of the same slot on other devices, which start in the order of slots
everywhere, so the lowest slot that is waited for is always under way.

Legend: T tokens, P partials of this rank, C hidden size, S slots, R ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.comm import RankBuffers
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import add_parts, norm_row
from milepost.kernels.platform.tensors import next_power_of_2


class Addends(NamedTuple):
    """This rank's partials [T, P, C]."""

    base: Any
    stride: Any
    part_stride: Any


class Residual(NamedTuple):
    """The hidden states [T, C] that sums are added to, and the norm's weight [C]; or nothing."""

    hidden: Any
    stride: Any
    scale: Any
    eps: Any


class Sums(NamedTuple):
    """Where sums [T, C] go, and their norms."""

    total: Any
    normed: Any


class RankMemory(NamedTuple):
    """Tensors of `RankBuffers`."""

    base: Any
    signals: Any
    turns: Any


class ExchangeSizes(NamedTuple):
    """How a kernel is compiled; a constant on the device."""

    size: int
    columns: int
    parts: int
    multiplier: float
    rank: int
    ranks: int
    places: int
    """S or B."""


def add_norm(
    hidden: Tensor,
    partials: Tensor,
    scale: Tensor,
    eps: float,
    buffers: RankBuffers,
    multiplier: float = 1.0,
) -> Sums:
    """Does `norm.add_norm` with the sum of all ranks' `partials` [T, P, C]. Each rank's own sum is
    rounded to the dtype of `hidden` [T, C] first; sums are float32, and rows of both may be
    strided. All ranks must call this and `add_up` in the same order."""
    residual, sums = open_sums(hidden, scale, eps)
    launch(_exchange_kernel, len(hidden), residual, partials, sums, buffers, multiplier)
    return sums


def add_up(values: Tensor, buffers: RankBuffers) -> Tensor:
    """Returns the sum of all ranks' `values` [T, C]."""
    total = torch.empty_like(values, memory_format=torch.contiguous_format)
    sums = Sums(total, None)
    residual = Residual(None, 0, None, 0.0)
    launch(_exchange_kernel, len(values), residual, values[:, None], sums, buffers, 1.0)
    return total


def open_sums(hidden: Tensor, scale: Tensor, eps: float) -> tuple[Residual, Sums]:
    """Returns what is added to, and room for the results."""
    total = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return Residual(hidden, hidden.stride(0), scale, eps), Sums(total, torch.empty_like(total))


def launch(
    kernel: Any,
    num_programs: int,
    residual: Residual,
    partials: Tensor,
    sums: Sums,
    buffers: RankBuffers,
    multiplier: float,
    *numbers: int,
) -> None:
    """Launches a program for each row, or for a row of each rank."""
    _, num_parts, size = partials.shape
    columns = next_power_of_2(size)
    kernel[(num_programs,)](
        residual,
        Addends(partials, partials.stride(0), partials.stride(1)),
        sums,
        RankMemory(buffers.values, buffers.signals, buffers.turns),
        *numbers,
        SIZES=ExchangeSizes(
            size=size,
            columns=columns,
            parts=num_parts,
            multiplier=multiplier,
            rank=buffers.rank,
            ranks=buffers.size,
            places=len(buffers.turns),
        ),
        num_warps=min(16, max(1, columns // 256)),
        **OVERLAPPED,
    )


@quick
@triton.jit
def _exchange_kernel(residual, partials, sums, memory, SIZES: tl.constexpr):
    SIZE: tl.constexpr = SIZES.size
    launch_dependents()
    element = sums.total.dtype.element_ty
    i_slot = tl.program_id(0)
    i_t = i_slot.to(tl.int64)
    o_h = tl.arange(0, SIZES.columns)
    is_h = o_h < SIZE
    if residual.hidden is not None:
        b_scale = tl.load(residual.scale + o_h, mask=is_h, other=0.0).to(tl.float32)
    wait_for_inputs()
    turn = tl.load(memory.turns + i_slot) + 1
    p_row = partials.base + i_t * partials.stride + o_h
    b_own = add_parts(p_row, partials.part_stride, is_h, SIZES.parts)
    acc = _exchange(b_own.to(element), memory, i_slot, turn, SIZES)
    tl.store(memory.turns + i_slot, turn)
    o_target = i_t * SIZE + o_h
    if residual.hidden is not None:
        if SIZES.multiplier != 1:
            acc *= SIZES.multiplier
        b_x = tl.load(residual.hidden + i_t * residual.stride + o_h, mask=is_h, other=0.0)
        # The norm is of the sum as the next layer reads it, rounded.
        b_x = (b_x.to(tl.float32) + acc).to(element)
        tl.store(sums.total + o_target, b_x, mask=is_h)
        tl.store(sums.normed + o_target, norm_row(b_x, b_scale, residual.eps, SIZE), mask=is_h)
    else:
        tl.store(sums.total + o_target, acc.to(element), mask=is_h)


@triton.jit
def _exchange(b_own, memory, i_slot, turn, SIZES: tl.constexpr):
    """Returns the sum [COLUMNS] of what all ranks send, including this one's `b_own`."""
    RANK: tl.constexpr = SIZES.rank
    RANKS: tl.constexpr = SIZES.ranks
    o_h = tl.arange(0, SIZES.columns)
    is_h = o_h < SIZES.size
    o_place = ((turn & 1) * SIZES.places + i_slot).to(tl.int64) * SIZES.size + o_h
    p_mine = tl.load(memory.base + RANK).to(tl.pointer_type(b_own.dtype)) + o_place
    tl.store(tl.multiple_of(p_mine, 16), b_own, mask=is_h)
    tl.debug_barrier()  # the signal covers the writes of all threads
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            p_theirs = tl.load(memory.signals + rank).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(p_theirs + i_slot * RANKS + RANK, turn, sem="release", scope="sys")
    p_heard = tl.load(memory.signals + RANK).to(tl.pointer_type(tl.int32)) + i_slot * RANKS
    acc = tl.zeros(o_h.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            acc += b_own.to(tl.float32)
        else:
            wait_for_turn(p_heard + rank, turn)
            p_theirs = tl.load(memory.base + rank).to(tl.pointer_type(b_own.dtype)) + o_place
            b_sent = tl.load(
                tl.multiple_of(p_theirs, 16), mask=is_h, other=0.0, cache_modifier=".cg"
            )
            acc += b_sent.to(tl.float32)
    return acc


@triton.jit
def wait_for_turn(signal, turn):
    """Waits until another rank has signalled this turn, and so written everything before it."""
    # A difference, since turns wrap around.
    lag = turn - tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    while lag > 0:
        lag = turn - tl.atomic_add(signal, 0, sem="acquire", scope="sys")
