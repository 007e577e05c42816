"""Experts with FP8 weights and many rows on Hopper, in Gluon: FP8's part of `grouped`.

Two groups of four warps multiply 64 rows each of the same block: while one adds a step's product up
in float32, times its scales, the other's runs on the tensor cores. They take turns: if both began
at once, both would end at once and leave the tensor cores idle. A step is as deep as a block that
shares a scale.

Outputs of the up projection are laid out by blocks, with room for all of a block's rows, so that
TMA can load them for the down projection.

Legend: P routed tokens, T tokens, N experts of a token, H hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from milepost.kernels.platform.gluon import (
    boxes_of,
    open_bars,
    release,
    round_block,
    wait_loaded,
)
from milepost.kernels.platform.numerics import multiply_within
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.grouping import group_many
from milepost.kernels.products.hopper import grouped
from milepost.kernels.products.hopper.grouped import GroupedForm, find_block
from milepost.kernels.products.portable.grouped import ExpertRows
from milepost.kernels.products.portable.grouped_large import new_rounded
from milepost.kernels.products.portable.rounding import round_rows
from milepost.kernels.products.run import RoutedRows

_ROWS, _STAGES = 64, 4
"""Rows of a group of warps, half of a block's; and stages."""
_HALF, _BLOCK = gl.constexpr(_ROWS), gl.constexpr(BLOCK)
_STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32]))


class TurnStages(NamedTuple):
    """Stages in shared memory, and barriers by which two groups of warps take turns."""

    inputs: Any
    weights: Any
    bars: Any
    turns: Any


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    up, down = routed.weights(Fp8)
    groups = group_many(routed.experts, routed.num_experts, 2 * _ROWS)
    active = ExpertRows(*new_rounded(routed, groups.blocks.shape[1] * 2 * _ROWS))
    rows = ExpertRows(*round_rows(routed.rows, up, routed.chip, are_few=False))
    parts = 1 + routed.is_gated, 2 if down.num_outputs % (2 * BLOCK) == 0 else 1
    weights = boxes_of(up.values, BLOCK, BLOCK), boxes_of(down.values, BLOCK, BLOCK)
    how = {"block_m": 2 * _ROWS, "stages": _STAGES}
    return grouped.run(routed, groups, rows, active, weights, parts, _FORM, **how)


@gluon.jit
def _open(DTYPE: gl.constexpr, weight, SHAPE: gl.constexpr):
    """Allocates stages, their barriers, and barriers for turns."""
    dtype: gl.constexpr = weight.dtype
    inputs = gl.allocate_shared_memory(dtype, [2 * SHAPE.stages, _HALF, _BLOCK], weight.layout)
    shape: gl.constexpr = [SHAPE.parts * SHAPE.stages, _BLOCK, _BLOCK]
    weights = gl.allocate_shared_memory(dtype, shape, weight.layout)
    bars = open_bars(SHAPE.stages, SHAPE.loads, 2)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(turns.index(half), count=1)
    return TurnStages(inputs, weights, bars, turns)


@gluon.jit
def _find_rows(rows, work, first_row, end, SHAPE: gl.constexpr):
    """Returns pointers to both halves of a block's rows, and whether there is a second one: an
    expert's last block is often less than half full."""
    COPIED: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    o_m = gl.arange(0, _HALF, layout=gl.SliceLayout(1, COPIED))
    o_k = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, COPIED))
    order = work.groups.order
    first = gl.load(order + gl.minimum(first_row + o_m, end - 1)) // SHAPE.top_k
    second = gl.load(order + gl.minimum(first_row + _HALF + o_m, end - 1)) // SHAPE.top_k
    p_first = rows + (first * work.row_stride)[:, None] + o_k[None, :]
    p_second = rows + (second * work.row_stride)[:, None] + o_k[None, :]
    return p_first, p_second, end - first_row > _HALF


@gluon.jit
def _copy_rows(found, step, stages, stage):
    p_first, p_second, is_tall = found
    inputs, at = stages.inputs, step * _BLOCK
    async_copy.async_copy_global_to_shared(inputs.index(2 * stage), p_first + at)
    if is_tall:
        async_copy.async_copy_global_to_shared(inputs.index(2 * stage + 1), p_second + at)


@gluon.jit
def _consume(stages, work, scales, output, OWN: gl.constexpr, SHAPE: gl.constexpr):
    if SHAPE.is_up:
        _make_active(stages, work, scales, output, OWN, SHAPE)
    else:
        _make_outputs(stages, work, scales, output, OWN, SHAPE)


@gluon.jit
def _make_active(stages, work, scales, output, OWN: gl.constexpr, SHAPE: gl.constexpr):
    """Computes one group's rows of each tile of activations and rounds them to FP8."""
    STEPS: gl.constexpr = SHAPE.steps
    o_m = OWN * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, _RESULT))
    number, turn = 0, 0
    for index in range(gl.program_id(0), work.num_tiles, gl.num_programs(0)):
        block, tile = index // SHAPE.tiles, index % SHAPE.tiles
        expert, first_row, end = find_block(work, block)
        is_tall = end - first_row > _HALF
        if first_row + OWN * _HALF < end:
            row = gl.minimum(first_row + o_m, end - 1)
            token = gl.load(work.groups.order + row) // SHAPE.top_k
            p_scale = scales.weights
            p_scale += (expert * (SHAPE.parts * SHAPE.tiles) + tile).to(gl.int64) * STEPS
            gate, up = _multiply(
                p_scale, (SHAPE.parts - 1) * SHAPE.tiles * STEPS, scales.rows + token,
                work.scale_stride, number, turn, is_tall, stages, OWN, SHAPE,
            )  # fmt: skip
            values, scale = _round_active(gate, up, SHAPE)
            row = block * (2 * _HALF) + o_m
            gl.store(output.scales + tile * work.output_stride + row, scale)
            first = block * (2 * _HALF) + OWN * _HALF
            _store_rows(output.base, values, first, tile * _BLOCK, SHAPE.outputs)
        else:
            _skip(number, stages.bars, STEPS)
        number += STEPS
        turn += gl.where(is_tall, STEPS * SHAPE.parts, 0)


@gluon.jit
def _make_outputs(stages, work, scales, output, OWN: gl.constexpr, SHAPE: gl.constexpr):
    """Computes one group's rows of each tile of outputs, times their routing weights."""
    STEPS: gl.constexpr = SHAPE.steps
    PARTS: gl.constexpr = SHAPE.parts
    order = work.groups.order
    o_m = OWN * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, _RESULT))
    o_s = OWN * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, _STORED))
    number, turn, first_index = 0, 0, gl.program_id(0)
    expert, first_row, end = find_block(work, first_index // SHAPE.tiles)
    for index in range(first_index, work.num_tiles, gl.num_programs(0)):
        # Looked up a tile ahead: a tile has four steps, and would begin with waiting.
        following = gl.minimum(index + gl.num_programs(0), work.num_tiles - 1) // SHAPE.tiles
        next_expert, next_row, next_end = find_block(work, following)
        block, tile = index // SHAPE.tiles, index % SHAPE.tiles
        is_tall = end - first_row > _HALF
        if first_row + OWN * _HALF < end:
            routed = gl.load(order + gl.minimum(first_row + o_m, end - 1))
            target = gl.load(order + gl.minimum(first_row + o_s, end - 1))
            p_scale = scales.weights + (expert * SHAPE.tiles + tile).to(gl.int64) * (PARTS * STEPS)
            p_row = scales.rows + block * (2 * _HALF) + o_m
            weight = gl.load(output.routing_weights + routed).to(gl.float32)[:, None]
            first, second = _multiply(
                p_scale, (PARTS - 1) * STEPS, p_row, work.scale_stride, number, turn, is_tall,
                stages, OWN, SHAPE,
            )  # fmt: skip
            column, is_row = tile * (PARTS * _BLOCK), first_row + o_s < end
            _store_routed(output.base, first * weight, target, is_row, column, SHAPE)
            if PARTS == 2:
                _store_routed(output.base, second * weight, target, is_row, column + _BLOCK, SHAPE)
        else:
            _skip(number, stages.bars, STEPS)
        expert, first_row, end = next_expert, next_row, next_end
        number += STEPS
        turn += gl.where(is_tall, STEPS * PARTS, 0)


@gluon.jit
def _multiply(
    p_first, APART: gl.constexpr, p_row, stride, number, turn, is_tall, stages,
    OWN: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """Returns both parts' products [HALF, BLOCK] of a tile. Its scales are at `p_first` and APART
    from there, those of its rows at `p_row`, with `stride` between steps. `turn` counts the
    products of tiles in which both groups have rows (`is_tall`)."""
    PARTS: gl.constexpr = SHAPE.parts
    bars = stages.bars
    p_second = p_first + APART
    first = gl.zeros([_HALF, _BLOCK], gl.float32, layout=_RESULT)
    second = first
    first_scale, second_scale, row_scale = gl.load(p_first), gl.load(p_second), gl.load(p_row)
    for step in range(SHAPE.steps):
        ahead = gl.minimum(step + 1, SHAPE.steps - 1)
        next_first, next_second = gl.load(p_first + ahead), gl.load(p_second + ahead)
        next_row = gl.load(p_row + ahead * stride)
        stage = wait_loaded(bars, number)
        left = stages.inputs.index(2 * stage + OWN)
        right = stages.weights.index(stage * PARTS).permute((1, 0))
        product = _multiply_in_turn(left, right, stages.turns, turn, is_tall, OWN)
        turn += 1
        if PARTS == 1:
            release(bars, stage)
        first = _add_here(first, product, row_scale * first_scale)
        if PARTS == 2:
            right = stages.weights.index(stage * PARTS + 1).permute((1, 0))
            product = _multiply_in_turn(left, right, stages.turns, turn, is_tall, OWN)
            turn += 1
            release(bars, stage)
            second = _add_here(second, product, row_scale * second_scale)
        first_scale, second_scale, row_scale = next_first, next_second, next_row
        number += 1
    return first, second


@gluon.jit
def _multiply_in_turn(left, right, turns, turn, is_tall, OWN: gl.constexpr):
    """Multiplies after the other group has begun its own product. If both began at once, they would
    end at once, and the tensor cores would wait."""
    nothing = gl.zeros([_HALF, _BLOCK], gl.float32, layout=_RESULT)
    mbarrier.wait(turns.index(OWN), (turn & 1) ^ (1 - OWN), pred=is_tall)
    product = warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - OWN), count=1, pred=is_tall)
    return warpgroup_mma_wait(0, [product])


@gluon.jit
def _add_here(total, product, scale):
    """Returns `total` plus rows of `product` times their scales. The move keeps the sum in its
    place: the compiler would postpone it past the next product, and has no registers for two."""
    total += product * scale[:, None]
    return gl.inline_asm_elementwise(
        "mov.f32 $0, $1;", "=f,f", [total], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _skip(number, bars, STEPS: gl.constexpr):
    """Releases the steps of a tile in which the group has no rows."""
    for _ in range(STEPS):
        release(bars, wait_loaded(bars, number))
        number += 1


@gluon.jit
def _round_active(gate, up, SHAPE: gl.constexpr):
    """Returns rounded activations and their rows' scales."""
    if SHAPE.is_gated:
        values = multiply_within(gate / (1 + gl.exp(-gate)), up, SHAPE.limit)
    else:
        values = gl.maximum(gate, 0.0)
        values *= values
    # Between the projections activations have 16 bits, whatever computes them.
    return round_block(values.to(gl.bfloat16 if SHAPE.is_bfloat else gl.float16).to(gl.float32), 1)


@gluon.jit
def _store_rows(active, values, first_row, first_column, SIZE: gl.constexpr):
    """Stores a tile of activations in rows that stand side by side."""
    STORED: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    values = gl.convert_layout(values, STORED)
    row = first_row + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, STORED))
    column = first_column + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, STORED))
    gl.store(active + row.to(gl.int64)[:, None] * SIZE + column[None, :], values)


@gluon.jit
def _store_routed(partials, values, routed, is_row, first_column, SHAPE: gl.constexpr):
    """Stores a tile in its routed tokens' rows."""
    values = gl.convert_layout(values.to(partials.dtype.element_ty), _STORED)
    column = first_column + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, _STORED))
    target = partials + routed.to(gl.int64)[:, None] * SHAPE.outputs + column[None, :]
    gl.store(target, values, mask=is_row[:, None])


_FORM = GroupedForm(_open, _find_rows, _copy_rows, _consume)
