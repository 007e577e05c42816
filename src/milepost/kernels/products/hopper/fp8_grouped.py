"""Experts of FP8 weights and many rows on Hopper, in Gluon: `grouped_parts` with FP8 filled in.

What the up projection makes is laid out by blocks, with room for all of a block's rows, so that the
down projection finds boxes. `inputs` [2 * STAGES, HALF, BLOCK] are both halves of the rows.

Legend: B rows of all blocks, P routed tokens, T tokens, H hidden size, I an expert's size, D scales
of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import load_box
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.grouping import group_many
from milepost.kernels.products.hopper import grouped_parts as parts
from milepost.kernels.products.hopper.fp8_grouped_parts import (
    HALF,
    RESULT,
    multiply,
    round_active,
    skip,
)
from milepost.kernels.products.hopper.grouped_parts import (
    ExpertOutput,
    ExpertScales,
    GroupedForm,
    GroupStrides,
    ProjectionShape,
    find_block,
    load_weights,
    open_bars,
    produce_gathered,
    wait_for_room,
)
from milepost.kernels.products.portable.grouped_large import new_rounded
from milepost.kernels.products.portable.rounding import round_rows
from milepost.kernels.products.run_experts import RoutedRows

BLOCK_M = 2 * HALF
_STAGES = 4
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_HALF, _BLOCK = gl.constexpr(HALF), gl.constexpr(BLOCK)


class TurnStages(NamedTuple):
    """Stages, and barriers by which two groups of warps take turns."""

    inputs: Any
    weights: Any
    bars: Any
    turns: Any


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    up, down = routed.up, routed.down
    assert isinstance(up, Fp8), "the kernel's form"
    assert isinstance(down, Fp8), "experts have one form"
    groups = group_many(routed.experts, routed.num_experts, BLOCK_M)
    active, active_scales = new_rounded(routed, groups.blocks.shape[1] * BLOCK_M)
    output = routed.new_output(routed.experts.shape[1])
    rows, row_scales = round_rows(routed.rows, up, routed.chip, are_few=False)
    assert row_scales is not None, "rows are rounded in blocks"
    is_bfloat = output.dtype == torch.bfloat16
    how = {"group": BLOCK, "block_m": BLOCK_M, "stages": _STAGES, "is_bfloat": is_bfloat}
    top_k, num_parts = routed.experts.shape[1], 1 + routed.is_gated
    parts.launch(
        rows,
        _boxes(up),
        ExpertScales(up.scales, rows=row_scales),
        ExpertOutput(active, active_scales),
        groups,
        GroupStrides(row_scales.stride(0), active_scales.stride(0)),
        ProjectionShape.of(up, routed.size, parts=num_parts, top_k=top_k, **how),
        GroupedForm(_open_gathered, _produce_gathered, _consume_up),
    )
    num_parts = 2 if output.shape[-1] % (2 * BLOCK) == 0 else 1
    parts.launch(
        TensorDescriptor.from_tensor(active, [HALF, BLOCK], _LAYOUT),
        _boxes(down),
        ExpertScales(down.scales, rows=active_scales),
        ExpertOutput(output, routing_weights=routed.routing_weights),
        groups,
        GroupStrides(active_scales.stride(0)),
        ProjectionShape.of(down, output.shape[-1], parts=num_parts, top_k=1, **how),
        GroupedForm(_open, _produce, _consume_down),
    )
    return output


def _boxes(weight: Fp8) -> TensorDescriptor:
    matrix = weight.values.view(-1, weight.num_inputs)
    return TensorDescriptor.from_tensor(matrix, [BLOCK, BLOCK], _LAYOUT)


@gluon.jit
def _open_gathered(DTYPE: gl.constexpr, weight, SHAPE: gl.constexpr):
    return _open_stages(weight, SHAPE, 2)


@gluon.jit
def _open(DTYPE: gl.constexpr, weight, SHAPE: gl.constexpr):
    return _open_stages(weight, SHAPE, 1)


@gluon.jit
def _open_stages(weight, SHAPE: gl.constexpr, LOADERS: gl.constexpr):
    """Allocates stages, their barriers for LOADERS of a stage each, and barriers for turns."""
    STAGES: gl.constexpr = SHAPE.stages
    PARTS: gl.constexpr = SHAPE.parts
    dtype: gl.constexpr = weight.dtype
    inputs = gl.allocate_shared_memory(dtype, [2 * STAGES, _HALF, _BLOCK], weight.layout)
    weights = gl.allocate_shared_memory(dtype, [PARTS * STAGES, _BLOCK, _BLOCK], weight.layout)
    bars = open_bars(STAGES, LOADERS)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(turns.index(half), count=1)
    return TurnStages(inputs, weights, bars, turns)


@gluon.jit
def _produce_gathered(stages, work, rows, stride, weight, SHAPE: gl.constexpr):
    BYTES: gl.constexpr = SHAPE.parts * _BLOCK * _BLOCK
    produce_gathered(stages, work, rows, stride, weight, SHAPE, _find_rows, _copy_rows, BYTES)


@gluon.jit
def _find_rows(rows, stride, order, first_row, end, SHAPE: gl.constexpr):
    """Pointers to both halves of a block's rows, and whether there is a second one: an expert's
    last block is often less than half full."""
    COPIED: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    o_m = gl.arange(0, _HALF, layout=gl.SliceLayout(1, COPIED))
    o_k = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, COPIED))
    first = gl.load(order + gl.minimum(first_row + o_m, end - 1)) // SHAPE.top_k
    second = gl.load(order + gl.minimum(first_row + _HALF + o_m, end - 1)) // SHAPE.top_k
    p_first = rows + (first * stride)[:, None] + o_k[None, :]
    p_second = rows + (second * stride)[:, None] + o_k[None, :]
    return p_first, p_second, end - first_row > _HALF


@gluon.jit
def _copy_rows(found, step, stages, stage):
    p_first, p_second, is_tall = found
    at = step * _BLOCK
    async_copy.async_copy_global_to_shared(stages.inputs.index(2 * stage), p_first + at)
    if is_tall:
        async_copy.async_copy_global_to_shared(stages.inputs.index(2 * stage + 1), p_second + at)


@gluon.jit
def _produce(stages, work, active, stride, weight, SHAPE: gl.constexpr):
    """Loads every step of every tile as soon as there is room."""
    inputs, bars = stages.inputs, stages.bars
    LEAST: gl.constexpr = (_HALF + SHAPE.parts * _BLOCK) * _BLOCK
    number = 0
    for index in range(gl.program_id(0), work.num_tiles, gl.num_programs(0)):
        block = index // SHAPE.tiles
        expert, first_row, end = find_block(work, block)
        first = block * (2 * _HALF)
        row = expert * SHAPE.height + index % SHAPE.tiles * SHAPE.wide
        is_tall = end - first_row > _HALF
        for step in range(SHAPE.steps):
            stage = wait_for_room(number, bars, SHAPE.stages)
            bar, at = bars.index(stage), step * _BLOCK
            mbarrier.expect(bar, LEAST + _HALF * _BLOCK, pred=is_tall)
            mbarrier.expect(bar, LEAST, pred=end - first_row <= _HALF)
            load_weights(weight, row, step, stages, stage, SHAPE)
            load_box(active, [first, at], bar, inputs.index(2 * stage))
            load_box(active, [first + _HALF, at], bar, inputs.index(2 * stage + 1), pred=is_tall)
            number += 1


@gluon.jit
def _consume_up(stages, work, scales, output, HALF_TILE: gl.constexpr, SHAPE: gl.constexpr):
    """Makes one group's rows of each tile of activations, and rounds them."""
    STEPS: gl.constexpr = SHAPE.steps
    o_m = HALF_TILE * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, RESULT))
    number, turn = 0, 0
    for index in range(gl.program_id(0), work.num_tiles, gl.num_programs(0)):
        block, tile = index // SHAPE.tiles, index % SHAPE.tiles
        expert, first_row, end = find_block(work, block)
        is_tall = end - first_row > _HALF
        if first_row + HALF_TILE * _HALF < end:
            row = gl.minimum(first_row + o_m, end - 1)
            token = gl.load(work.groups.order + row) // SHAPE.top_k
            p_scale = scales.weights
            p_scale += (expert * (SHAPE.parts * SHAPE.tiles) + tile).to(gl.int64) * STEPS
            gate, up = multiply(
                p_scale, (SHAPE.parts - 1) * SHAPE.tiles * STEPS, scales.rows + token,
                work.strides.scales, number, turn, is_tall, stages, HALF_TILE, SHAPE,
            )  # fmt: skip
            values, scale = round_active(gate, up, SHAPE)
            row = block * (2 * _HALF) + o_m
            gl.store(output.scales + tile * work.strides.output + row, scale)
            first = block * (2 * _HALF) + HALF_TILE * _HALF
            _store_rows(output.base, values, first, tile * _BLOCK, SHAPE.outputs)
        else:
            skip(number, stages.bars, STEPS, SHAPE.stages)
        number += STEPS
        turn += gl.where(is_tall, STEPS * SHAPE.parts, 0)


@gluon.jit
def _consume_down(stages, work, scales, output, HALF_TILE: gl.constexpr, SHAPE: gl.constexpr):
    """Makes one group's rows of each tile of outputs, times their routing weights."""
    STEPS: gl.constexpr = SHAPE.steps
    PARTS: gl.constexpr = SHAPE.parts
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    order = work.groups.order
    o_m = HALF_TILE * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, RESULT))
    o_s = HALF_TILE * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, STORED))
    number, turn, first_index = 0, 0, gl.program_id(0)
    expert, first_row, end = find_block(work, first_index // SHAPE.tiles)
    for index in range(first_index, work.num_tiles, gl.num_programs(0)):
        # Looked up a tile ahead: a tile is four steps, and would begin with waiting.
        following = gl.minimum(index + gl.num_programs(0), work.num_tiles - 1) // SHAPE.tiles
        next_expert, next_row, next_end = find_block(work, following)
        block, tile = index // SHAPE.tiles, index % SHAPE.tiles
        is_tall = end - first_row > _HALF
        if first_row + HALF_TILE * _HALF < end:
            routed = gl.load(order + gl.minimum(first_row + o_m, end - 1))
            target = gl.load(order + gl.minimum(first_row + o_s, end - 1))
            p_scale = scales.weights + (expert * SHAPE.tiles + tile).to(gl.int64) * (PARTS * STEPS)
            p_row = scales.rows + block * (2 * _HALF) + o_m
            weight = gl.load(output.routing_weights + routed).to(gl.float32)
            first, second = multiply(
                p_scale, (PARTS - 1) * STEPS, p_row, work.strides.scales, number, turn, is_tall,
                stages, HALF_TILE, SHAPE,
            )  # fmt: skip
            column = tile * (PARTS * _BLOCK)
            is_row = first_row + o_s < end
            _store_routed(
                output.base, first * weight[:, None], target, is_row, column, SHAPE.outputs
            )
            if PARTS == 2:
                column += _BLOCK
                _store_routed(
                    output.base, second * weight[:, None], target, is_row, column, SHAPE.outputs
                )
        else:
            skip(number, stages.bars, STEPS, SHAPE.stages)
        expert, first_row, end = next_expert, next_row, next_end
        number += STEPS
        turn += gl.where(is_tall, STEPS * PARTS, 0)


@gluon.jit
def _store_rows(active, values, first_row, first_column, SIZE: gl.constexpr):
    """Stores a tile of activations in rows that stand side by side."""
    STORED: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    values = gl.convert_layout(values, STORED)
    row = first_row + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, STORED))
    column = first_column + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, STORED))
    gl.store(active + row.to(gl.int64)[:, None] * SIZE + column[None, :], values)


@gluon.jit
def _store_routed(partials, values, routed, is_row, first_column, OUTPUTS: gl.constexpr):
    """Stores a tile in its routed tokens' rows."""
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    values = gl.convert_layout(values.to(partials.dtype.element_ty), STORED)
    column = first_column + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, STORED))
    target = partials + routed.to(gl.int64)[:, None] * OUTPUTS + column[None, :]
    gl.store(target, values, mask=is_row[:, None])
