"""Experts of int4 weights and many rows on Hopper, in Gluon: `grouped_parts` with int4 filled in.

`inputs` [2 * STAGES, BLOCK_M, HALF] are both halves of a step's inputs, and `weights` [2 * STAGES,
BLOCK, HALF / 2] have two bytes in a number.

Legend: P routed tokens, H hidden size, I an expert's size, N outputs of a group, M rows.
"""

from __future__ import annotations

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
from milepost.kernels.products.forms.quantised import BLOCK, Int4
from milepost.kernels.products.grouping import group_many
from milepost.kernels.products.hopper import grouped_parts as parts
from milepost.kernels.products.hopper.grouped_parts import (
    ExpertOutput,
    ExpertScales,
    GroupedForm,
    GroupedStages,
    GroupStrides,
    ProjectionShape,
    find_block,
    load_weights,
    open_bars,
    produce_gathered,
    wait_for_room,
)
from milepost.kernels.products.hopper.int4_grouped_parts import (
    HALF,
    OF_OUTPUTS,
    load_scales,
    multiply,
)
from milepost.kernels.products.portable.activation import activate
from milepost.kernels.products.run_experts import RoutedRows

_STAGES = {64: 6, 128: 4}
"""Stages by a block's rows: as many as there is room for."""
_SOME_ROWS = 48
"""Rows of an expert up to which blocks have 64 rows (a layer of 257 experts on an H100: with 36
rows 296 us, blocks of 128 315; with 72 rows 442 and 411)."""
_BOX = 64
"""Rows that TMA brings at a time."""
_ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_WEIGHTS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
_STORED = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
"""Layout of products [N, M] on their way to memory, where a row's outputs lie side by side."""

_ROWS = gl.constexpr(_ROWS_LAYOUT)
_BLOCK, _HALF = gl.constexpr(BLOCK), gl.constexpr(HALF)
_WEIGHT_BYTES = gl.constexpr(2 * BLOCK * HALF)
"""Bytes of a step."""


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    return run_blocks(routed, 64 if routed.rows_each <= _SOME_ROWS else 128)


def run_blocks(routed: RoutedRows, block_m: int) -> Tensor:
    """`run` with blocks of `block_m` rows; the bits do not depend on it."""
    up, down = routed.up, routed.down
    assert isinstance(up, Int4), "the kernel's form"
    assert isinstance(down, Int4), "experts have one form"
    groups = group_many(routed.experts, routed.num_experts, block_m)
    active = routed.values.new_empty(routed.num_routed, routed.size)
    output = routed.new_output(routed.experts.shape[1])
    how = {"block_m": block_m, "stages": _STAGES[block_m], "is_bfloat": False, "parts": 2}
    parts.launch(
        routed.values,
        _boxes(up),
        ExpertScales(up.scales, up.zeros),
        ExpertOutput(active),
        groups,
        GroupStrides(),
        ProjectionShape.of(up, routed.size, top_k=routed.experts.shape[1], group=up.group, **how),
        GroupedForm(_open_gathered, _produce_gathered, _consume_up),
    )
    parts.launch(
        TensorDescriptor.from_tensor(active, [_BOX, HALF], _ROWS_LAYOUT),
        _boxes(down),
        ExpertScales(down.scales, down.zeros),
        ExpertOutput(output, routing_weights=routed.routing_weights),
        groups,
        GroupStrides(),
        ProjectionShape.of(down, output.shape[-1], top_k=1, group=down.group, **how),
        GroupedForm(_open, _produce, _consume_down),
    )
    return output


def _boxes(weight: Int4) -> TensorDescriptor:
    packed = weight.packed.view(torch.int16).view(-1, weight.num_inputs // 4)
    return TensorDescriptor.from_tensor(packed, [BLOCK, HALF // 2], _WEIGHTS_LAYOUT)


@gluon.jit
def _open_gathered(DTYPE: gl.constexpr, weight, SHAPE: gl.constexpr):
    return _open_stages(DTYPE, weight, SHAPE, 2)


@gluon.jit
def _open(DTYPE: gl.constexpr, weight, SHAPE: gl.constexpr):
    return _open_stages(DTYPE, weight, SHAPE, 1)


@gluon.jit
def _open_stages(DTYPE: gl.constexpr, weight, SHAPE: gl.constexpr, LOADERS: gl.constexpr):
    """Allocates shared memory for the stages, and barriers, for so many LOADERS of one."""
    STAGES: gl.constexpr = SHAPE.stages
    BLOCK_M: gl.constexpr = SHAPE.block_m
    inputs = gl.allocate_shared_memory(DTYPE, [2 * STAGES, BLOCK_M, _HALF], _ROWS)
    shape: gl.constexpr = [2 * STAGES, _BLOCK, _HALF // 2]
    weights = gl.allocate_shared_memory(weight.dtype, shape, weight.layout)
    return GroupedStages(inputs, weights, open_bars(STAGES, LOADERS))


@gluon.jit
def _produce_gathered(stages, work, rows, stride, weight, SHAPE: gl.constexpr):
    produce_gathered(
        stages, work, rows, stride, weight, SHAPE, _find_rows, _copy_rows, _WEIGHT_BYTES
    )


@gluon.jit
def _find_rows(rows, stride, order, first_row, end, SHAPE: gl.constexpr):
    """Pointers to a block's rows, and which of them are an expert's: no others are copied."""
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BLOCK_M: gl.constexpr = SHAPE.block_m
    o_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPIED))
    o_k = gl.arange(0, _HALF, layout=gl.SliceLayout(0, COPIED))
    token = gl.load(order + gl.minimum(first_row + o_m, end - 1)) // SHAPE.top_k
    p_x = rows + (token.to(gl.int64) * stride)[:, None] + o_k[None, :]
    return p_x, (first_row + o_m < end)[:, None]


@gluon.jit
def _copy_rows(found, step, stages, stage):
    p_x, is_row = found
    for half in gl.static_range(2):
        p_half = p_x + (step * _BLOCK + half * _HALF)
        place = stages.inputs.index(2 * stage + half)
        async_copy.async_copy_global_to_shared(place, p_half, mask=is_row)


@gluon.jit
def _produce(stages, work, active, stride, weight, SHAPE: gl.constexpr):
    """Loads every step of every tile as soon as there is room."""
    inputs, bars = stages.inputs, stages.bars
    BOX: gl.constexpr = active.block_type.shape[0]
    LEAST: gl.constexpr = _WEIGHT_BYTES + 4 * BOX * _HALF
    number = 0
    for index in range(gl.program_id(0), work.num_tiles, gl.num_programs(0)):
        expert, first_row, end = find_block(work, index // SHAPE.tiles)
        row = expert * SHAPE.height + index % SHAPE.tiles * SHAPE.wide
        # Blocks of few rows have no second box.
        is_tall = end - first_row > BOX
        for step in range(SHAPE.steps):
            stage = wait_for_room(number, bars, SHAPE.stages)
            bar = bars.index(stage)
            if SHAPE.block_m > BOX:
                mbarrier.expect(bar, LEAST + 4 * BOX * _HALF, pred=is_tall)
                mbarrier.expect(bar, LEAST, pred=end - first_row <= BOX)
            else:
                mbarrier.expect(bar, LEAST)
            load_weights(weight, row, step, stages, stage, SHAPE)
            for half in gl.static_range(2):
                place, column = inputs.index(2 * stage + half), step * _BLOCK + half * _HALF
                load_box(active, [first_row, column], bar, place.slice(0, BOX, 0))
                if SHAPE.block_m > BOX:
                    rest = place.slice(BOX, BOX, 0)
                    load_box(active, [first_row + BOX, column], bar, rest, pred=is_tall)
            number += 1


@gluon.jit
def _consume_up(stages, work, scales, output, OWN: gl.constexpr, SHAPE: gl.constexpr):
    _consume(stages, work, scales, output, OWN, SHAPE, _make_active)


@gluon.jit
def _consume_down(stages, work, scales, output, OWN: gl.constexpr, SHAPE: gl.constexpr):
    _consume(stages, work, scales, output, OWN, SHAPE, _make_outputs)


@gluon.jit
def _consume(
    stages, work, scales, output, OWN: gl.constexpr, SHAPE: gl.constexpr, MAKE: gl.constexpr
):
    """Makes the 64 outputs of both parts of each tile that belong to the group OWN; MAKE multiplies
    and stores a tile's first WIDTH rows."""
    BLOCK_M: gl.constexpr = SHAPE.block_m
    PITCH: gl.constexpr = SHAPE.steps * _BLOCK // SHAPE.group
    STRIDE: gl.constexpr = SHAPE.apart * PITCH
    number, first_index = 0, gl.program_id(0)
    # There may be more programs than tiles.
    start = gl.minimum(first_index, work.num_tiles - 1)
    expert, first_row, end = find_block(work, start // SHAPE.tiles)
    place = _find_outputs(expert, start % SHAPE.tiles, OWN, SHAPE) * PITCH
    held = load_scales(scales.weights + place, scales.zeros + place, STRIDE, 0)
    for index in range(first_index, work.num_tiles, gl.num_programs(0)):
        # Looked up a tile ahead, or each would begin with waiting.
        following = gl.minimum(index + gl.num_programs(0), work.num_tiles - 1)
        next_expert, next_row, next_end = find_block(work, following // SHAPE.tiles)
        next_place = _find_outputs(next_expert, following % SHAPE.tiles, OWN, SHAPE) * PITCH
        own = scales.weights + place, scales.zeros + place
        next_own = scales.weights + next_place, scales.zeros + next_place
        column = index % SHAPE.tiles * SHAPE.wide + OWN * _HALF
        tile = first_row, end, column, number
        # An expert's last block is often less than half full: then half the rows are multiplied.
        scaled, groups = (held, own, next_own), work.groups
        if end - first_row <= BLOCK_M // 2:
            held = MAKE(stages, output, groups, tile, scaled, OWN, BLOCK_M // 2, STRIDE, SHAPE)
        else:
            held = MAKE(stages, output, groups, tile, scaled, OWN, BLOCK_M, STRIDE, SHAPE)
        expert, first_row, end, place = next_expert, next_row, next_end, next_place
        number += SHAPE.steps


@gluon.jit
def _find_outputs(expert, tile, OWN: gl.constexpr, SHAPE: gl.constexpr):
    """The rows of weights [N] that a group has of a tile's first part."""
    o_n = OWN * _HALF + gl.arange(0, _HALF, OF_OUTPUTS)
    return (expert * SHAPE.height + tile * SHAPE.wide).to(gl.int64) + o_n


@gluon.jit
def _make_active(
    stages,
    output,
    groups,
    tile,
    scaled,
    OWN: gl.constexpr,
    WIDTH: gl.constexpr,
    STRIDE: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Makes a tile of activations; returns the next tile's first scales. `scaled` are the first
    ones, and pointers to the tile's and the next one's."""
    held, own, next_own = scaled
    first, second = multiply(stages, held, own[0], own[1], STRIDE, tile[3], OWN, WIDTH, SHAPE)
    held = load_scales(next_own[0], next_own[1], STRIDE, 0)
    if SHAPE.is_gated:
        _store_active(output.base, tile, activate(second, first, True), 0, SHAPE)
    else:
        _store_active(output.base, tile, activate(first, first, False), 0, SHAPE)
        _store_active(output.base, tile, activate(second, second, False), _BLOCK, SHAPE)
    return held


@gluon.jit
def _make_outputs(
    stages,
    output,
    groups,
    tile,
    scaled,
    OWN: gl.constexpr,
    WIDTH: gl.constexpr,
    STRIDE: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Makes a tile of outputs, as `_make_active`."""
    held, own, next_own = scaled
    first_row, end, column, number = tile
    row = first_row + gl.arange(0, WIDTH, gl.SliceLayout(0, _STORED))
    routed = gl.load(groups.order + gl.minimum(row, end - 1))
    first, second = multiply(stages, held, own[0], own[1], STRIDE, number, OWN, WIDTH, SHAPE)
    held = load_scales(next_own[0], next_own[1], STRIDE, 0)
    routing_weight = gl.load(output.routing_weights + routed).to(gl.float32)
    o_n = column + gl.arange(0, first.shape[0], gl.SliceLayout(1, _STORED))
    p_first = output.base + routed.to(gl.int64)[None, :] * SHAPE.outputs + o_n[:, None]
    is_row = (row < end)[None, :]
    _store_outputs(p_first, first, routing_weight, is_row)
    _store_outputs(p_first + _BLOCK, second, routing_weight, is_row)
    return held


@gluon.jit
def _store_active(active, tile, values, beyond, SHAPE: gl.constexpr):
    """Stores a part's activations, whose outputs begin `beyond` the tile's first."""
    first_row, end, column, _ = tile
    values = gl.convert_layout(values.to(active.dtype.element_ty), _STORED)
    row = first_row + gl.arange(0, values.shape[1], gl.SliceLayout(0, _STORED))
    o_n = column + beyond + gl.arange(0, values.shape[0], gl.SliceLayout(1, _STORED))
    p_active = active + row.to(gl.int64)[None, :] * SHAPE.outputs + o_n[:, None]
    gl.store(p_active, values, mask=(row < end)[None, :])


@gluon.jit
def _store_outputs(p_target, values, routing_weight, is_row):
    values = gl.convert_layout(values, p_target.type.layout) * routing_weight[None, :]
    gl.store(p_target, values.to(p_target.dtype.element_ty), mask=is_row)
