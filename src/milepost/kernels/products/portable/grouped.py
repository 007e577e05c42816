"""Triton: the experts' grouped GEMMs over blocks of rows that share an expert, for every form; and
the structures and addresses that other grouped kernels share with them.

An expert's `up` is [2 * I, H], the gates' rows before the ups', or [I, H] if it squares a ReLU;
`down` is [H, I]. One kernel makes both projections: the up projection reads tokens' rows and
activates, the down projection reads what that made and has routing weights.

A few tokens are not grouped by a launch of their own: a tile has room for all, so each program
searches the routing for its expert's rows.

Legend: T tokens, N experts of a token, P = T * N routed tokens, H hidden size, I an expert's size,
M rows of a block, O outputs of a tile, D scales of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import activate
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.expert_table import ROW_BY_ROW, SEARCHED
from milepost.kernels.products.forms.quantised import Int4
from milepost.kernels.products.grouping import Groups, group
from milepost.kernels.products.portable import gemm_step
from milepost.kernels.products.portable.rounding import RoundedRows, readable, round_rows
from milepost.kernels.products.portable.tiles import FEW, Tiles, choose_grouped, choose_many
from milepost.kernels.products.portable.weights import ProductShape, WeightTensors
from milepost.kernels.products.run import RoutedRows


class RowGroups(NamedTuple):
    """`grouping.Groups` as kernel arguments. If routed tokens are not grouped, `order` is None and
    `blocks` are the routed tokens' experts: each is a block, whose rows `find_rows` searches
    for."""

    order: Any
    blocks: Any
    num_blocks: Any = None


class ExpertRows(NamedTuple):
    """Rows that a projection reads or writes, as a kernel argument."""

    base: Any
    scales: Any = None
    """[D, rows] if the rows are rounded."""
    routing_weights: Any = None
    """[P] for outputs that are multiplied by them: those of the down projection."""


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    return run_tiles(routed, *choose_grouped(routed))


def run_many(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H] of many rows an expert, for weights of four bits."""
    return run_tiles(routed, *choose_many(routed))


def run_tiles(routed: RoutedRows, up_tiles: Tiles, down_tiles: Tiles) -> Tensor:
    """Returns partials [T, N, H] with tiles of both projections, which have as many rows."""
    output, (up, down) = routed.new_output(routed.experts.shape[1]), (routed.up, routed.down)
    active = routed.rows.new_empty(routed.num_routed, routed.size)
    groups, are_few = None, routed.num_routed <= ROW_BY_ROW
    if isinstance(up, Int4):
        are_few = up_tiles.scales_first or up_tiles.block_m <= FEW.block_m
    if len(routed.experts) > min(SEARCHED, up_tiles.block_m):
        groups = group(routed.experts, routed.num_experts, up_tiles.block_m)
    rows = round_rows(routed.rows, up, routed.chip, are_few=are_few)
    project(rows, routed, active, groups, up_tiles, is_up=True)
    rows = round_rows(active, down, routed.chip, are_few=are_few)
    project(rows, routed, output, groups, down_tiles, is_up=False)
    return output


def project(
    rows: RoundedRows,
    routed: RoutedRows,
    output: Tensor,
    groups: Groups | None,
    tiles: Tiles,
    *,
    is_up: bool,
) -> None:
    """Fills `output` [P, I], by `groups.order`, with the tokens' `rows` [T, H] through `up` and the
    activation; or `output` [P, H], by routed token, with the routing weights times `rows` [P, I],
    by `groups.order`, through `down`."""
    values, scales = rows
    weight, chip = routed.up if is_up else routed.down, routed.chip
    listed, capacity = RowGroups(None, routed.experts), routed.num_routed
    if groups is not None:
        listed, capacity = RowGroups(groups.order, groups.blocks), groups.blocks.shape[1]
    shape = ProductShape.of(
        weight,
        chip,
        is_gated=is_up and routed.is_gated,
        limit=routed.limit * is_up,
        is_rounded=scales is not None,
        top_k=routed.experts.shape[1],
        **tiles.sizes,
    )
    _project_kernel[(capacity * cdiv(shape.outputs, tiles.block_n),)](
        readable(values, chip),
        scales,
        WeightTensors.of(weight, chip),
        None if is_up else routed.routing_weights,
        output,
        listed,
        values.stride(0) if is_up else None,
        0 if scales is None else scales.stride(0),
        capacity,
        MULTIPLY=gemm_step.choose(weight),
        SHAPE=shape,
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
):
    """Computes a tile of a block's outputs. With a stride, rows are tokens' and outputs lie by
    group (the up projection); without, rows lie by group and outputs are routed tokens'."""
    launch_dependents()
    wait_for_inputs()
    OUTPUTS: tl.constexpr = SHAPE.outputs
    BLOCK_N: tl.constexpr = SHAPE.block_n
    TILES: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert, first_row, row, is_row = find_rows(groups, capacity, block, SHAPE)
    if expert < 0:
        return
    # Rows past the expert's last read another row, and outputs past the last wrap around; neither
    # is stored.
    if stride is None:
        o_x = tl.where(is_row, row, first_row).to(tl.int64)
        # Two codes of e2m1 share a byte.
        HAS_CODES: tl.constexpr = SHAPE.group < 0 and SHAPE.is_rounded
        p_x = rows + o_x[:, None] * (SHAPE.inputs // 2 if HAS_CODES else SHAPE.inputs)
    else:
        o_x = (load_routed(groups.order, row, is_row) // SHAPE.top_k).to(tl.int64)
        p_x = rows + o_x[:, None] * stride
    # Raw weights leave registers to load this before the products.
    if stride is None and weight.scales is None:
        o_target, b_weight = _load_target(groups.order, routing_weights, row, is_row)
    p_row_scale = None if row_scales is None else row_scales + o_x
    o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column = o_n % OUTPUTS
    b_up, b_gate = MULTIPLY(p_x, p_row_scale, scales_stride, weight, expert, column, 0, SHAPE)
    if stride is None and weight.scales is not None:
        o_target, b_weight = _load_target(groups.order, routing_weights, row, is_row)
    if stride is not None:
        o_target = row.to(tl.int64)
        b_o = activate(b_up, b_gate, SHAPE.is_gated, SHAPE.limit)
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
def _load_target(order, routing_weights, row, is_row):
    """Returns the rows' routed tokens, and their routing weights in float32."""
    routed = load_routed(order, row, is_row).to(tl.int64)
    return routed, tl.load(routing_weights + routed, mask=is_row, other=0.0).to(tl.float32)


@triton.jit
def find_block(groups, capacity, block):
    """Returns a block's expert (negative for padding), its first row and the end of the expert's
    rows."""
    expert = tl.load(groups.blocks + block).to(tl.int64)
    first_row = tl.load(groups.blocks + capacity + block)
    end = tl.load(groups.blocks + 2 * capacity + block)
    return expert, first_row, end


@triton.jit
def find_rows(groups, capacity, block, SHAPE: tl.constexpr):
    """Returns a block's expert (negative for padding), its first row, its rows [M] and their
    mask."""
    if groups.order is None:
        return _search(groups.blocks, capacity, block, SHAPE)
    else:
        expert, first_row, end = find_block(groups, capacity, block)
        o_m = first_row + tl.arange(0, SHAPE.block_m)
        is_row = o_m < end
        return expert, first_row, o_m, is_row


@triton.jit
def _search(experts, num_routed, routed, SHAPE: tl.constexpr):
    """Searches the routing of at most M tokens for the rows of a routed token's expert. The
    expert's first routed token has them all; the blocks of its others are padding."""
    o_m, o_n = tl.arange(0, SHAPE.block_m), tl.arange(0, triton.next_power_of_2(SHAPE.top_k))
    o_p = o_m[:, None] * SHAPE.top_k + o_n[None, :]
    is_routed = (o_p < num_routed) & (o_n < SHAPE.top_k)[None, :]
    expert = tl.load(experts + routed)
    has_expert = tl.load(experts + o_p, mask=is_routed, other=-1) == expert
    row = tl.max(tl.where(has_expert, o_p, -1), 1)
    is_row = row >= 0
    first_row = tl.min(tl.where(is_row, row, routed), 0)
    return tl.where(first_row < routed, -1, expert).to(tl.int64), routed, row, is_row


@triton.jit
def load_routed(order, row, is_row):
    """Returns the rows' routed tokens, 0 for masked rows."""
    if order is None:
        return tl.where(is_row, row, 0)
    else:
        return tl.load(order + row, mask=is_row, other=0)
