"""Experts with int4 weights and many rows on Hopper, in Gluon: int4's part of `grouped`.

Two groups of four warps multiply 64 outputs each of both parts of the weights with the same rows.
Weights are the left operand, which the tensor cores take from registers: while they multiply a
quarter of a step for a group, it unpacks the next one. A number is rounded to the rows' type, as
where a launch of its own unpacks it, and so the products have the same bits. Weights in shared
memory have two bytes in a number.

Legend: P routed tokens, T tokens, H hidden size, I an expert's size, N outputs of a group, M rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import (
    boxes_of,
    open_bars,
    release,
    thread_barrier,
    wait_loaded,
)
from milepost.kernels.platform.numerics import activate
from milepost.kernels.products.forms.quantised import BLOCK, Int4
from milepost.kernels.products.grouping import group_many
from milepost.kernels.products.hopper import grouped
from milepost.kernels.products.hopper import int4_numbers as int4
from milepost.kernels.products.hopper.grouped import GroupedForm, GroupedStages, find_block
from milepost.kernels.products.portable.grouped import ExpertRows
from milepost.kernels.products.run import RoutedRows

_STAGES = {64: 6, 128: 4}
"""Stages by the rows of a block: as many as fit shared memory."""
_SOME_ROWS = 48
"""Largest number of rows per expert for which blocks have 64 rows."""
_ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_STORED = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
"""Layout of products [N, M] on their way to memory, where a row's outputs lie side by side."""
_ROWS, _BLOCK, _HALF = gl.constexpr(_ROWS_LAYOUT), gl.constexpr(BLOCK), gl.constexpr(int4.PIECE)
_OF_OUTPUTS = gl.constexpr(gl.SliceLayout(1, int4.PACKED.value))


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    return run_blocks(routed, 64 if routed.rows_each <= _SOME_ROWS else 128)


def run_blocks(routed: RoutedRows, block_m: int) -> Tensor:
    """Returns partials as `run`, with blocks of `block_m` rows. Bits do not depend on it."""
    up, down = routed.weights(Int4)
    groups = group_many(routed.experts, routed.num_experts, block_m)
    active = ExpertRows(routed.values.new_empty(routed.num_routed, routed.size))
    rows, how = ExpertRows(routed.values), {"block_m": block_m, "stages": _STAGES[block_m]}
    weights = _boxes(up), _boxes(down)
    return grouped.run(routed, groups, rows, active, weights, (2, 2), _FORM, **how)


def _boxes(weight: Int4) -> TensorDescriptor:
    return boxes_of(weight.packed.view(torch.int16), BLOCK, int4.PIECE // 2)


@gluon.jit
def _open(DTYPE: gl.constexpr, weight, SHAPE: gl.constexpr):
    """Allocates shared memory for the stages, and their barriers."""
    inputs = gl.allocate_shared_memory(DTYPE, [2 * SHAPE.stages, SHAPE.block_m, _HALF], _ROWS)
    shape: gl.constexpr = [2 * SHAPE.stages, _BLOCK, _HALF // 2]
    weights = gl.allocate_shared_memory(weight.dtype, shape, weight.layout)
    return GroupedStages(inputs, weights, open_bars(SHAPE.stages, SHAPE.loads, 2))


@gluon.jit
def _find_rows(rows, work, first_row, end, SHAPE: gl.constexpr):
    """Returns pointers to a block's rows, and whether each is the expert's: others are not
    copied."""
    COPIED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_m = gl.arange(0, SHAPE.block_m, layout=gl.SliceLayout(1, COPIED))
    o_k = gl.arange(0, _HALF, layout=gl.SliceLayout(0, COPIED))
    token = gl.load(work.groups.order + gl.minimum(first_row + o_m, end - 1)) // SHAPE.top_k
    p_x = rows + (token.to(gl.int64) * work.row_stride)[:, None] + o_k[None, :]
    return p_x, (first_row + o_m < end)[:, None]


@gluon.jit
def _copy_rows(found, step, stages, stage):
    p_x, is_row = found
    for half in gl.static_range(2):
        p_half = p_x + (step * _BLOCK + half * _HALF)
        place = stages.inputs.index(2 * stage + half)
        async_copy.async_copy_global_to_shared(place, p_half, mask=is_row)


@gluon.jit
def _consume(stages, work, scales, output, OWN: gl.constexpr, SHAPE: gl.constexpr):
    """Computes the 64 outputs of both parts of each tile that belong to the group OWN."""
    BLOCK_M: gl.constexpr = SHAPE.block_m
    PITCH: gl.constexpr = SHAPE.steps * _BLOCK // max(SHAPE.group, _BLOCK)
    EACH: gl.constexpr = int4.scales_each(SHAPE.group)
    words = int4.as_words(scales.weights, EACH), int4.as_words(scales.zeros, EACH)
    TYPE: gl.constexpr = scales.weights.dtype.element_ty
    number, first_index = 0, gl.program_id(0)
    # There may be more programs than tiles.
    start = gl.minimum(first_index, work.num_tiles - 1)
    expert, first_row, end = find_block(work, start // SHAPE.tiles)
    place = _find_outputs(expert, start % SHAPE.tiles, OWN, SHAPE) * PITCH
    held = _load_words((words[0] + place, words[1] + place), 0, SHAPE)
    for index in range(first_index, work.num_tiles, gl.num_programs(0)):
        # Looked up a tile ahead, or each would begin with waiting.
        following = gl.minimum(index + gl.num_programs(0), work.num_tiles - 1)
        next_expert, next_row, next_end = find_block(work, following // SHAPE.tiles)
        next_place = _find_outputs(next_expert, following % SHAPE.tiles, OWN, SHAPE) * PITCH
        own = words[0] + place, words[1] + place
        next_own = words[0] + next_place, words[1] + next_place
        column = index % SHAPE.tiles * SHAPE.wide + OWN * _HALF
        tile = first_row, end, column, number
        # An expert's last block is often less than half full: then half the rows are multiplied.
        scaled, order = (held, own, next_own), work.groups.order
        if end - first_row <= BLOCK_M // 2:
            held = _make_tile(stages, output, order, tile, scaled, OWN, TYPE, BLOCK_M // 2, SHAPE)
        else:
            held = _make_tile(stages, output, order, tile, scaled, OWN, TYPE, BLOCK_M, SHAPE)
        expert, first_row, end, place = next_expert, next_row, next_end, next_place
        number += SHAPE.steps


@gluon.jit
def _find_outputs(expert, tile, OWN: gl.constexpr, SHAPE: gl.constexpr):
    """Returns the rows of weights [N] that a group has of a tile's first part."""
    o_n = OWN * _HALF + gl.arange(0, _HALF, _OF_OUTPUTS)
    return (expert * SHAPE.height + tile * SHAPE.wide).to(gl.int64) + o_n


@gluon.jit
def _make_tile(
    stages,
    output,
    order,
    tile,
    scaled,
    OWN: gl.constexpr,
    TYPE: gl.constexpr,
    WIDTH: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Multiplies a tile's first WIDTH rows and stores the outputs. Returns words of scales, of a
    TYPE, of the next tile's first step. `scaled` has those of this tile's first step, and pointers
    to all words of both tiles."""
    held, own, next_own = scaled
    first_row, end, column, number = tile
    if not SHAPE.is_up:
        row = first_row + gl.arange(0, WIDTH, gl.SliceLayout(0, _STORED))
        routed = gl.load(order + gl.minimum(row, end - 1))
    first, second = _multiply(stages, held, own, number, OWN, TYPE, WIDTH, SHAPE)
    held = _load_words(next_own, 0, SHAPE)
    if not SHAPE.is_up:
        routing_weight = gl.load(output.routing_weights + routed).to(gl.float32)
        o_n = column + gl.arange(0, first.shape[0], gl.SliceLayout(1, _STORED))
        p_first = output.base + routed.to(gl.int64)[None, :] * SHAPE.outputs + o_n[:, None]
        is_row = (row < end)[None, :]
        _store_outputs(p_first, first, routing_weight, is_row)
        _store_outputs(p_first + _BLOCK, second, routing_weight, is_row)
    elif SHAPE.is_gated:
        _store_active(output.base, tile, activate(second, first, True, SHAPE.limit), 0, SHAPE)
    else:
        _store_active(output.base, tile, activate(first, first, False), 0, SHAPE)
        _store_active(output.base, tile, activate(second, second, False), _BLOCK, SHAPE)
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


@gluon.jit
def _load_words(own, block, SHAPE: gl.constexpr):
    """Loads the words of a block's scales and zero points [N] by part; `own` points to a row's
    first ones."""
    DEPTH: gl.constexpr = max(SHAPE.group, _BLOCK)
    STRIDE: gl.constexpr = SHAPE.apart * (SHAPE.steps * _BLOCK // DEPTH)
    word = block * _BLOCK // DEPTH
    scales, zeros = (), ()
    for part in gl.static_range(2):
        scales += (gl.load(own[0] + part * STRIDE + word),)
        zeros += (gl.load(own[1] + part * STRIDE + word),)
    return scales, zeros


@gluon.jit
def _multiply(
    stages,
    held,
    own,
    number,
    OWN: gl.constexpr,
    TYPE: gl.constexpr,
    WIDTH: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Returns both parts' products [N, WIDTH] of a tile. Its first step is the program's step
    `number` and has the words of scales `held`; `own` points to all of them.

    While a quarter of a step is multiplied, the next one is unpacked. Two products are never under
    way at once: ptxas waits for one whose operand is in registers."""
    inputs, weights, bars = stages.inputs, stages.weights, stages.bars
    STEPS: gl.constexpr = SHAPE.steps
    dtype: gl.constexpr = inputs.dtype
    scales, zeros = held
    first = gl.zeros([_HALF, WIDTH], gl.float32, int4.products_layout(WIDTH))
    second = gl.zeros([_HALF, WIDTH], gl.float32, int4.products_layout(WIDTH))
    packed = _load_packed(weights, 2 * wait_loaded(bars, number), OWN)
    left = int4.unpack_pairs(packed, (scales[0], zeros[0]), 0, TYPE, dtype, WIDTH, SHAPE)
    for step in range(STEPS):
        stage = number % SHAPE.stages
        rows = inputs.index(2 * stage).slice(0, WIDTH, 0).permute((1, 0))
        later_rows = inputs.index(2 * stage + 1).slice(0, WIDTH, 0).permute((1, 0))
        ahead = gl.minimum(step + 1, STEPS - 1)
        next_scales, next_zeros = _load_words(own, ahead, SHAPE)
        product = warpgroup_mma(left, rows, first, is_async=True)
        left = int4.unpack_pairs(packed, (scales[0], zeros[0]), 1, TYPE, dtype, WIDTH, SHAPE)
        first = warpgroup_mma_wait(0, [product])
        product = warpgroup_mma(left, later_rows, first, is_async=True)
        packed = _load_packed(weights, 2 * stage + 1, OWN)
        left = int4.unpack_pairs(packed, (scales[1], zeros[1]), 0, TYPE, dtype, WIDTH, SHAPE)
        first = warpgroup_mma_wait(0, [product])
        product = warpgroup_mma(left, rows, second, is_async=True)
        left = int4.unpack_pairs(packed, (scales[1], zeros[1]), 1, TYPE, dtype, WIDTH, SHAPE)
        second = warpgroup_mma_wait(0, [product])
        # The next step; after the last, the same one again, whose result is not used.
        number += gl.where(step + 1 < STEPS, 1, 0)
        next_box = 2 * wait_loaded(bars, number)
        scales, zeros = next_scales, next_zeros
        product = warpgroup_mma(left, later_rows, second, is_async=True)
        packed = _load_packed(weights, next_box, OWN)
        left = int4.unpack_pairs(packed, (scales[0], zeros[0]), 0, TYPE, dtype, WIDTH, SHAPE)
        second = warpgroup_mma_wait(0, [product])
        thread_barrier()
        release(bars, stage)
    return first, second


@gluon.jit
def _load_packed(weights, box, OWN: gl.constexpr):
    """Loads the packed weights of a group's outputs."""
    return weights.index(box).slice(OWN * _HALF, _HALF).load(int4.PACKED)


_FORM = GroupedForm(_open, _find_rows, _copy_rows, _consume)
