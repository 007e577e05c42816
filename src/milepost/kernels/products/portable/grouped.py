"""Triton: the experts' grouped GEMMs, over blocks of rows that share an expert.

Raw weights and quantised ones share the kernel; `MULTIPLY` is what differs.

Legend: T tokens, N experts of a token, P = T * N routed tokens, H hidden size, I an expert's size,
M rows of a block, O outputs of a tile, D scales of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import check_contiguous, check_rows
from milepost.kernels.platform.tiles import Tiles, cdiv
from milepost.kernels.products.forms.matrix import Raw
from milepost.kernels.products.grouping import Groups, group
from milepost.kernels.products.portable import grouped_tiles
from milepost.kernels.products.portable.activation import activate
from milepost.kernels.products.portable.expert_parts import (
    ExpertWeight,
    RowGroups,
    find_block,
    find_scales,
    load_routed,
)
from milepost.kernels.products.portable.gemm_step import (
    add_step,
    columns,
    factors,
    load_scales,
    pitch,
    whole_scale,
)
from milepost.kernels.products.portable.rounding import readable, round_rows
from milepost.kernels.products.run_experts import RoutedRows

RoundedRows = tuple[Tensor, Tensor | None]
"""Rows and, if they are rounded, their scales [D, rows]."""


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    output = routed.new_output(routed.experts.shape[1])
    active = routed.rows.new_empty(routed.num_routed, routed.size)
    if isinstance(routed.up, Raw) and isinstance(routed.down, Raw):
        check_rows(hidden=routed.values)
        check_contiguous(up=routed.up.values, down=routed.down.values, experts=routed.experts)
        up_tiles, down_tiles = grouped_tiles.choose_raw(routed)
        groups = group(routed.experts, routed.num_experts, up_tiles.block_m)
        project_up((routed.values, None), routed, active, groups, up_tiles)
        project_down((active, None), routed, output, groups, down_tiles)
        return output
    assert not isinstance(routed.up, Raw), "experts have one form"
    assert not isinstance(routed.down, Raw), "experts have one form"
    up_tiles, down_tiles = grouped_tiles.choose_quantised(routed)
    groups, are_few = None, routed.num_routed <= grouped_tiles.UNGROUPED
    if not are_few:
        groups = group(routed.experts, routed.num_experts, up_tiles.block_m)
    rows = round_rows(routed.rows, routed.up, routed.chip, are_few=are_few)
    project_up(rows, routed, active, groups, up_tiles)
    rows = round_rows(active, routed.down, routed.chip, are_few=are_few)
    project_down(rows, routed, output, groups, down_tiles)
    return output


def project_up(
    rows: RoundedRows, routed: RoutedRows, active: Tensor, groups: Groups | None, tiles: Tiles
) -> None:
    """`active` [P, I], by `groups.order`: the tokens' `rows` [T, H] through `up` and the
    activation."""
    _launch(rows, routed, active, groups, tiles, is_up=True)


def project_down(
    rows: RoundedRows, routed: RoutedRows, output: Tensor, groups: Groups | None, tiles: Tiles
) -> None:
    """`output` [P, H], by routed token: the routing weights times `rows` [P, I] (by
    `groups.order`) through `down`."""
    _launch(rows, routed, output, groups, tiles, is_up=False)


def _launch(
    rows: RoundedRows,
    routed: RoutedRows,
    output: Tensor,
    groups: Groups | None,
    tiles: Tiles,
    *,
    is_up: bool,
) -> None:
    values, scales = rows
    weight, chip = routed.up if is_up else routed.down, routed.chip
    listed = RowGroups(None, routed.experts)
    if groups is not None:
        listed = RowGroups(groups.order, groups.blocks)
    capacity = listed.blocks.shape[1] if groups is not None else routed.num_routed
    num_outputs = output.shape[-1]
    shape = grouped_tiles.GroupedShape.of(routed, tiles, is_up=is_up)
    _project_kernel[(capacity * cdiv(num_outputs, tiles.block_n),)](
        readable(values, chip),
        scales,
        ExpertWeight.of(weight, chip),
        None if is_up else routed.routing_weights,
        output,
        listed,
        values.stride(0) if is_up else None,
        0 if scales is None else scales.stride(0),
        capacity,
        MULTIPLY=_multiply_raw if isinstance(weight, Raw) else _multiply_quantised,
        SHAPE=shape,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **OVERLAPPED,
    )


@quick
@triton.jit(do_not_specialize=("scales_stride", "capacity"))
def _project_kernel(
    rows,
    row_scales,
    weight,
    routing_weights,
    output,
    groups,
    stride,
    scales_stride,
    capacity,
    MULTIPLY: tl.constexpr,
    SHAPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Makes a tile of a block's outputs. Rows are tokens', `stride` apart, and outputs lie by
    group; or, without a stride, rows lie by group, and outputs are routed tokens'."""
    launch_dependents()
    wait_for_inputs()
    OUTPUTS: tl.constexpr = SHAPE.outputs
    TILES: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert, first_row, end = find_block(groups, capacity, block)
    if expert < 0:
        return
    o_m = first_row + tl.arange(0, BLOCK_M)
    is_row = o_m < end
    # Rows beyond the expert's read another one, and outputs beyond the last wrap: neither is
    # stored.
    if stride is None:
        row = tl.where(is_row, o_m, first_row).to(tl.int64)
        p_x = rows + row[:, None] * SHAPE.inputs
    else:
        row = (load_routed(groups.order, o_m, is_row) // SHAPE.top_k).to(tl.int64)
        p_x = rows + row[:, None] * stride
    # Raw weights leave registers for what is needed after the products.
    if stride is None and weight.scales is None:
        o_target, b_weight = _load_target(groups.order, routing_weights, o_m, is_row)
    p_row_scale = None if row_scales is None else row_scales + row
    o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b_up, b_gate = MULTIPLY(p_x, p_row_scale, scales_stride, weight, expert, o_n % OUTPUTS, SHAPE)
    if stride is None and weight.scales is not None:
        o_target, b_weight = _load_target(groups.order, routing_weights, o_m, is_row)
    if stride is not None:
        o_target = o_m.to(tl.int64)
        b_o = activate(b_up, b_gate, SHAPE.is_gated)
    else:
        b_o = b_up * (b_weight[None, :] if SHAPE.is_swapped else b_weight[:, None])
    b_o = b_o.to(output.dtype.element_ty)
    o_target *= OUTPUTS
    if SHAPE.is_swapped:
        mask = (o_n < OUTPUTS)[:, None] & is_row[None, :]
        tl.store(output + o_target[None, :] + o_n[:, None], b_o, mask=mask)
    else:
        mask = is_row[:, None] & (o_n < OUTPUTS)[None, :]
        tl.store(output + o_target[:, None] + o_n[None, :], b_o, mask=mask)


@triton.jit
def _load_target(order, routing_weights, o_m, is_row):
    """Loads the rows' routed tokens, and their weights in float32."""
    routed = load_routed(order, o_m, is_row).to(tl.int64)
    return routed, tl.load(routing_weights + routed, mask=is_row, other=0.0).to(tl.float32)


@triton.jit
def _load(pointers, i_k, o_k, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Loads a tile [rows, BLOCK_K] from input i_k on."""
    if INPUTS % BLOCK_K == 0:
        return tl.load(pointers + i_k)
    else:
        return tl.load(pointers + i_k, mask=(i_k + o_k < INPUTS)[None, :], other=0.0)


@triton.jit
def _add(left, right, acc, SWAPPED: tl.constexpr):
    """Returns acc + left @ right.T, transposed if SWAPPED."""
    if SWAPPED:
        return tl.dot(right, tl.trans(left), acc, input_precision="ieee")
    else:
        return tl.dot(left, tl.trans(right), acc, input_precision="ieee")


@triton.jit
def _multiply_raw(p_x, p_row_scale, scales_stride, weight, expert, column, SHAPE: tl.constexpr):
    """Multiplies rows by the outputs `column` [O], and by their gates if there are any: [M, O],
    or [O, M] if swapped."""
    INPUTS: tl.constexpr = SHAPE.inputs
    OUTPUTS: tl.constexpr = SHAPE.outputs
    GATED: tl.constexpr = SHAPE.is_gated
    SWAPPED: tl.constexpr = SHAPE.is_swapped
    BLOCK_K: tl.constexpr = SHAPE.block_k
    HEIGHT: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    o_k = tl.arange(0, BLOCK_K)
    p_x += o_k[None, :]
    # Up rows stand after the gates'.
    p_gate = weight.numbers + expert * (HEIGHT * INPUTS) + column[:, None] * INPUTS + o_k[None, :]
    p_up = p_gate + (HEIGHT - OUTPUTS) * INPUTS
    if SWAPPED:
        b_gate = tl.zeros([column.shape[0], p_x.shape[0]], tl.float32)
    else:
        b_gate = tl.zeros([p_x.shape[0], column.shape[0]], tl.float32)
    b_up = b_gate
    for i_k in range(0, INPUTS, BLOCK_K):
        b_x = _load(p_x, i_k, o_k, INPUTS, BLOCK_K)
        if GATED:
            b_gate = _add(b_x, _load(p_gate, i_k, o_k, INPUTS, BLOCK_K), b_gate, SWAPPED)
        b_up = _add(b_x, _load(p_up, i_k, o_k, INPUTS, BLOCK_K), b_up, SWAPPED)
    return b_up, b_gate


@triton.jit
def _multiply_quantised(
    p_x, p_row_scale, scales_stride, weight, expert, column, SHAPE: tl.constexpr
):
    """Multiplies as `_multiply_raw`, always swapped."""
    INPUTS: tl.constexpr = SHAPE.inputs
    OUTPUTS: tl.constexpr = SHAPE.outputs
    GATED: tl.constexpr = SHAPE.is_gated
    BLOCK_K: tl.constexpr = SHAPE.block_k
    HEIGHT: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    GROUP: tl.constexpr = SHAPE.group
    BLOCKED: tl.constexpr = SHAPE.has_block_scales
    NATIVE: tl.constexpr = SHAPE.is_native
    ROUNDED: tl.constexpr = p_row_scale is not None
    o_x, o_w = columns(BLOCK_K, GROUP)
    p_x += o_x[None, :]
    input_scale = None if weight.input_scales is None else tl.load(weight.input_scales + expert)
    # Up rows stand after the gates'.
    up_row = column + (HEIGHT - OUTPUTS)
    own = weight.numbers + expert * (HEIGHT * pitch(INPUTS, GROUP)) + o_w[None, :]
    p_gate = own + column[:, None] * pitch(INPUTS, GROUP)
    p_up = own + up_row[:, None] * pitch(INPUTS, GROUP)
    p_gate_scale, p_gate_zero = find_scales(
        weight, expert, column, HEIGHT, GROUP, SHAPE.depths, SHAPE.scale_rows
    )
    p_up_scale, p_up_zero = find_scales(
        weight, expert, up_row, HEIGHT, GROUP, SHAPE.depths, SHAPE.scale_rows
    )
    b_gate = tl.zeros([column.shape[0], p_x.shape[0]], tl.float32)
    b_up = b_gate
    gate_scale, gate_zero, _ = load_scales(
        p_gate_scale, p_gate_zero, None, scales_stride, 0, INPUTS, BLOCK_K, GROUP, BLOCKED
    )
    up_scale, up_zero, row_scale = load_scales(
        p_up_scale, p_up_zero, p_row_scale, scales_stride, 0, INPUTS, BLOCK_K, GROUP, BLOCKED
    )
    for i_k in range(0, INPUTS, BLOCK_K):
        next_up_scale, next_up_zero, next_row_scale = load_scales(
            p_up_scale, p_up_zero, p_row_scale, scales_stride, i_k + BLOCK_K,
            INPUTS, BLOCK_K, GROUP, BLOCKED,
        )  # fmt: skip
        if GATED:
            next_gate_scale, next_gate_zero, _ = load_scales(
                p_gate_scale, p_gate_zero, None, scales_stride, i_k + BLOCK_K,
                INPUTS, BLOCK_K, GROUP, BLOCKED,
            )  # fmt: skip
            b_gate = add_step(
                b_gate, p_x, input_scale, p_gate, p_gate_scale, p_gate_zero,
                gate_scale, gate_zero, row_scale, i_k, BLOCK_K, GROUP, BLOCKED, NATIVE, ROUNDED,
            )  # fmt: skip
            gate_scale, gate_zero = next_gate_scale, next_gate_zero
        b_up = add_step(
            b_up, p_x, input_scale, p_up, p_up_scale, p_up_zero,
            up_scale, up_zero, row_scale, i_k, BLOCK_K, GROUP, BLOCKED, NATIVE, ROUNDED,
        )  # fmt: skip
        up_scale, up_zero, row_scale = next_up_scale, next_up_zero, next_row_scale
    if GROUP == 0 and not BLOCKED:
        whole = whole_scale(p_row_scale, input_scale)
        b_gate *= tl.load(p_gate_scale)[:, None] * whole
        b_up *= tl.load(p_up_scale)[:, None] * whole
    if GROUP < 0:
        b_gate *= factors(p_gate_zero)[:, None]
        b_up *= factors(p_up_zero)[:, None]
    if not NATIVE:
        b_gate *= 65536.0
        b_up *= 65536.0
    return b_up, b_gate
