"""A norm and the products of the row that it makes with four-bit weights, and with a few raw ones
beside them, in one launch on Hopper, in Gluon: every program norms the row again, which costs less
than to wait for another launch (see `row_gluon`).

Legend: H hidden size, P parts, O outputs, R raw outputs, B blocks of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.device import Chip
from milepost.kernels.gluon import thread_barrier
from milepost.kernels.launches import quick
from milepost.kernels.overlap import OVERLAPPED
from milepost.kernels.overlap_gluon import let_next_start, wait_for_inputs
from milepost.kernels.quantised.forms import BLOCK, Int4
from milepost.kernels.quantised.row_gluon import (
    PARTS,
    TILE,
    keep_blocks,
    load_blocks,
    multiply_blocks,
    outputs_of,
    product_rows,
    row_columns,
    scale_place,
    to_outputs,
    weight_rows,
    width_of,
)
from milepost.kernels.quantised.triton_hopper_row import PROGRAMS, REGISTERS, form_of, values_of
from milepost.kernels.tiles import cdiv

_HELD = 2
"""Blocks of a row of weights that a thread holds at a time."""
_MOST_INPUTS = 2048
_RAW_WEIGHTS = 1 << 14
"""Of a program."""
_TILE, _BLOCK = gl.constexpr(TILE), gl.constexpr(BLOCK)
_RAW = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [1, PARTS], [1, 0]))


def suits(hidden: Tensor, weight: Int4, raw: Tensor | None) -> bool:
    """Whether it is one row of equal parts, and raw weights are of its type. Longer rows leave a
    thread too few registers."""
    size = hidden.shape[1]
    is_row = len(hidden) == 1 and hidden.element_size() == 2 and weight.num_inputs == size
    is_whole = size % (PARTS * BLOCK) == 0 and size.bit_count() == 1 and size <= _MOST_INPUTS
    is_raw = raw is None or (raw.dtype == hidden.dtype and len(raw) % (_RAW_WEIGHTS // size) == 0)
    return is_row and is_whole and is_raw and weight.group % BLOCK == 0


def add_norm_and_multiply(
    hidden: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    eps: float,
    multiplier: float,
    weight: Int4,
    raw: Tensor | None,
    output: Tensor,
    chip: Chip,
) -> tuple[Tensor, Tensor]:
    """The sum of `hidden` [1, H] and `delta` [1, H], or partials [1, P, H] of it, and its norm;
    `output` [1, O + R] becomes what `weight` [O, H] and `raw` [R, H] make of that."""
    size, num_outputs = hidden.shape[1], weight.num_outputs
    normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    total = hidden if delta is None else torch.empty_like(normed)
    num_parts = 0 if delta is None else 1 if delta.dim() == 2 else delta.shape[1]
    raw_rows = _RAW_WEIGHTS // size
    num_raw = 0 if raw is None else len(raw) // raw_rows
    num_tiles = cdiv(num_outputs, TILE)
    tiles = 1 + (num_tiles + num_raw > PROGRAMS * chip.num_sms)
    _kernel[(cdiv(num_tiles, tiles) + num_raw,)](
        hidden,
        delta,
        scale,
        *values_of(weight, chip),
        raw,
        total,
        normed,
        output,
        delta.stride(1) if delta is not None and num_parts > 1 else 0,
        eps,
        PARTS=num_parts,
        MULTIPLIER=multiplier,
        SIZE=size,
        OUTPUTS=num_outputs,
        RAW=0 if raw is None else len(raw),
        RAW_ROWS=raw_rows,
        B=size // (PARTS * BLOCK),
        TILES=tiles,
        HELD=_HELD,
        **form_of(weight, chip),
        num_warps=PARTS,
        maxnreg=REGISTERS,
        **OVERLAPPED,
    )
    return total, normed


@quick
@gluon.jit
def _kernel(
    hidden,
    delta,
    norm_scale,
    weight,
    scales,
    zeros,
    raw,
    total,
    normed,
    output,
    part_stride,
    eps,
    PARTS: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    SIZE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    RAW: gl.constexpr,
    RAW_ROWS: gl.constexpr,
    B: gl.constexpr,
    TILES: gl.constexpr,
    HELD: gl.constexpr,
    GROUP: gl.constexpr,
    DEPTHS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
):
    """TILES of outputs, or RAW_ROWS of raw ones."""
    let_next_start()
    EACH: gl.constexpr = TILES * _TILE
    PROGRAMS: gl.constexpr = (OUTPUTS + EACH - 1) // EACH
    added = (hidden, delta, part_stride, eps)
    program = gl.program_id(0)
    if program < PROGRAMS:
        stored = (total, normed)
        tiles = (weight, scales, zeros, output)
        _multiply_tiles(
            added, norm_scale, stored, tiles, program * EACH,
            OUTPUTS, B, EACH, HELD, GROUP, DEPTHS, SCALE_ROWS, PARTS, MULTIPLIER, SIZE,
        )  # fmt: skip
    else:
        if RAW:
            row = (program - PROGRAMS) * RAW_ROWS
            _multiply_raw(
                added, norm_scale, raw + row * SIZE, output + OUTPUTS + row,
                RAW_ROWS, PARTS, MULTIPLIER, SIZE,
            )  # fmt: skip


@gluon.jit
def _multiply_tiles(
    added,
    norm_scale,
    stored,
    tiles,
    first,
    OUTPUTS: gl.constexpr,
    B: gl.constexpr,
    EACH: gl.constexpr,
    HELD: gl.constexpr,
    GROUP: gl.constexpr,
    DEPTHS: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    SIZE: gl.constexpr,
):
    """The first program leaves the sum and the norm as well."""
    weight, scales, zeros, output = tiles
    PITCH: gl.constexpr = SIZE // _BLOCK * width_of(GROUP)
    row, part = weight_rows(EACH, GROUP)
    row = (first + row) % OUTPUTS
    starts = ()
    for b in gl.static_range(B):
        place = (part * B + b) * width_of(GROUP)
        starts += (weight + row.to(gl.int64) * PITCH + place,)
    held = load_blocks(starts, 0, HELD, B, GROUP)
    row, part = product_rows(EACH)
    row = (first + row) % OUTPUTS
    scale, zero = (), ()
    for b in gl.static_range(B):
        place = row // SCALE_ROWS * DEPTHS + scale_place(part * B + b, GROUP)
        scale += (gl.load(scales + place).to(gl.float32),)
        zero += (gl.load(zeros + place),)
    factors = ()
    for b in gl.static_range(B):
        factors += (gl.load(norm_scale + row_columns(b, B)),)
    wait_for_inputs()
    dtype: gl.constexpr = added[0].dtype.element_ty
    sums, squares = (), 0.0
    for b in gl.static_range(B):
        b_x = _add(added, row_columns(b, B), PARTS, MULTIPLIER)
        sums += (b_x,)
        wide = b_x.to(gl.float32)
        squares += gl.sum(wide * wide, 1)
    factor = gl.rsqrt(gl.sum(squares, 0) / SIZE + added[3])
    blocks = ()
    for b in gl.static_range(B):
        blocks += ((sums[b].to(gl.float32) * factor * factors[b]).to(dtype),)
    kept, block_sums = keep_blocks(blocks, GROUP)
    thread_barrier()
    if first == 0:
        for b in gl.static_range(B):
            if PARTS:
                gl.store(stored[0] + row_columns(b, B), sums[b])
            gl.store(stored[1] + row_columns(b, B), blocks[b])
    result = multiply_blocks(held, starts, kept, block_sums, scale, zero, B, HELD, GROUP)
    b_o = to_outputs(result).to(output.dtype.element_ty)
    o_n = first + outputs_of(EACH)
    gl.store(output + o_n, b_o, mask=o_n < OUTPUTS)


@gluon.jit
def _multiply_raw(
    added,
    norm_scale,
    p_raw,
    p_output,
    ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    MULTIPLIER: gl.constexpr,
    SIZE: gl.constexpr,
):
    o_n = gl.arange(0, ROWS, gl.SliceLayout(1, _RAW))
    o_h = gl.arange(0, SIZE, gl.SliceLayout(0, _RAW))
    b_w = gl.load(p_raw + o_n[:, None] * SIZE + o_h[None, :])
    b_factor = gl.load(norm_scale + o_h)
    wait_for_inputs()
    wide = _add(added, o_h, PARTS, MULTIPLIER).to(gl.float32)
    factor = gl.rsqrt(gl.sum(wide * wide, 0) / SIZE + added[3])
    b_x = (wide * factor * b_factor).to(p_output.dtype.element_ty).to(gl.float32)
    b_o = gl.sum(b_w.to(gl.float32) * b_x[None, :], 1)
    gl.store(p_output + o_n, b_o.to(p_output.dtype.element_ty))


@gluon.jit
def _add(added, o_h, PARTS: gl.constexpr, MULTIPLIER: gl.constexpr):
    """Columns of the sum, as they are stored."""
    hidden, delta, part_stride = added[:3]
    b_x = gl.load(hidden + o_h)
    if PARTS:
        b_delta = gl.load(delta + o_h).to(gl.float32)
        for part in gl.static_range(1, PARTS):
            b_delta += gl.load(delta + part * part_stride + o_h).to(gl.float32)
        if MULTIPLIER != 1:
            b_delta *= MULTIPLIER
        b_x = (b_x.to(gl.float32) + b_delta).to(b_x.dtype)
    return b_x
