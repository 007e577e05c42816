"""Sums of many rows: a program handles one row of each rank's share, and each row crosses the link
twice.

rank 0's rows   | added up by 0 | by 1 |      a program: sends its place of each other rank's part,
rank 1's rows   | by 0 | added up by 1 |      adds up that of its own, sends all the sum, norms all

A place of the buffers is written again only in the next launch, by a rank that has heard of this
rank's next launch; that begins when all before it has ended, the reading too. Programs wait for
those of the same place on other devices, which start in the same order everywhere, so the lowest
place that is waited for is always under way.

Rows are multiples of 16 bytes, and are moved in such pieces.

Legend: T tokens, P partials of this rank, C hidden size, B rows of a rank, R ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.comm import RankBuffers
from milepost.kernels.comm.one_shot import Sums, launch, open_sums, wait_for_turn
from milepost.kernels.platform.launches import launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import add_parts, norm_row
from milepost.kernels.platform.tensors import cdiv


def share_norm(
    hidden: Tensor,
    partials: Tensor,
    scale: Tensor,
    eps: float,
    buffers: RankBuffers,
    multiplier: float = 1.0,
) -> Sums:
    """See `one_shot.add_norm`; here one rank adds up each row."""
    residual, sums = open_sums(hidden, scale, eps)
    num_rows, num_each = len(hidden), cdiv(len(hidden), buffers.size)
    launch(
        _share_kernel, num_each, residual, partials, sums, buffers, multiplier, num_rows, num_each
    )
    return sums


@quick
@triton.jit(do_not_specialize=["num_tokens", "num_each"])
def _share_kernel(residual, partials, sums, memory, num_tokens, num_each, SIZES: tl.constexpr):
    RANK: tl.constexpr = SIZES.rank
    RANKS: tl.constexpr = SIZES.ranks
    launch_dependents()
    element = sums.total.dtype.element_ty
    i_place = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, SIZES.columns)
    is_h = o_h < SIZES.size
    b_scale = tl.load(residual.scale + o_h, mask=is_h, other=0.0).to(tl.float32)
    wait_for_inputs()
    turn = tl.load(memory.turns + i_place) + 1
    for rank in tl.static_range(RANKS):
        i_t = rank * num_each.to(tl.int64) + i_place
        if rank != RANK and i_t < num_tokens:
            b_part = _add_own(partials, i_t, o_h, SIZES)
            p_into = _row_address(memory, rank, 0, RANK, i_place, element, SIZES)
            tl.store(p_into + o_h, b_part.to(element), mask=is_h)
            tl.debug_barrier()  # the signal covers the writes of all threads
            _signal(memory, rank, 0, i_place, turn, SIZES)
    i_t = RANK * num_each.to(tl.int64) + i_place
    if i_t < num_tokens:
        b_x = tl.load(residual.hidden + i_t * residual.stride + o_h, mask=is_h, other=0.0)
        b_own = _add_own(partials, i_t, o_h, SIZES)
        acc = tl.zeros(o_h.shape, tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                acc += b_own.to(element).to(tl.float32)
            else:
                b_part = _receive(memory, 0, rank, i_place, turn, element, o_h, SIZES)
                acc += b_part.to(tl.float32)
        if SIZES.multiplier != 1:
            acc *= SIZES.multiplier
        # The norm is of the sum as the next layer reads it, rounded.
        b_x = (b_x.to(tl.float32) + acc).to(element)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                p_into = _row_address(memory, rank, 1, RANK, i_place, element, SIZES)
                tl.store(p_into + o_h, b_x, mask=is_h)
        tl.debug_barrier()
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                _signal(memory, rank, 1, i_place, turn, SIZES)
        _store(sums, b_x, b_scale, i_t, o_h, residual.eps, SIZES.size)
    for rank in tl.static_range(RANKS):
        i_t = rank * num_each.to(tl.int64) + i_place
        if rank != RANK and i_t < num_tokens:
            b_x = _receive(memory, 1, rank, i_place, turn, element, o_h, SIZES)
            _store(sums, b_x, b_scale, i_t, o_h, residual.eps, SIZES.size)
    tl.store(memory.turns + i_place, turn)


@triton.jit
def _store(sums, b_x, b_scale, i_t, o_h, eps, SIZE: tl.constexpr):
    """Writes a row's sum and its norm."""
    is_h = o_h < SIZE
    tl.store(sums.total + i_t * SIZE + o_h, b_x, mask=is_h)
    tl.store(sums.normed + i_t * SIZE + o_h, norm_row(b_x, b_scale, eps, SIZE), mask=is_h)


@triton.jit
def _add_own(partials, i_t, o_h, SIZES: tl.constexpr):
    """Returns the sum of a row's partials."""
    p_row = partials.base + i_t * partials.stride + o_h
    return add_parts(p_row, partials.part_stride, o_h < SIZES.size, SIZES.parts)


@triton.jit
def _receive(
    memory,
    which: tl.constexpr,
    sender: tl.constexpr,
    i_place,
    turn,
    element: tl.constexpr,
    o_h,
    SIZES: tl.constexpr,
):
    """Waits for a sender's row, and returns it."""
    wait_for_turn(_signal_address(memory, which, sender, i_place, SIZES.rank, SIZES), turn)
    p_sent = _row_address(memory, SIZES.rank, which, sender, i_place, element, SIZES)
    return tl.load(p_sent + o_h, mask=o_h < SIZES.size, other=0.0, cache_modifier=".cg")


@triton.jit
def _row_address(
    memory,
    rank: tl.constexpr,
    which: tl.constexpr,
    sender: tl.constexpr,
    i_place,
    element: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Returns the address of a sender's row of a place in a rank's memory."""
    p_first = tl.load(memory.base + rank).to(tl.pointer_type(element))
    number = (which * SIZES.ranks + sender) * SIZES.places + i_place
    return tl.multiple_of(p_first + number * SIZES.size, 16)


@triton.jit
def _signal_address(
    memory,
    which: tl.constexpr,
    sender: tl.constexpr,
    i_place,
    rank: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Returns the address at which a rank reads what a sender has signalled for a place."""
    p_first = tl.load(memory.signals + rank).to(tl.pointer_type(tl.int32))
    return p_first + (which * SIZES.places + i_place) * SIZES.ranks + sender


@triton.jit
def _signal(memory, rank: tl.constexpr, which: tl.constexpr, i_place, turn, SIZES: tl.constexpr):
    """Signals a rank that what is sent to it has arrived."""
    p_theirs = _signal_address(memory, which, SIZES.rank, i_place, rank, SIZES)
    tl.atomic_xchg(p_theirs, turn, sem="release", scope="sys")
