"""A vision tower's attention on a GPU: `vision.attend` in two launches.

A head of 72 dimensions is multiplied as 64 and 16, the last half empty: the tensor cores take
powers of two, and 128 would nearly double the work.

Legend: P patches of one picture or of several, H heads, E head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import quick
from milepost.kernels.platform.numerics import LOG2_E, online_softmax
from milepost.kernels.platform.tensors import cdiv, check_contiguous, next_power_of_2
from milepost.kernels.vision import PictureFrames

_MAIN = 64
"""Dimensions of a head that are multiplied first."""
_LEAST = 16
"""Smallest side of a product of the tensor cores."""


class VisionTiles(NamedTuple):
    """Tiles of attention: queries of a program, and keys at a time."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


HALVES = VisionTiles(queries=128, keys=64, num_warps=8, num_stages=3)
"""Tiles for 16-bit types."""
HALVES_IN_TWO = HALVES._replace(num_warps=4)
"""Tiles for 16-bit types and heads that are multiplied in two parts."""
FLOATS = VisionTiles(queries=32, keys=32, num_warps=4, num_stages=2)
"""Tiles for float32."""


def attend(
    projected: Tensor,
    angles: tuple[Tensor, Tensor],
    num_heads: int,
    frames: PictureFrames,
    tiles: VisionTiles | None = None,
) -> Tensor:
    """See `vision.attend`. Turns queries and keys in place, then attends; a patch's bits depend
    on its own frame alone."""
    check_contiguous(projected=projected, cosines=angles[0], sines=angles[1])
    num_patches, width = projected.shape
    head_dim = width // (3 * num_heads)
    _turn_kernel[(num_patches,)](
        projected,
        *angles,
        HEADS=2 * num_heads,
        DIM=head_dim,
        WIDTH=width,
        BLOCK_HEADS=next_power_of_2(2 * num_heads),
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    output = projected.new_empty(num_patches, width // 3)
    main = min(_MAIN, max(_LEAST, next_power_of_2(head_dim)))
    rest = max(_LEAST, next_power_of_2(head_dim - main)) if head_dim > main else 0
    if tiles is None and projected.element_size() == 2:
        tiles = HALVES_IN_TWO if rest else HALVES
    tiles = tiles or FLOATS
    most, num_frames = max(frames.lengths), len(frames.lengths)
    _attend_kernel[(cdiv(most, tiles.queries), num_heads, num_frames)](
        projected,
        output,
        most,
        head_dim**-0.5,
        frames.starts,
        WIDTH=width,
        DIM=head_dim,
        MAIN=main,
        REST=rest,
        QUERIES=tiles.queries,
        KEYS=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return output


@quick
@triton.jit
def _turn_kernel(
    projected,
    cosines,
    sines,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    patch = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_HALF)
    is_angle = place < HALF
    mask = (head < HEADS)[:, None] & is_angle[None, :]
    cosine = tl.load(cosines + patch * HALF + place, mask=is_angle, other=0.0)[None, :]
    sine = tl.load(sines + patch * HALF + place, mask=is_angle, other=0.0)[None, :]
    target = projected + patch * WIDTH + head[:, None] * DIM + place[None, :]
    first = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(target + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = projected.dtype.element_ty
    tl.store(target, (first * cosine - second * sine).to(dtype), mask=mask)
    tl.store(target + HALF, (second * cosine + first * sine).to(dtype), mask=mask)


@quick
@triton.jit(do_not_specialize=("num_each",))
def _attend_kernel(
    projected,
    output,
    num_each,
    scale,
    starts,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    if starts is None:
        first = tl.program_id(2).to(tl.int64) * num_each
    else:
        begin = tl.load(starts + tl.program_id(2))
        num_each = tl.load(starts + tl.program_id(2) + 1) - begin
        first = begin.to(tl.int64)
    own = projected + first * WIDTH + tl.program_id(1) * DIM
    o_q = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_query = o_q < num_each
    query, query_rest = _rows(own, o_q, is_query, WIDTH, DIM, MAIN, REST)
    peak = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, MAIN], tl.float32)
    acc_rest = tl.zeros([QUERIES, REST if REST else 16], tl.float32)
    state = peak, total, acc, acc_rest
    whole = num_each // KEYS * KEYS
    for begin in range(0, whole, KEYS):
        o_k = begin + tl.arange(0, KEYS)
        state = _step(
            own, query, query_rest, state, o_k, num_each, scale, WIDTH, DIM, MAIN, REST, False
        )
    if whole < num_each:
        o_k = whole + tl.arange(0, KEYS)
        state = _step(
            own, query, query_rest, state, o_k, num_each, scale, WIDTH, DIM, MAIN, REST, True
        )
    peak, total, acc, acc_rest = state
    o_main = tl.arange(0, MAIN)
    target = output + (first + o_q)[:, None] * (WIDTH // 3) + tl.program_id(1) * DIM
    dtype = output.dtype.element_ty
    mask = is_query[:, None] & (o_main < DIM)[None, :]
    tl.store(target + o_main[None, :], (acc / total[:, None]).to(dtype), mask=mask)
    if REST:
        o_rest = MAIN + tl.arange(0, REST)
        mask = is_query[:, None] & (o_rest < DIM)[None, :]
        tl.store(target + o_rest[None, :], (acc_rest / total[:, None]).to(dtype), mask=mask)


@triton.jit
def _step(
    own,
    query,
    query_rest,
    state,
    o_k,
    num_each,
    scale,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    peak, total, acc, acc_rest = state
    is_key = o_k < num_each
    key, key_rest = _rows(own + WIDTH // 3, o_k, is_key, WIDTH, DIM, MAIN, REST)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if REST:
        scores = tl.dot(query_rest, tl.trans(key_rest), scores, input_precision="ieee")
    scores *= scale * LOG2_E
    if IS_LAST:
        scores = tl.where(is_key[None, :], scores, -float("inf"))
    peak, total, shares, faded = online_softmax(peak, total, scores, 1.0, False)
    value, value_rest = _rows(own + 2 * (WIDTH // 3), o_k, is_key, WIDTH, DIM, MAIN, REST)
    shares = shares.to(value.dtype)
    acc = tl.dot(shares, value, acc * faded[:, None], input_precision="ieee")
    if REST:
        acc_rest = tl.dot(shares, value_rest, acc_rest * faded[:, None], input_precision="ieee")
    return peak, total, acc, acc_rest


@triton.jit
def _rows(
    base,
    rows,
    is_row,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
):
    """Loads rows of one head: its first dimensions, and the rest if there is any."""
    o_main = tl.arange(0, MAIN)
    place = base + rows[:, None].to(tl.int64) * WIDTH
    mask = is_row[:, None] & (o_main < DIM)[None, :]
    main = tl.load(place + o_main[None, :], mask=mask, other=0.0)
    rest = main
    if REST:
        o_rest = MAIN + tl.arange(0, REST)
        mask = is_row[:, None] & (o_rest < DIM)[None, :]
        rest = tl.load(place + o_rest[None, :], mask=mask, other=0.0)
    return main, rest
