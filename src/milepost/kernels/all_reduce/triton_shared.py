"""Triton: of every rank's rows one a program, so that many are added up over a link but twice.

rank 0's rows   | added up by 0 | by 1 |      a program: sends its place of each other rank's part,
rank 1's rows   | by 0 | added up by 1 |      adds up that of its own, sends all the sum, norms all

A place of the boxes is written again only in the next launch, by a rank that has heard of this
rank's next launch; that begins when all before it has ended, the reading too. Programs wait for
those of the same place on other devices, which start in the same order everywhere, so the lowest
place that is waited for is always under way.

Rows are whole pieces of 16 bytes, so that they are moved in such.

Legend: T tokens, P partials of this rank, C hidden size, B rows of a rank, R ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.all_reduce import TwoShotBuffers
from milepost.kernels.all_reduce.triton import norm_row, wait_for_turn
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs


def share_norm(
    hidden: Tensor,
    partials: Tensor,
    scale: Tensor,
    eps: float,
    boxes: TwoShotBuffers,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See `all_reduce.share_norm`; rows of `hidden` and `partials` may lie apart. Sums are
    float32."""
    total = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    normed = torch.empty_like(total)
    num_tokens, num_parts, size = partials.shape
    num_each = triton.cdiv(num_tokens, boxes.size)
    columns = triton.next_power_of_2(size)
    _share_kernel[(num_each,)](
        hidden,
        partials,
        scale,
        total,
        normed,
        boxes.boxes,
        boxes.signals,
        boxes.turns,
        num_tokens,
        num_each,
        hidden.stride(0),
        partials.stride(0),
        partials.stride(1),
        eps,
        SIZE=size,
        COLUMNS=columns,
        PARTS=num_parts,
        MULTIPLIER=multiplier,
        RANK=boxes.rank,
        RANKS=boxes.size,
        PLACES=len(boxes.turns),
        num_warps=min(16, max(1, columns // 256)),
        **OVERLAPPED,
    )
    return total, normed


@quick
@triton.jit(do_not_specialize=["num_tokens", "num_each"])
def _share_kernel(
    hidden,
    partials,
    scale,
    total,
    normed,
    boxes,
    signals,
    turns,
    num_tokens,
    num_each,
    hidden_stride,
    token_stride,
    part_stride,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    launch_dependents()
    element = total.dtype.element_ty
    i_place = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, COLUMNS)
    is_h = o_h < SIZE
    b_scale = tl.load(scale + o_h, mask=is_h, other=0.0).to(tl.float32)
    wait_for_inputs()
    turn = tl.load(turns + i_place) + 1
    for rank in tl.static_range(RANKS):
        i_t = rank * num_each.to(tl.int64) + i_place
        if rank != RANK and i_t < num_tokens:
            b_part = _add_parts(partials + i_t * token_stride + o_h, part_stride, is_h, PARTS)
            p_into = _box(boxes, rank, 0, RANK, i_place, element, SIZE, RANKS, PLACES)
            tl.store(p_into + o_h, b_part.to(element), mask=is_h)
            tl.debug_barrier()  # the signal stands for what all threads have written
            _signal(signals, rank, 0, RANK, i_place, turn, RANKS, PLACES)
    i_t = RANK * num_each.to(tl.int64) + i_place
    if i_t < num_tokens:
        b_x = tl.load(hidden + i_t * hidden_stride + o_h, mask=is_h, other=0.0)
        b_own = _add_parts(partials + i_t * token_stride + o_h, part_stride, is_h, PARTS)
        acc = tl.zeros([COLUMNS], tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                acc += b_own.to(element).to(tl.float32)
            else:
                wait_for_turn(_heard(signals, 0, rank, i_place, RANK, RANKS, PLACES), turn)
                p_sent = _box(boxes, RANK, 0, rank, i_place, element, SIZE, RANKS, PLACES)
                b_part = tl.load(p_sent + o_h, mask=is_h, other=0.0, cache_modifier=".cg")
                acc += b_part.to(tl.float32)
        if MULTIPLIER != 1:
            acc *= MULTIPLIER
        # What the next layer reads is what is normed, so the sum is rounded first.
        b_x = (b_x.to(tl.float32) + acc).to(element)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                p_into = _box(boxes, rank, 1, RANK, i_place, element, SIZE, RANKS, PLACES)
                tl.store(p_into + o_h, b_x, mask=is_h)
        tl.debug_barrier()
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                _signal(signals, rank, 1, RANK, i_place, turn, RANKS, PLACES)
        tl.store(total + i_t * SIZE + o_h, b_x, mask=is_h)
        tl.store(normed + i_t * SIZE + o_h, norm_row(b_x, b_scale, eps, SIZE), mask=is_h)
    for rank in tl.static_range(RANKS):
        i_t = rank * num_each.to(tl.int64) + i_place
        if rank != RANK and i_t < num_tokens:
            wait_for_turn(_heard(signals, 1, rank, i_place, RANK, RANKS, PLACES), turn)
            p_sent = _box(boxes, RANK, 1, rank, i_place, element, SIZE, RANKS, PLACES)
            b_x = tl.load(p_sent + o_h, mask=is_h, other=0.0, cache_modifier=".cg")
            tl.store(total + i_t * SIZE + o_h, b_x, mask=is_h)
            tl.store(normed + i_t * SIZE + o_h, norm_row(b_x, b_scale, eps, SIZE), mask=is_h)
    tl.store(turns + i_place, turn)


@triton.jit
def _add_parts(p_partial, part_stride, is_h, PARTS: tl.constexpr):
    """The sum of a row's partials."""
    acc = tl.load(p_partial, mask=is_h, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        acc += tl.load(p_partial + part * part_stride, mask=is_h, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _box(
    boxes,
    rank: tl.constexpr,
    which: tl.constexpr,
    sender: tl.constexpr,
    i_place,
    element: tl.constexpr,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Where in a rank's memory a sender's row of a place stands."""
    p_first = tl.load(boxes + rank).to(tl.pointer_type(element))
    return tl.multiple_of(p_first + ((which * RANKS + sender) * PLACES + i_place) * SIZE, 16)


@triton.jit
def _heard(
    signals,
    which: tl.constexpr,
    sender: tl.constexpr,
    i_place,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Where a rank reads what a sender has signalled of a place."""
    p_first = tl.load(signals + RANK).to(tl.pointer_type(tl.int32))
    return p_first + (which * PLACES + i_place) * RANKS + sender


@triton.jit
def _signal(
    signals,
    rank: tl.constexpr,
    which: tl.constexpr,
    sender: tl.constexpr,
    i_place,
    turn,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Tell a rank that what is sent to it is there."""
    p_theirs = _heard(signals, which, sender, i_place, rank, RANKS, PLACES)
    tl.atomic_xchg(p_theirs, turn, sem="release", scope="sys")
