"""Triton: experts' GEMMs for many rows per expert, where arithmetic is the bottleneck.

TMA loads weights, and activations that lie row by row, in whole tiles: see the conditions in
`products.expert_table`. Rows are the left operand. In FP8 a tile is as wide as a block that shares
a scale, and the up projection rounds what it stores for the down projection.

Legend: P routed tokens, N experts of a token, H hidden size, I an expert's size, M rows of a block,
D scales of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from milepost.kernels.platform.launches import quick
from milepost.kernels.platform.numerics import activate, decode, encode, scale_of
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.forms import Raw
from milepost.kernels.products.forms.quantised import BLOCK, FP8, Fp8
from milepost.kernels.products.grouping import Groups, group_many
from milepost.kernels.products.portable.grouped import ExpertRows, RowGroups, find_block
from milepost.kernels.products.portable.rounding import RoundedRows, readable, round_rows
from milepost.kernels.products.portable.weights import ProductShape
from milepost.kernels.products.run import RoutedRows

BLOCK_M = 128
_BLOCK_N = 128
_RAW_DEPTH = 64
_PROGRAMS = 2
"""Number of programs per SM in the down projection with raw weights."""


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    groups = group_many(routed.experts, routed.num_experts, BLOCK_M)
    output = routed.new_output(routed.experts.shape[1])
    active: RoundedRows = routed.rows.new_empty(routed.num_routed, routed.size), None
    if not isinstance(routed.up, Raw):
        active = new_rounded(routed, routed.num_routed)
    rows = round_rows(routed.rows, routed.up, routed.chip, are_few=False)
    project_up(rows, routed, active, groups)
    project_down(active, routed, output, groups)
    return output


def new_rounded(routed: RoutedRows, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns unfilled activations [num_rows, I] in FP8 and their scales [D, num_rows]."""
    values = routed.rows.new_empty(num_rows, routed.size, dtype=FP8)
    scales = routed.rows.new_empty(routed.size // BLOCK, num_rows, dtype=torch.float32)
    return values, scales


def project_up(rows: RoundedRows, routed: RoutedRows, active: RoundedRows, groups: Groups) -> None:
    """Fills `active` [P, I], by `groups.order`, with the tokens' `rows` [T, H] through `up` and the
    activation."""
    (values, scales), up, is_gated, chip = rows, routed.up, routed.is_gated, routed.chip
    size, num_inputs, capacity = active[0].shape[1], values.shape[1], groups.blocks.shape[1]
    if isinstance(up, Raw):
        # A tile holds the gate rows of its outputs, then their up rows; or twice as many up rows.
        # What lies past an expert's last row reads as zeros.
        block_n = _BLOCK_N if is_gated else 2 * _BLOCK_N
        weights = up.values.view(-1, 1 + is_gated, size, num_inputs)
        box = [1, 1 + is_gated, block_n, _RAW_DEPTH]
    else:
        assert isinstance(up, Fp8), "the kernel's forms"
        weights, block_n, box = readable(up.values, chip).view(-1, num_inputs), BLOCK, [BLOCK] * 2
    cut = {"block_n": block_n, "block_k": box[-1]}
    shape = ProductShape.of(up, chip, is_gated=is_gated, limit=routed.limit, **cut)
    _up_kernel[(capacity * cdiv(size, block_n),)](
        ExpertRows(readable(values, chip), scales),
        TensorDescriptor.from_tensor(weights, box),
        None if isinstance(up, Raw) else up.scales,
        ExpertRows(_bits(active[0]), active[1]),
        RowGroups(groups.order, groups.blocks),
        values.stride(0),
        0 if scales is None else scales.stride(0),
        len(active[0]),
        capacity,
        SHAPE=shape._replace(top_k=routed.experts.shape[1], block_m=BLOCK_M),
        BFLOAT=routed.rows.dtype == torch.bfloat16,
        num_warps=8,
        num_stages=4 if isinstance(up, Raw) else 3,
    )


def _bits(values: Tensor) -> Tensor:
    """Returns FP8 values as the bits that kernels store."""
    return values.view(torch.uint8) if values.dtype == FP8 else values


@quick
@triton.jit(do_not_specialize=("scales_stride", "num_rows", "capacity"))
def _up_kernel(
    rows,
    up,
    scales,
    active,
    groups,
    stride,
    scales_stride,
    num_rows,
    capacity,
    SHAPE: tl.constexpr,
    BFLOAT: tl.constexpr,
):
    """Computes a tile of a block's activations."""
    TILES: tl.constexpr = (SHAPE.outputs + SHAPE.block_n - 1) // SHAPE.block_n
    HALF: tl.constexpr = SHAPE.block_m // 2
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert, first_row, end = find_block(groups, capacity, block)
    if expert < 0:
        return
    expert = expert.to(tl.int32)
    place, strides = (expert, first_row, end, tile), (stride, scales_stride, num_rows)
    # An expert's last block is often less than half full: then half the rows are multiplied.
    if end - first_row <= HALF:
        _make(rows, up, scales, active, groups.order, place, strides, SHAPE, HALF, BFLOAT)
    else:
        _make(rows, up, scales, active, groups.order, place, strides, SHAPE, 2 * HALF, BFLOAT)


@triton.jit
def _make(
    rows,
    up,
    scales,
    active,
    order,
    place,
    strides,
    SHAPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BFLOAT: tl.constexpr,
):
    """Computes and stores a tile of activations for the rows from `first_row` on, rounded to FP8 if
    that is the form."""
    expert, first_row, end, tile = place
    stride, scales_stride, num_rows = strides
    o_m = first_row + tl.arange(0, BLOCK_M)
    o_n = tile * SHAPE.block_n + tl.arange(0, SHAPE.block_n)
    is_row = o_m < end
    # Rows beyond the expert's read token 0; they are not stored.
    token = tl.load(order + o_m, mask=is_row, other=0) // SHAPE.top_k
    target = active.base + o_m.to(tl.int64)[:, None] * SHAPE.outputs + o_n[None, :]
    if scales is None:
        p_x = rows.base + token.to(tl.int64)[:, None] * stride
        b_up, b_gate = _multiply_raw(p_x, up, expert, tile, SHAPE)
        b_o = activate(b_up, b_gate, SHAPE.is_gated, SHAPE.limit).to(active.base.dtype.element_ty)
        tl.store(target, b_o, mask=is_row[:, None] & (o_n < SHAPE.outputs)[None, :])
    else:
        p_x = rows.base + token[:, None] * stride
        p_scale = rows.scales + token
        b_up, b_gate = _multiply_fp8(p_x, p_scale, scales_stride, up, scales, expert, tile, SHAPE)
        # Between the projections activations have 16 bits, whatever computes them.
        b_o = activate(b_up, b_gate, SHAPE.is_gated, SHAPE.limit)
        b_o = b_o.to(tl.bfloat16 if BFLOAT else tl.float16).to(tl.float32)
        scale = scale_of(b_o, 1)
        tl.store(target, encode(b_o / scale[:, None], SHAPE.is_native), mask=is_row[:, None])
        tl.store(active.scales + tile * num_rows + o_m, scale, mask=is_row)


@triton.jit
def _multiply_raw(p_x, up, expert, tile, SHAPE: tl.constexpr):
    """Multiplies rows at `p_x` [M, 1] by a tile of up rows, and of gates if there are any, in one
    product."""
    BLOCK_M: tl.constexpr = p_x.shape[0]
    BLOCK_N: tl.constexpr = SHAPE.block_n
    BLOCK_K: tl.constexpr = SHAPE.block_k
    WIDTH: tl.constexpr = 2 * BLOCK_N if SHAPE.is_gated else BLOCK_N
    p_x += tl.arange(0, BLOCK_K)[None, :]
    both = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for i_k in range(0, SHAPE.inputs, BLOCK_K):
        b_w = up.load([expert, 0, tile * BLOCK_N, i_k]).reshape(WIDTH, BLOCK_K)
        both = tl.dot(tl.load(p_x + i_k), tl.trans(b_w), both)
    if SHAPE.is_gated:
        gate, both = tl.split(tl.permute(tl.reshape(both, [BLOCK_M, 2, BLOCK_N]), (0, 2, 1)))
        return both, gate
    else:
        return both, both


@triton.jit
def _multiply_fp8(p_x, p_row_scale, scales_stride, up, scales, expert, tile, SHAPE: tl.constexpr):
    """Does `_multiply_raw` for FP8, block by block with scales."""
    NATIVE: tl.constexpr = SHAPE.is_native
    BLOCK_N: tl.constexpr = SHAPE.block_n
    BLOCK_K: tl.constexpr = SHAPE.block_k
    DEPTHS: tl.constexpr = SHAPE.inputs // BLOCK_K
    HEIGHT: tl.constexpr = 2 * SHAPE.outputs if SHAPE.is_gated else SHAPE.outputs
    p_x += tl.arange(0, BLOCK_K)[None, :]
    # Up rows stand after the gates'.
    gate_row = expert * HEIGHT + tile * BLOCK_N
    up_row = gate_row + (HEIGHT - SHAPE.outputs)
    p_gate_scale = scales + (gate_row // BLOCK_N).to(tl.int64) * DEPTHS
    p_up_scale = scales + (up_row // BLOCK_N).to(tl.int64) * DEPTHS
    b_gate = tl.zeros([p_x.shape[0], BLOCK_N], tl.float32)
    b_up = b_gate
    for i_d in range(DEPTHS):
        b_x = decode(tl.load(p_x + i_d * BLOCK_K), NATIVE)
        row_scale = tl.load(p_row_scale + i_d * scales_stride)
        if SHAPE.is_gated:
            b_w = decode(up.load([gate_row, i_d * BLOCK_K]), NATIVE)
            scale = row_scale * tl.load(p_gate_scale + i_d)
            b_gate += tl.dot(b_x, tl.trans(b_w)) * scale[:, None]
        b_w = decode(up.load([up_row, i_d * BLOCK_K]), NATIVE)
        b_up += tl.dot(b_x, tl.trans(b_w)) * (row_scale * tl.load(p_up_scale + i_d))[:, None]
    if not NATIVE:
        b_gate *= 65536.0
        b_up *= 65536.0
    return b_up, b_gate


def project_down(active: RoundedRows, routed: RoutedRows, output: Tensor, groups: Groups) -> None:
    """Fills `output` [P, H], by routed token, with the routing weights times `active` [P, I], by
    `groups.order`, through `down`. `groups` must have no gaps."""
    (values, scales), down, chip = active, routed.down, routed.chip
    assert isinstance(down, Raw | Fp8), "the kernel's forms"
    depth, num_programs = BLOCK, chip.num_sms
    if is_raw := isinstance(down, Raw):
        depth, num_programs = _RAW_DEPTH, _PROGRAMS * chip.num_sms
    shape = ProductShape.of(down, chip, block_m=BLOCK_M, block_n=_BLOCK_N, block_k=depth)
    _down_kernel[(num_programs,)](
        TensorDescriptor.from_tensor(readable(values, chip), [BLOCK_M, depth]),
        scales,
        TensorDescriptor.from_tensor(
            readable(down.values, chip).view(-1, shape.inputs), [_BLOCK_N, depth]
        ),
        None if isinstance(down, Raw) else down.scales,
        routed.routing_weights,
        output,
        RowGroups(groups.order, groups.blocks, groups.num_blocks),
        len(values),
        groups.blocks.shape[1],
        SHAPE=shape,
        PROGRAMS=num_programs,
        num_warps=4 if is_raw else 8,
        num_stages=3,
    )


@quick
@triton.jit(do_not_specialize=("num_rows", "capacity"))
def _down_kernel(
    active,
    row_scales,
    down,
    scales,
    routing_weights,
    output,
    groups,
    num_rows,
    capacity,
    SHAPE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Computes every PROGRAMS-th tile of outputs; a program loads the next tile while it stores
    one."""
    OUTPUTS: tl.constexpr = SHAPE.outputs
    NATIVE: tl.constexpr = SHAPE.is_native
    BLOCK_M: tl.constexpr = SHAPE.block_m
    BLOCK_N: tl.constexpr = SHAPE.block_n
    BLOCK_K: tl.constexpr = SHAPE.block_k
    TILES: tl.constexpr = OUTPUTS // BLOCK_N
    DEPTHS: tl.constexpr = SHAPE.inputs // BLOCK_K
    num_tiles = tl.load(groups.num_blocks) * TILES
    for index in tl.range(tl.program_id(0), num_tiles, PROGRAMS, flatten=True):
        block, tile = index // TILES, index % TILES
        expert = tl.load(groups.blocks + block)
        first_row = tl.load(groups.blocks + capacity + block)
        o_m = first_row + tl.arange(0, BLOCK_M)
        is_row = o_m < tl.load(groups.blocks + 2 * capacity + block)
        column = expert * OUTPUTS + tile * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_d in range(DEPTHS):
            b_x = active.load([first_row, i_d * BLOCK_K])
            b_w = down.load([column, i_d * BLOCK_K])
            if scales is None:
                acc = tl.dot(b_x, tl.trans(b_w), acc)
            else:
                row_scale = tl.load(row_scales + i_d * num_rows + o_m, mask=is_row, other=0.0)
                scale = tl.load(scales + (column // BLOCK_N).to(tl.int64) * DEPTHS + i_d)
                b_dot = tl.dot(decode(b_x, NATIVE), tl.trans(decode(b_w, NATIVE)))
                acc += b_dot * (row_scale * scale)[:, None]
        if scales is not None and not NATIVE:
            acc *= 65536.0
        routed = tl.load(groups.order + o_m, mask=is_row, other=0).to(tl.int64)
        weight = tl.load(routing_weights + routed, mask=is_row, other=0.0).to(tl.float32)
        b_o = (acc * weight[:, None]).to(output.dtype.element_ty)
        o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(output + routed[:, None] * OUTPUTS + o_n[None, :], b_o, mask=is_row[:, None])
