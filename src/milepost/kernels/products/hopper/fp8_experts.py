"""Experts with FP8 weights for few tokens on Hopper, in Gluon: FP8's part of `experts`.

Units of the up projection are blocks of 128 activations of an expert with the gates beside them,
units of the down projection two blocks of 128 outputs of one. A step loads two blocks of weights.
They are neighbours along the inputs, of gates, then of ups, since memory is read in longer pieces;
if the number of blocks is odd, there is one of either.

Legend: T tokens, N experts of a token, P = T * N routed tokens, M rows of a block, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from milepost.kernels.platform.gluon import (
    boxes_of,
    release,
    round_block,
    thread_barrier,
    wait_loaded,
)
from milepost.kernels.platform.numerics import multiply_within
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.hopper import experts
from milepost.kernels.products.hopper import experts_loading as loading
from milepost.kernels.products.portable.gathering import gather
from milepost.kernels.products.portable.grouped import ExpertRows
from milepost.kernels.products.portable.grouped_large import new_rounded
from milepost.kernels.products.portable.rounding import round_lines
from milepost.kernels.products.run import RoutedRows

_STAGES = 4
_RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, loading.BLOCK_M, 32]))
_BLOCK, _M = gl.constexpr(BLOCK), gl.constexpr(loading.BLOCK_M)


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    up, down = routed.weights(Fp8)
    rows, row_scales = round_lines(routed.rows, up, routed.chip)
    given = gather(rows, row_scales, routed.experts, routed.num_experts, loading.BLOCK_M)
    active = ExpertRows(*new_rounded(routed, len(given.rows)))
    boxes = _boxes(given.rows, given.scales, up), _boxes(active.base, active.scales, down)
    blocks = 2 if routed.size % (2 * BLOCK) == 0 else 1
    shape = experts.MixtureShape.of(routed, BLOCK, 2 * BLOCK, _STAGES, blocks=blocks)
    return experts.launch(routed, given, active, boxes, shape, _FORM)


def _boxes(rows: Tensor, scales: Any, weight: Fp8) -> loading.MixtureBoxes:
    return loading.MixtureBoxes(
        boxes_of(rows, loading.BLOCK_M, BLOCK),
        boxes_of(scales, 1, loading.BLOCK_M),
        boxes_of(weight.values, BLOCK, BLOCK),
    )


@gluon.jit
def _consume(stages, lists, scales, active, capacity, output, SHAPE: gl.constexpr):
    dtype: gl.constexpr = output.base.dtype.element_ty
    number = _consume_up(stages, lists, scales[0].weights, active, capacity, dtype, SHAPE)
    _consume_down(stages, lists, scales[1].weights, output, number, SHAPE)


@gluon.jit
def _consume_up(stages, lists, scales, active, capacity, DTYPE: gl.constexpr, SHAPE: gl.constexpr):
    """Computes activations and rounds them to FP8; returns the number of the next step."""
    owners, num_blocks = lists.experts, gl.load(lists.count)
    TILES: gl.constexpr = SHAPE.tiles
    STEPS: gl.constexpr = SHAPE.inputs // _BLOCK
    o_n = gl.arange(0, _BLOCK, layout=gl.SliceLayout(1, _RESULT))
    o_m = gl.arange(0, _M, layout=gl.SliceLayout(0, _RESULT))
    number = 0
    for unit in range(gl.program_id(0), num_blocks * TILES, gl.num_programs(0)):
        place, tile = unit // TILES, unit % TILES
        expert = gl.load(owners + place)
        row = place * _M + o_m
        is_row = gl.load(lists.routed + row) >= 0
        p_gate = scales + (expert * (2 * TILES) + tile) * STEPS
        p_up = p_gate + TILES * STEPS
        gate, up = _add_up_both(stages, number, p_gate, p_up, STEPS, SHAPE)
        number += STEPS
        values = multiply_within(gate * (1 / (1 + gl.exp(-gate))), up, SHAPE.limit)
        # Between the projections activations have 16 bits, whatever computes them.
        values, scale = round_block(values.to(DTYPE).to(gl.float32), 0)
        gl.store(active.scales + tile * capacity + row, scale)
        target = active.base + row.to(gl.int64)[None, :] * SHAPE.size
        gl.store(target + (tile * _BLOCK + o_n)[:, None], values, mask=is_row[None, :])
        loading.fence_async()
        thread_barrier()
        gl.atomic_add(lists.counters + place, 1, sem="release")
    return number


@gluon.jit
def _consume_down(stages, lists, scales, output, number, SHAPE: gl.constexpr):
    """Stores the experts' outputs, times their routing weights, to `output` [P, INPUTS]."""
    owners, num_blocks = lists.experts, gl.load(lists.count)
    COLUMNS: gl.constexpr = SHAPE.columns
    STEPS: gl.constexpr = SHAPE.tiles
    o_n = gl.arange(0, _BLOCK, layout=gl.SliceLayout(1, _RESULT))
    o_m = gl.arange(0, _M, layout=gl.SliceLayout(0, _RESULT))
    turns, num_units = loading.share_down(num_blocks, SHAPE)
    expert = gl.load(owners + loading.find_place(0, turns, num_blocks, SHAPE))
    for index in range(num_units):
        next_expert = gl.load(owners + loading.find_place(index + 1, turns, num_blocks, SHAPE))
        unit = loading.find_down(index, turns)
        place, tile = unit // COLUMNS, unit % COLUMNS
        own = gl.load(lists.routed + place * _M + o_m)
        weight = gl.load(output.routing_weights + own, mask=own >= 0, other=0.0).to(gl.float32)
        p_first = scales + (expert * COLUMNS + tile) * (2 * STEPS)
        p_second = p_first + STEPS
        if SHAPE.blocks == 2:
            first = _add_up(stages, number, p_first, STEPS, SHAPE)
            second = _add_up(stages, number + STEPS // 2, p_second, STEPS, SHAPE)
        else:
            first, second = _add_up_both(stages, number, p_first, p_second, STEPS, SHAPE)
        number += STEPS
        experts.store_routed(
            output.base, own, weight, first, second, tile * (2 * _BLOCK) + o_n, SHAPE
        )
        expert = next_expert


@gluon.jit
def _add_up_both(stages, number, p_first, p_second, STEPS: gl.constexpr, SHAPE: gl.constexpr):
    """Returns both parts' scaled sums of products [_BLOCK, M]: a step has a block of either part,
    or two blocks of the first, and the next step two of the second."""
    BLOCKS: gl.constexpr = SHAPE.blocks
    first = gl.zeros([_BLOCK, _M], gl.float32, layout=_RESULT)
    second = first
    scales = _load_scales(p_first, p_second, 0, SHAPE)
    for step in range(0, STEPS, BLOCKS):
        ahead = gl.minimum(step + BLOCKS, STEPS - BLOCKS)
        next_scales = _load_scales(p_first, p_second, ahead, SHAPE)
        if BLOCKS == 2:
            first = _add_pair(stages, number + step, first, scales[0], scales[1], SHAPE)
            second = _add_pair(stages, number + step + 1, second, scales[2], scales[3], SHAPE)
        else:
            product, other, scale, _ = _multiply(stages, number + step, SHAPE)
            first += product * (scale * scales[0])
            second += other * (scale * scales[1])
        scales = next_scales
    return first, second


@gluon.jit
def _load_scales(p_first, p_second, step, SHAPE: gl.constexpr):
    """Loads the scales of both parts' blocks from `step` on, one or two of each."""
    BLOCKS: gl.constexpr = SHAPE.blocks
    scales = ()
    for block in gl.static_range(BLOCKS):
        scales += (gl.load(p_first + step + block),)
    for block in gl.static_range(BLOCKS):
        scales += (gl.load(p_second + step + block),)
    return scales


@gluon.jit
def _add_up(stages, number, p_scale, STEPS: gl.constexpr, SHAPE: gl.constexpr):
    """Returns one scaled sum [_BLOCK, M], if a step has two of its blocks."""
    total = gl.zeros([_BLOCK, _M], gl.float32, layout=_RESULT)
    for step in gl.static_range(0, STEPS, 2):
        a, b = gl.load(p_scale + step), gl.load(p_scale + step + 1)
        total = _add_pair(stages, number + step // 2, total, a, b, SHAPE)
    return total


@gluon.jit
def _add_pair(stages, number, total, first_scale, second_scale, SHAPE: gl.constexpr):
    """Adds both products of a step to `total`."""
    product, other, scale, other_scale = _multiply(stages, number, SHAPE)
    total += product * (scale * first_scale)
    total += other * (other_scale * second_scale)
    return total


@gluon.jit
def _multiply(stages, number, SHAPE: gl.constexpr):
    """Returns a step's two products [BLOCK, M], and the scales of the rows of each."""
    BLOCKS: gl.constexpr = SHAPE.blocks
    stage, b_w = number % SHAPE.stages, stages.weights
    own, others = BLOCKS * stage, BLOCKS * stage + BLOCKS - 1
    wait_loaded(stages.bars, number)
    nothing = gl.zeros([_BLOCK, _M], gl.float32, layout=_RESULT)
    right = stages.inputs.index(own).permute((1, 0))
    other = stages.inputs.index(others).permute((1, 0))
    first = warpgroup_mma(b_w.index(2 * stage), right, nothing, use_acc=False, is_async=True)
    second = warpgroup_mma(b_w.index(2 * stage + 1), other, nothing, use_acc=False, is_async=True)
    scale = stages.row_scales.index(own).slice(0, _M, dim=1).load(_RESULT)
    other_scale = stages.row_scales.index(others).slice(0, _M, dim=1).load(_RESULT)
    first, second = warpgroup_mma_wait(0, [first, second])
    release(stages.bars, stage)
    return first, second, scale, other_scale


_FORM = experts.MixtureForm(_consume, 1, 128, 56)
