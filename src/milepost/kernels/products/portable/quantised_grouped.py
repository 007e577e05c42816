"""Triton: grouped GEMMs of quantised experts, over blocks of rows that share an expert, or row by
row where they are very few.

Legend: P routed tokens, N experts of a token, H hidden size, I an expert's size, D scales of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tiles import Tiles, cdiv
from milepost.kernels.products.forms.quantised import Quantised
from milepost.kernels.products.grouping import Groups
from milepost.kernels.products.portable.activation import activate
from milepost.kernels.products.portable.gemm_step import (
    add_step,
    columns,
    constants,
    factors,
    input_scales,
    load_scales,
    multiply,
    operands,
    pitch,
    whole_scale,
)
from milepost.kernels.products.portable.grouped_parts import find_rows
from milepost.kernels.products.portable.rounding import readable


def project_up(
    rows: Tensor,
    row_scales: Tensor | None,
    weight: Quantised,
    active: Tensor,
    groups: Groups | Tensor,
    tiles: Tiles,
    chip: Chip,
    *,
    is_gated: bool,
) -> None:
    """`active` [P, I], by `groups.order`: what `weight` and the activation make of the rows' tokens
    `rows` [T, H], which for FP8 are rounded, with `row_scales` [D, T], or not yet."""
    size = active.shape[1]
    order, blocks, capacity = _blocks(groups)
    numbers, scales, zeros = operands(weight, chip)
    _up_kernel[(capacity * cdiv(size, tiles.block_n),)](
        readable(rows, chip),
        row_scales,
        numbers,
        scales,
        zeros,
        input_scales(weight),
        active,
        order,
        blocks,
        rows.stride(0),
        0 if row_scales is None else row_scales.stride(0),
        capacity,
        TOP_K=len(active) // len(rows),
        INPUTS=rows.shape[1],
        SIZE=size,
        GATED=is_gated,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        **constants(weight, chip),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **OVERLAPPED,
    )


def _blocks(groups: Groups | Tensor) -> tuple[Tensor | None, Tensor, int]:
    """What kernels are told of groups, or of routed tokens' experts [T, N] that are not grouped."""
    if isinstance(groups, Tensor):
        return None, groups, groups.numel()
    return groups.order, groups.blocks, groups.blocks.shape[1]


@triton.jit
def _find(order, blocks, capacity, block):
    """A block's expert, first row and end of rows; a routed token that is not grouped is one."""
    expert = tl.load(blocks + block).to(tl.int64)
    if order is None:
        return expert, block, block + 1
    else:
        first_row, end = find_rows(blocks, capacity, block)
        return expert, first_row, end


@triton.jit
def _routed(order, o_m, is_row):
    """The rows' routed tokens, 0 beyond the last."""
    if order is None:
        return tl.where(is_row, o_m, 0).to(tl.int64)
    else:
        return tl.load(order + o_m, mask=is_row, other=0).to(tl.int64)


@quick
@triton.jit(do_not_specialize=("scales_stride", "capacity"))
def _up_kernel(
    rows,
    row_scales,
    weight,
    scales,
    zeros,
    input_scales,
    active,
    order,
    blocks,
    stride,
    scales_stride,
    capacity,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTHS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    TILES: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    ROWS: tl.constexpr = 2 * SIZE if GATED else SIZE
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert, first_row, end = _find(order, blocks, capacity, block)
    if expert < 0:
        return
    o_m = first_row + tl.arange(0, BLOCK_M)
    is_row = o_m < end
    # Rows beyond the expert's read token 0 and outputs beyond the last wrap: neither is stored.
    token = _routed(order, o_m, is_row) // TOP_K
    o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    o_x, o_w = columns(BLOCK_K, GROUP)
    p_x = rows + token[:, None] * stride + o_x[None, :]
    p_row_scale = None if row_scales is None else row_scales + token
    input_scale = None if input_scales is None else tl.load(input_scales + expert)
    # Up rows stand behind the gates'.
    gate_row = o_n % SIZE
    up_row = gate_row + (ROWS - SIZE)
    own = weight + expert * (ROWS * pitch(INPUTS, GROUP)) + o_w[None, :]
    p_gate, p_up = (
        own + gate_row[:, None] * pitch(INPUTS, GROUP),
        own + up_row[:, None] * pitch(INPUTS, GROUP),
    )
    first_scale = expert * ((ROWS + SCALE_ROWS - 1) // SCALE_ROWS * DEPTHS)
    p_gate_scale = scales + first_scale + gate_row // SCALE_ROWS * DEPTHS
    p_up_scale = scales + first_scale + up_row // SCALE_ROWS * DEPTHS
    ZEROS: tl.constexpr = DEPTHS if GROUP > 0 else 1
    p_gate_zero = None if zeros is None else zeros + (expert * ROWS + gate_row) * ZEROS
    p_up_zero = None if zeros is None else zeros + (expert * ROWS + up_row) * ZEROS
    b_gate, b_up = _multiply_both(
        p_x, p_gate, p_gate_scale, p_gate_zero, p_up, p_up_scale, p_up_zero,
        p_row_scale, input_scale, scales_stride, INPUTS, GATED,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP, BLOCK_SCALES, NATIVE,
    )  # fmt: skip
    b_o = tl.trans(activate(b_up, b_gate, GATED)).to(active.dtype.element_ty)
    mask = is_row[:, None] & (o_n < SIZE)[None, :]
    tl.store(active + o_m.to(tl.int64)[:, None] * SIZE + o_n[None, :], b_o, mask=mask)


@triton.jit
def _multiply_both(
    p_x,
    p_gate,
    p_gate_scale,
    p_gate_zero,
    p_up,
    p_up_scale,
    p_up_zero,
    p_row_scale,
    input_scale,
    scales_stride,
    INPUTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Tiles [N, M] of the products of the gates, if GATED, and of the up rows, as `multiply`."""
    b_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    b_up = b_gate
    gate_scale, gate_zero, _ = load_scales(
        p_gate_scale, p_gate_zero, None, scales_stride, 0, INPUTS, BLOCK_K, GROUP, BLOCK_SCALES
    )
    up_scale, up_zero, row_scale = load_scales(
        p_up_scale, p_up_zero, p_row_scale, scales_stride, 0, INPUTS, BLOCK_K, GROUP, BLOCK_SCALES
    )
    for i_k in range(0, INPUTS, BLOCK_K):
        next_up_scale, next_up_zero, next_row_scale = load_scales(
            p_up_scale, p_up_zero, p_row_scale, scales_stride, i_k + BLOCK_K,
            INPUTS, BLOCK_K, GROUP, BLOCK_SCALES,
        )  # fmt: skip
        if GATED:
            next_gate_scale, next_gate_zero, _ = load_scales(
                p_gate_scale, p_gate_zero, None, scales_stride, i_k + BLOCK_K,
                INPUTS, BLOCK_K, GROUP, BLOCK_SCALES,
            )  # fmt: skip
            b_gate = add_step(
                b_gate, p_x, input_scale, p_gate, p_gate_scale, p_gate_zero,
                gate_scale, gate_zero, row_scale, i_k,
                BLOCK_K, GROUP, BLOCK_SCALES, NATIVE, p_row_scale is not None,
            )  # fmt: skip
            gate_scale, gate_zero = next_gate_scale, next_gate_zero
        b_up = add_step(
            b_up, p_x, input_scale, p_up, p_up_scale, p_up_zero, up_scale, up_zero, row_scale, i_k,
            BLOCK_K, GROUP, BLOCK_SCALES, NATIVE, p_row_scale is not None,
        )  # fmt: skip
        up_scale, up_zero, row_scale = next_up_scale, next_up_zero, next_row_scale
    if GROUP == 0 and not BLOCK_SCALES:
        whole = whole_scale(p_row_scale, input_scale)
        b_gate *= tl.load(p_gate_scale)[:, None] * whole
        b_up *= tl.load(p_up_scale)[:, None] * whole
    if GROUP < 0:
        b_gate *= factors(p_gate_zero)[:, None]
        b_up *= factors(p_up_zero)[:, None]
    if not NATIVE:
        b_gate *= 65536.0
        b_up *= 65536.0
    return b_gate, b_up


def project_down(
    active: Tensor,
    row_scales: Tensor | None,
    shares: Tensor,
    weight: Quantised,
    partials: Tensor,
    groups: Groups | Tensor,
    tiles: Tiles,
    chip: Chip,
) -> None:
    """`partials` [P, H], by routed token: `shares` [P] times the product of `active` [P, I] (by
    `groups.order`) with `weight` [X, H, I]."""
    size, num_outputs = active.shape[1], partials.shape[-1]
    order, blocks, capacity = _blocks(groups)
    numbers, scales, zeros = operands(weight, chip)
    _down_kernel[(capacity * cdiv(num_outputs, tiles.block_n),)](
        readable(active, chip),
        row_scales,
        numbers,
        scales,
        zeros,
        input_scales(weight),
        shares,
        partials,
        order,
        blocks,
        0 if row_scales is None else row_scales.stride(0),
        capacity,
        SIZE=size,
        OUTPUTS=num_outputs,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        **constants(weight, chip),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **OVERLAPPED,
    )


@quick
@triton.jit(do_not_specialize=("scales_stride", "capacity"))
def _down_kernel(
    active,
    row_scales,
    weight,
    scales,
    zeros,
    input_scales,
    shares,
    partials,
    order,
    blocks,
    scales_stride,
    capacity,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTHS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    TILES: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert, first_row, end = _find(order, blocks, capacity, block)
    if expert < 0:
        return
    o_m = first_row + tl.arange(0, BLOCK_M)
    is_row = o_m < end
    # Rows beyond the expert's repeat its first and outputs beyond the last wrap: none is stored.
    row = tl.where(is_row, o_m, first_row).to(tl.int64)
    o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column = o_n % OUTPUTS
    o_x, o_w = columns(BLOCK_K, GROUP)
    p_x = active + row[:, None] * SIZE + o_x[None, :]
    p_row_scale = None if row_scales is None else row_scales + row
    input_scale = None if input_scales is None else tl.load(input_scales + expert)
    own = weight + expert * (OUTPUTS * pitch(SIZE, GROUP)) + o_w[None, :]
    p_w = own + column[:, None] * pitch(SIZE, GROUP)
    first_scale = expert * ((OUTPUTS + SCALE_ROWS - 1) // SCALE_ROWS * DEPTHS)
    p_scale = scales + first_scale + column // SCALE_ROWS * DEPTHS
    ZEROS: tl.constexpr = DEPTHS if GROUP > 0 else 1
    p_zero = None if zeros is None else zeros + (expert * OUTPUTS + column) * ZEROS
    acc = multiply(
        p_x, p_w, p_scale, p_zero, p_row_scale, input_scale, scales_stride, 0, 0, SIZE,
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP, BLOCK_SCALES, NATIVE,
    )  # fmt: skip
    routed = _routed(order, o_m, is_row)
    share = tl.load(shares + routed, mask=is_row, other=0.0).to(tl.float32)
    b_o = (tl.trans(acc) * share[:, None]).to(partials.dtype.element_ty)
    mask = is_row[:, None] & (o_n < OUTPUTS)[None, :]
    tl.store(partials + routed[:, None] * OUTPUTS + o_n[None, :], b_o, mask=mask)
