"""Experts with FP8 weights for few tokens on Hopper, in Gluon: FP8's part of `experts`.

Units of the up projection are blocks of 128 activations of an expert with the gates beside them,
units of the down projection two blocks of 128 outputs of one. A step loads two blocks of weights:
if WIDE is 2, neighbours along the inputs, of gates, then of ups, since memory is read in longer
pieces; if it is 1, for an odd number of blocks, one of either.

Legend: T tokens, N experts of a token, P = T * N routed tokens, M rows of a block, H hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import load_box, round_block, thread_barrier
from milepost.kernels.platform.numerics import multiply_within
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.hopper.experts import (
    BLOCK_M,
    ExpertOutput,
    MixtureBoxes,
    MixtureForm,
    MixtureShape,
    fence_async,
    find_down,
    find_place,
    launch,
    share_down,
    store_routed,
    wait_for,
)
from milepost.kernels.products.portable.gathering import gather
from milepost.kernels.products.portable.grouped_large import new_rounded
from milepost.kernels.products.portable.rounding import round_lines
from milepost.kernels.products.run import RoutedRows

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_STAGES = 4
_RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32]))
_BLOCK, _M = gl.constexpr(BLOCK), gl.constexpr(BLOCK_M)


class ScaledStages(NamedTuple):
    """Inputs [WIDE * STAGES, BLOCK_M, BLOCK], weights [2 * STAGES, BLOCK, BLOCK], rows' scales
    [WIDE * STAGES, 1, BLOCK_M]. Barriers: loaded stages (weights and rows), then used ones."""

    inputs: Any
    weights: Any
    held: Any
    bars: Any


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    up, down = routed.weights(Fp8)
    rows, row_scales = round_lines(routed.rows, up, routed.chip)
    given = gather(rows, row_scales, routed.experts, routed.num_experts, BLOCK_M)
    active = ExpertOutput(*new_rounded(routed, len(given.rows)))
    boxes = _boxes(given.rows, given.scales, up), _boxes(active.base, active.scales, down)
    shape = MixtureShape.of(routed, BLOCK, 2 * BLOCK, _STAGES)
    return launch(routed, given, active, boxes, shape, _FORM)


def _boxes(rows: Tensor, scales: Any, weight: Fp8) -> MixtureBoxes:
    matrix = weight.values.view(-1, weight.num_inputs)
    return MixtureBoxes(
        TensorDescriptor.from_tensor(rows, [BLOCK_M, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(scales, [1, BLOCK_M], _SCALES),
        TensorDescriptor.from_tensor(matrix, [BLOCK, BLOCK], _LAYOUT),
    )


@gluon.constexpr_function
def _wide_of(shape):
    return 2 if shape.size % (2 * BLOCK) == 0 else 1


@gluon.jit
def _open_stages(rows, row_scales, weight, SHAPE: gl.constexpr):
    """Allocates shared memory for the stages, and their barriers."""
    STAGES: gl.constexpr = SHAPE.stages
    ROWS: gl.constexpr = _wide_of(SHAPE) * STAGES
    dtype: gl.constexpr = weight.dtype
    inputs = gl.allocate_shared_memory(dtype, [ROWS, _M, _BLOCK], weight.layout)
    weights = gl.allocate_shared_memory(dtype, [2 * STAGES, _BLOCK, _BLOCK], weight.layout)
    # TMA writes whole lines of 128 bytes.
    held = gl.allocate_shared_memory(gl.float32, [ROWS, 1, 32], row_scales.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=2)
        mbarrier.init(bars.index(STAGES + stage), count=1)
    return ScaledStages(inputs, weights, held, bars)


@gluon.jit
def _load_up(stages, up, row, first, number, SHAPE: gl.constexpr):
    """Loads a unit's steps; returns the number of the next step."""
    WIDE: gl.constexpr = _wide_of(SHAPE)
    for step in range(0, SHAPE.inputs // _BLOCK, WIDE):
        for part in gl.static_range(WIDE):
            stage = _load_weights(stages, up, row, step, part, SHAPE.size, number, SHAPE)
            _load_rows(stages, up, first, step, stage, WIDE)
            number += 1
    return number


@gluon.jit
def _load_down(stages, down, row, first, number, counter, SHAPE: gl.constexpr):
    """Loads a unit's steps of the down projection, once `counter` says that its rows are there."""
    WIDE: gl.constexpr = _wide_of(SHAPE)
    for part in gl.static_range(WIDE):
        for step in range(0, SHAPE.tiles, WIDE):
            stage = _load_weights(stages, down, row, step, part, _BLOCK, number, SHAPE)
            if step + part == 0:
                wait_for(counter, SHAPE.tiles)
            _load_rows(stages, down, first, step, stage, WIDE)
            number += 1
    return number


@gluon.jit
def _load_weights(stages, boxes, row, step, part, APART: gl.constexpr, number, SHAPE: gl.constexpr):
    """Loads a step's weights, from `row` on and APART from there, once its stage is free. Returns
    the stage."""
    STAGES: gl.constexpr = SHAPE.stages
    stage, bars = number % STAGES, stages.bars
    mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
    mbarrier.expect(bars.index(stage), 2 * _BLOCK * _BLOCK)
    for i in gl.static_range(2):
        at = [row + i * APART, step * _BLOCK]
        if _wide_of(SHAPE) == 2:
            at = [row + part * APART, (step + i) * _BLOCK]
        load_box(boxes[2], at, bars.index(stage), stages.weights.index(2 * stage + i))
    return stage


@gluon.jit
def _load_rows(stages, boxes, first, step, stage, WIDE: gl.constexpr):
    """Loads a step of the rows from `first` on, and their scales."""
    bar = stages.bars.index(stage)
    mbarrier.expect(bar, WIDE * _M * (_BLOCK + 4))
    for i in gl.static_range(WIDE):
        place = stages.inputs.index(WIDE * stage + i)
        load_box(boxes[0], [first, (step + i) * _BLOCK], bar, place)
        load_box(boxes[1], [step + i, first], bar, stages.held.index(WIDE * stage + i))


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
        if _wide_of(SHAPE) == 2:
            gate, up = _add_up_in_turn(stages, number, p_gate, p_up, STEPS, SHAPE)
        else:
            gate, up = _add_up_at_once(stages, number, p_gate, p_up, STEPS, SHAPE)
        number += STEPS
        values = multiply_within(gate * (1 / (1 + gl.exp(-gate))), up, SHAPE.limit)
        # Between the projections activations have 16 bits, whatever computes them.
        values, scale = round_block(values.to(DTYPE).to(gl.float32), 0)
        gl.store(active.scales + tile * capacity + row, scale)
        target = active.base + row.to(gl.int64)[None, :] * SHAPE.size
        gl.store(target + (tile * _BLOCK + o_n)[:, None], values, mask=is_row[None, :])
        fence_async()
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
    turns, num_units = share_down(num_blocks, SHAPE)
    expert = gl.load(owners + find_place(0, turns, num_blocks, SHAPE))
    for index in range(num_units):
        next_expert = gl.load(owners + find_place(index + 1, turns, num_blocks, SHAPE))
        unit = find_down(index, turns)
        place, tile = unit // COLUMNS, unit % COLUMNS
        own = gl.load(lists.routed + place * _M + o_m)
        weight = gl.load(output.routing_weights + own, mask=own >= 0, other=0.0).to(gl.float32)
        p_first = scales + (expert * COLUMNS + tile) * (2 * STEPS)
        p_second = p_first + STEPS
        if _wide_of(SHAPE) == 2:
            first = _add_up(stages, number, p_first, STEPS, SHAPE)
            second = _add_up(stages, number + STEPS // 2, p_second, STEPS, SHAPE)
        else:
            first, second = _add_up_at_once(stages, number, p_first, p_second, STEPS, SHAPE)
        number += STEPS
        store_routed(output.base, own, weight, first, second, tile * (2 * _BLOCK) + o_n, SHAPE)
        expert = next_expert


@gluon.jit
def _add_up_at_once(stages, number, p_first, p_second, STEPS: gl.constexpr, SHAPE: gl.constexpr):
    """Returns two scaled sums of products [_BLOCK, M], if a step has one block of either."""
    first = gl.zeros([_BLOCK, _M], gl.float32, layout=_RESULT)
    second = first
    first_scale, second_scale = gl.load(p_first), gl.load(p_second)
    for step in range(STEPS):
        ahead = gl.minimum(step + 1, STEPS - 1)
        next_first, next_second = gl.load(p_first + ahead), gl.load(p_second + ahead)
        product, other, scale, _ = _multiply(stages, number + step, SHAPE)
        first += product * (scale * first_scale)
        second += other * (scale * second_scale)
        first_scale, second_scale = next_first, next_second
    return first, second


@gluon.jit
def _add_up_in_turn(stages, number, p_first, p_second, STEPS: gl.constexpr, SHAPE: gl.constexpr):
    """Returns those two sums, if a step has two blocks of one, and the next two of the other."""
    first = gl.zeros([_BLOCK, _M], gl.float32, layout=_RESULT)
    second = first
    a, b = gl.load(p_first), gl.load(p_first + 1)
    c, d = gl.load(p_second), gl.load(p_second + 1)
    for step in range(0, STEPS, 2):
        ahead = gl.minimum(step + 2, STEPS - 2)
        next_a, next_b = gl.load(p_first + ahead), gl.load(p_first + ahead + 1)
        next_c, next_d = gl.load(p_second + ahead), gl.load(p_second + ahead + 1)
        first = _add_pair(stages, number + step, first, a, b, SHAPE)
        second = _add_pair(stages, number + step + 1, second, c, d, SHAPE)
        a, b, c, d = next_a, next_b, next_c, next_d
    return first, second


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
    STAGES: gl.constexpr = SHAPE.stages
    WIDE: gl.constexpr = _wide_of(SHAPE)
    stage, bars, b_w = number % STAGES, stages.bars, stages.weights
    own, others = WIDE * stage, WIDE * stage + WIDE - 1
    mbarrier.wait(bars.index(stage), number // STAGES & 1)
    nothing = gl.zeros([_BLOCK, _M], gl.float32, layout=_RESULT)
    right = stages.inputs.index(own).permute((1, 0))
    other = stages.inputs.index(others).permute((1, 0))
    first = warpgroup_mma(b_w.index(2 * stage), right, nothing, use_acc=False, is_async=True)
    second = warpgroup_mma(b_w.index(2 * stage + 1), other, nothing, use_acc=False, is_async=True)
    scale = stages.held.index(own).slice(0, _M, dim=1).load(_RESULT)
    other_scale = stages.held.index(others).slice(0, _M, dim=1).load(_RESULT)
    first, second = warpgroup_mma_wait(0, [first, second])
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    return first, second, scale, other_scale


_FORM = MixtureForm(_open_stages, _load_up, _load_down, _consume, 1, 128, 56)
