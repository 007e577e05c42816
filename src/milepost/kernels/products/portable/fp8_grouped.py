"""Triton: the experts' GEMMs of FP8 weights for so many rows an expert that arithmetic is the cost.

Rows are the left operand: a thread then holds few of them, and a block of weights has one scale.
Weights come in through bulk TMA copies. The up projection rounds what it stores, for the down
projection: its tiles are as wide as a block that shares a scale.

Legend: P routed tokens, N experts of a token, H hidden size, I an expert's size, D scales of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.launches import quick
from milepost.kernels.platform.numerics import decode, encode, scale_of
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.grouping import Groups
from milepost.kernels.products.portable.activation import activate
from milepost.kernels.products.portable.grouped_parts import find_rows, find_tile, spread_rows
from milepost.kernels.products.portable.rounding import readable

BLOCK_M = 128
_NUM_STAGES = 3


def project_up(
    rows: Tensor,
    row_scales: Tensor,
    up: Fp8,
    active: Tensor,
    active_scales: Tensor,
    groups: Groups,
    chip: Chip,
    *,
    is_gated: bool,
    is_bfloat: bool,
) -> None:
    """`active` [P, I] and `active_scales` [D, P], by `groups.order`: what `up` and the activation
    make of the rows' tokens `rows` [T, H], rounded with `row_scales` [D, T]."""
    size, num_inputs = active.shape[1], rows.shape[1]
    capacity = groups.blocks.shape[1]
    weights = readable(up.values, chip).view(-1, num_inputs)
    _up_kernel[(capacity * (size // BLOCK),)](
        readable(rows, chip),
        row_scales,
        TensorDescriptor.from_tensor(weights, [BLOCK, BLOCK]),
        up.scales,
        active.view(torch.uint8),
        active_scales,
        groups.order,
        groups.blocks,
        len(active),
        rows.stride(0),
        row_scales.stride(0),
        capacity,
        TOP_K=len(active) // len(rows),
        INPUTS=num_inputs,
        SIZE=size,
        GATED=is_gated,
        BLOCK_M=BLOCK_M,
        BLOCK=BLOCK,
        NATIVE=chip.has_fp8,
        IS_BFLOAT=is_bfloat,
        num_warps=8,
        num_stages=_NUM_STAGES,
    )


@quick
@triton.jit(do_not_specialize=("num_rows", "scales_stride", "capacity"))
def _up_kernel(
    rows,
    row_scales,
    up,
    scales,
    active,
    active_scales,
    order,
    blocks,
    num_rows,
    stride,
    scales_stride,
    capacity,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    IS_BFLOAT: tl.constexpr,
):
    TILES: tl.constexpr = SIZE // BLOCK
    expert, block, tile = find_tile(blocks, TILES)
    if expert < 0:
        return
    first_row, end = find_rows(blocks, capacity, block)
    # fmt: off
    # An expert's last block is often less than half full: then half the rows are multiplied.
    if end - first_row <= BLOCK_M // 2:
        _up_tile(rows, row_scales, up, scales, active, active_scales, order, expert, first_row,
                 end, tile, num_rows, stride, scales_stride,
                 TOP_K, INPUTS, SIZE, GATED, BLOCK_M // 2, BLOCK, NATIVE, IS_BFLOAT)
    else:
        _up_tile(rows, row_scales, up, scales, active, active_scales, order, expert, first_row,
                 end, tile, num_rows, stride, scales_stride,
                 TOP_K, INPUTS, SIZE, GATED, BLOCK_M, BLOCK, NATIVE, IS_BFLOAT)
    # fmt: on


@triton.jit
def _up_tile(
    rows,
    row_scales,
    up,
    scales,
    active,
    active_scales,
    order,
    expert,
    first_row,
    end,
    tile,
    num_rows,
    stride,
    scales_stride,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    IS_BFLOAT: tl.constexpr,
):
    DEPTHS: tl.constexpr = INPUTS // BLOCK
    ROWS: tl.constexpr = 2 * SIZE if GATED else SIZE
    o_m = first_row + tl.arange(0, BLOCK_M)
    is_row = o_m < end
    # Rows beyond the expert's read token 0; they are not stored.
    token = tl.load(order + o_m, mask=is_row, other=0) // TOP_K
    place = token[:, None] * stride + tl.arange(0, BLOCK)[None, :]
    p_row_scale = row_scales + token
    # Up rows stand behind the gates'.
    gate_row = expert * ROWS + tile * BLOCK
    up_row = gate_row + (ROWS - SIZE)
    p_gate_scale = scales + (gate_row // BLOCK).to(tl.int64) * DEPTHS
    p_up_scale = scales + (up_row // BLOCK).to(tl.int64) * DEPTHS
    b_gate = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    b_up = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    for i_d in range(DEPTHS):
        b_x = decode(tl.load(rows + i_d * BLOCK + place), NATIVE)
        row_scale = tl.load(p_row_scale + i_d * scales_stride)
        if GATED:
            b_w = decode(up.load([gate_row, i_d * BLOCK]), NATIVE)
            b_gate += (
                tl.dot(b_x, tl.trans(b_w)) * (row_scale * tl.load(p_gate_scale + i_d))[:, None]
            )
        b_w = decode(up.load([up_row, i_d * BLOCK]), NATIVE)
        b_up += tl.dot(b_x, tl.trans(b_w)) * (row_scale * tl.load(p_up_scale + i_d))[:, None]
    if not NATIVE:
        b_gate *= 65536.0
        b_up *= 65536.0
    # Between the projections activations have 16 bits, whatever computes them.
    b_o = activate(b_up, b_gate, GATED).to(tl.bfloat16 if IS_BFLOAT else tl.float16).to(tl.float32)
    scale = scale_of(b_o, 1)
    b_q = encode(b_o / scale[:, None], NATIVE)
    o_n = tile * BLOCK + tl.arange(0, BLOCK)
    target = active + o_m.to(tl.int64)[:, None] * SIZE + o_n[None, :]
    tl.store(target, b_q, mask=is_row[:, None])
    tl.store(active_scales + tile * num_rows + o_m, scale, mask=is_row)


def project_down(
    active: Tensor,
    active_scales: Tensor,
    shares: Tensor,
    down: Fp8,
    partials: Tensor,
    groups: Groups,
    chip: Chip,
) -> None:
    """`partials` [P, H], by routed token: `shares` [P] times `active` [P, I] (by `groups.order`),
    rounded with `active_scales` [D, P], through `down` [X, H, I]. `groups` must have no gaps."""
    size, num_outputs = active.shape[1], partials.shape[-1]
    weights = readable(down.values, chip).view(-1, size)
    _down_kernel[(chip.num_sms,)](
        TensorDescriptor.from_tensor(readable(active, chip), [BLOCK_M, BLOCK]),
        active_scales,
        TensorDescriptor.from_tensor(weights, [BLOCK, BLOCK]),
        down.scales,
        shares,
        partials,
        groups.order,
        groups.blocks,
        groups.num_blocks,
        len(active),
        groups.blocks.shape[1],
        SIZE=size,
        OUTPUTS=num_outputs,
        BLOCK_M=BLOCK_M,
        BLOCK=BLOCK,
        PROGRAMS=chip.num_sms,
        NATIVE=chip.has_fp8,
        num_warps=8,
        num_stages=_NUM_STAGES,
    )


@quick
@triton.jit(do_not_specialize=("num_rows", "capacity"))
def _down_kernel(
    active,
    active_scales,
    down,
    scales,
    shares,
    partials,
    order,
    blocks,
    num_blocks,
    num_rows,
    capacity,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Each program takes every PROGRAMS-th tile, and loads for the next while it stores one."""
    TILES: tl.constexpr = OUTPUTS // BLOCK
    DEPTHS: tl.constexpr = SIZE // BLOCK
    num_tiles = tl.load(num_blocks) * TILES
    for index in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=True):
        block, tile = index // TILES, index % TILES
        expert = tl.load(blocks + block)
        first_row, o_m, is_row = spread_rows(blocks, capacity, block, BLOCK_M)
        column = expert * OUTPUTS + tile * BLOCK
        p_scale = scales + (column // BLOCK).to(tl.int64) * DEPTHS
        acc = tl.zeros([BLOCK_M, BLOCK], tl.float32)
        for i_d in range(DEPTHS):
            b_x = decode(active.load([first_row, i_d * BLOCK]), NATIVE)
            b_w = decode(down.load([column, i_d * BLOCK]), NATIVE)
            row_scale = tl.load(active_scales + i_d * num_rows + o_m, mask=is_row, other=0.0)
            acc += tl.dot(b_x, tl.trans(b_w)) * (row_scale * tl.load(p_scale + i_d))[:, None]
        if not NATIVE:
            acc *= 65536.0
        routed = tl.load(order + o_m, mask=is_row, other=0).to(tl.int64)
        share = tl.load(shares + routed, mask=is_row, other=0.0).to(tl.float32)
        b_o = (acc * share[:, None]).to(partials.dtype.element_ty)
        o_n = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(partials + routed[:, None] * OUTPUTS + o_n[None, :], b_o, mask=is_row[:, None])
