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

from milepost.kernels.all_reduce import Boxes
from milepost.kernels.all_reduce.triton import norm_row, wait_for_turn
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs


def share_norm(
    hidden: Tensor,
    partials: Tensor,
    scale: Tensor,
    eps: float,
    boxes: Boxes,
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
    let_next_start()
    element = total.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_column = column < SIZE
    scales = tl.load(scale + column, mask=is_column, other=0.0).to(tl.float32)
    wait_for_inputs()
    turn = tl.load(turns + place) + 1
    for rank in tl.static_range(RANKS):
        token = rank * num_each.to(tl.int64) + place
        if rank != RANK and token < num_tokens:
            part = _add_parts(
                partials + token * token_stride + column, part_stride, is_column, PARTS
            )
            into = _box(boxes, rank, 0, RANK, place, element, SIZE, RANKS, PLACES)
            tl.store(into + column, part.to(element), mask=is_column)
            tl.debug_barrier()  # the signal stands for what all threads have written
            _signal(signals, rank, 0, RANK, place, turn, RANKS, PLACES)
    token = RANK * num_each.to(tl.int64) + place
    if token < num_tokens:
        x = tl.load(hidden + token * hidden_stride + column, mask=is_column, other=0.0)
        own = _add_parts(partials + token * token_stride + column, part_stride, is_column, PARTS)
        added = tl.zeros([COLUMNS], tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                added += own.to(element).to(tl.float32)
            else:
                wait_for_turn(_heard(signals, 0, rank, place, RANK, RANKS, PLACES), turn)
                sent = _box(boxes, RANK, 0, rank, place, element, SIZE, RANKS, PLACES)
                part = tl.load(sent + column, mask=is_column, other=0.0, cache_modifier=".cg")
                added += part.to(tl.float32)
        if MULTIPLIER != 1:
            added *= MULTIPLIER
        # What the next layer reads is what is normed, so the sum is rounded first.
        x = (x.to(tl.float32) + added).to(element)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                into = _box(boxes, rank, 1, RANK, place, element, SIZE, RANKS, PLACES)
                tl.store(into + column, x, mask=is_column)
        tl.debug_barrier()
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                _signal(signals, rank, 1, RANK, place, turn, RANKS, PLACES)
        tl.store(total + token * SIZE + column, x, mask=is_column)
        tl.store(normed + token * SIZE + column, norm_row(x, scales, eps, SIZE), mask=is_column)
    for rank in tl.static_range(RANKS):
        token = rank * num_each.to(tl.int64) + place
        if rank != RANK and token < num_tokens:
            wait_for_turn(_heard(signals, 1, rank, place, RANK, RANKS, PLACES), turn)
            sent = _box(boxes, RANK, 1, rank, place, element, SIZE, RANKS, PLACES)
            x = tl.load(sent + column, mask=is_column, other=0.0, cache_modifier=".cg")
            tl.store(total + token * SIZE + column, x, mask=is_column)
            tl.store(normed + token * SIZE + column, norm_row(x, scales, eps, SIZE), mask=is_column)
    tl.store(turns + place, turn)


@triton.jit
def _add_parts(part, part_stride, is_column, PARTS: tl.constexpr):
    """The sum of a row's partials."""
    added = tl.load(part, mask=is_column, other=0.0).to(tl.float32)
    for index in tl.static_range(1, PARTS):
        added += tl.load(part + index * part_stride, mask=is_column, other=0.0).to(tl.float32)
    return added


@triton.jit
def _box(
    boxes,
    rank: tl.constexpr,
    which: tl.constexpr,
    sender: tl.constexpr,
    place,
    element: tl.constexpr,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Where in a rank's memory a sender's row of a place stands."""
    first = tl.load(boxes + rank).to(tl.pointer_type(element))
    return tl.multiple_of(first + ((which * RANKS + sender) * PLACES + place) * SIZE, 16)


@triton.jit
def _heard(
    signals,
    which: tl.constexpr,
    sender: tl.constexpr,
    place,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Where a rank reads what a sender has signalled of a place."""
    first = tl.load(signals + RANK).to(tl.pointer_type(tl.int32))
    return first + (which * PLACES + place) * RANKS + sender


@triton.jit
def _signal(
    signals,
    rank: tl.constexpr,
    which: tl.constexpr,
    sender: tl.constexpr,
    place,
    turn,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Tell a rank that what is sent to it is there."""
    theirs = _heard(signals, which, sender, place, rank, RANKS, PLACES)
    tl.atomic_xchg(theirs, turn, sem="release", scope="sys")
