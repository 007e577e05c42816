"""Experts of FP8 weights and few tokens on Hopper, in Gluon: `experts_parts` with FP8 filled in.

Units of the up projection are blocks of 128 activations of an expert with the gates beside them,
units of the down projection two blocks of 128 outputs of one. A step loads two blocks of weights:
WIDE ones are next to each other along the inputs, of gates, then of ups, for memory is read in
longer pieces then; else there is one of either. An odd number of blocks cannot be taken two at a
time.

The stages are `inputs` [WIDE * STAGES, BLOCK_M, BLOCK], `weights` [2 * STAGES, BLOCK, BLOCK] and
`held` [WIDE * STAGES, 1, BLOCK_M], the rows' scales, in shared memory, and `bars`: those that are
loaded, which await weights and rows apart, then those that are used up. WIDE is 2 or 1.

Legend: T tokens, N experts of a token, P = T * N routed tokens, M rows of a block, H hidden size, I
an expert's size, D scales of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import load_box, thread_barrier
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.hopper.experts_parts import (
    MixtureBoxes,
    MixtureForm,
    MixtureShape,
    Residence,
    fence_async,
    find_down,
    find_place,
    launch,
    share_down,
    wait_for,
)
from milepost.kernels.products.hopper.fp8_experts_parts import (
    BLOCK_M,
    RESULT,
    add_up,
    add_up_at_once,
    add_up_in_turn,
    round_active,
)
from milepost.kernels.products.hopper.grouped_parts import ExpertOutput, ExpertScales
from milepost.kernels.products.portable.gathering import gather
from milepost.kernels.products.portable.grouped_large import new_rounded
from milepost.kernels.products.portable.rounding import round_lines
from milepost.kernels.products.run_experts import RoutedRows

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_STAGES = 4
"""Steps on their way at a time, 32 KiB each: with six, memory is 1 % slower."""
_RESIDENCE = Residence(programs=1, registers=128, producer_registers=56)
_BLOCK, _M = gl.constexpr(BLOCK), gl.constexpr(BLOCK_M)
_LINE = gl.constexpr(32)
"""Numbers of 32 bits that TMA can write at a time begin at multiples of so many."""


class ScaledStages(NamedTuple):
    """The module's docstring describes them."""

    inputs: Any
    weights: Any
    held: Any
    bars: Any


def run(routed: RoutedRows) -> Tensor:
    """Returns partials [T, N, H]."""
    up, down, size = routed.up, routed.down, routed.size
    assert isinstance(up, Fp8), "the kernel's form"
    assert isinstance(down, Fp8), "experts have one form"
    rows, row_scales = round_lines(routed.rows, up, routed.chip)
    given = gather(rows, row_scales, routed.experts, routed.num_experts, BLOCK_M)
    active, active_scales = new_rounded(routed, len(given.rows))
    boxes = MixtureBoxes(
        TensorDescriptor.from_tensor(given.rows, [BLOCK_M, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(given.scales, [1, BLOCK_M], _SCALES),
        TensorDescriptor.from_tensor(up.values.view(-1, up.num_inputs), [BLOCK, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(active, [BLOCK_M, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(active_scales, [1, BLOCK_M], _SCALES),
        TensorDescriptor.from_tensor(down.values.view(-1, size), [BLOCK, BLOCK], _LAYOUT),
    )
    shape = MixtureShape(
        inputs=up.num_inputs,
        size=size,
        is_gated=True,
        tiles=size // BLOCK,
        columns=up.num_inputs // (2 * BLOCK),
        wide=BLOCK,
        block_m=BLOCK_M,
        stages=_STAGES,
    )
    scales, made = (
        (ExpertScales(up.scales), ExpertScales(down.scales)),
        ExpertOutput(active, active_scales),
    )
    form = _WIDE if size % (2 * BLOCK) == 0 else _NARROW
    return launch(routed, given, boxes, scales, made, shape, form, _RESIDENCE)


@gluon.jit
def _open_wide(rows, row_scales, weight, SHAPE: gl.constexpr):
    return _open_stages(row_scales, weight, SHAPE, 2)


@gluon.jit
def _open_narrow(rows, row_scales, weight, SHAPE: gl.constexpr):
    return _open_stages(row_scales, weight, SHAPE, 1)


@gluon.jit
def _open_stages(row_scales, weight, SHAPE: gl.constexpr, WIDE: gl.constexpr):
    """Allocates shared memory for the stages, and their barriers."""
    STAGES: gl.constexpr = SHAPE.stages
    dtype: gl.constexpr = weight.dtype
    inputs = gl.allocate_shared_memory(dtype, [WIDE * STAGES, _M, _BLOCK], weight.layout)
    weights = gl.allocate_shared_memory(dtype, [2 * STAGES, _BLOCK, _BLOCK], weight.layout)
    held = gl.allocate_shared_memory(gl.float32, [WIDE * STAGES, 1, _LINE], row_scales.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=2)
        mbarrier.init(bars.index(STAGES + stage), count=1)
    return ScaledStages(inputs, weights, held, bars)


@gluon.jit
def _load_up(stages, rows, up, row, first, number, SHAPE: gl.constexpr):
    """Has a unit's steps loaded; returns the number of the next step."""
    WIDE: gl.constexpr = stages.inputs.type.shape[0] // SHAPE.stages
    for step in range(0, SHAPE.inputs // _BLOCK, WIDE):
        for part in gl.static_range(WIDE):
            stage = _load_weights(up, row, step, part, SHAPE.size, stages, number, SHAPE)
            _load_rows(rows, first, step, stages, stage, WIDE)
            number += 1
    return number


@gluon.jit
def _load_down(stages, active, down, row, first, number, counter, SHAPE: gl.constexpr):
    """As `_load_up`, once the rows are there."""
    WIDE: gl.constexpr = stages.inputs.type.shape[0] // SHAPE.stages
    for part in gl.static_range(WIDE):
        for step in range(0, SHAPE.tiles, WIDE):
            stage = _load_weights(down, row, step, part, _BLOCK, stages, number, SHAPE)
            if step + part == 0:
                wait_for(counter, SHAPE.tiles)
            _load_rows(active, first, step, stages, stage, WIDE)
            number += 1
    return number


@gluon.jit
def _load_weights(
    matrix, row, step, part, APART: gl.constexpr, stages, number, SHAPE: gl.constexpr
):
    """Has a step's weights loaded, once its stage, which is returned, is used up: of the rows from
    `row` on, or of those that stand APART."""
    STAGES: gl.constexpr = SHAPE.stages
    WIDE: gl.constexpr = stages.inputs.type.shape[0] // STAGES
    stage, bars = number % STAGES, stages.bars
    mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
    mbarrier.expect(bars.index(stage), 2 * _BLOCK * _BLOCK)
    for i in gl.static_range(2):
        at = [row + i * APART, step * _BLOCK]
        if WIDE == 2:
            at = [row + part * APART, (step + i) * _BLOCK]
        load_box(matrix, at, bars.index(stage), stages.weights.index(2 * stage + i))
    return stage


@gluon.jit
def _load_rows(rows, first, step, stages, stage, WIDE: gl.constexpr):
    """Has a step's rows from `first` on loaded, and their scales."""
    values, scales = rows
    bar = stages.bars.index(stage)
    mbarrier.expect(bar, WIDE * _M * (_BLOCK + 4))
    for i in gl.static_range(WIDE):
        place = stages.inputs.index(WIDE * stage + i)
        load_box(values, [first, (step + i) * _BLOCK], bar, place)
        load_box(scales, [step + i, first], bar, stages.held.index(WIDE * stage + i))


@gluon.jit
def _consume(stages, lists, up_scales, down_scales, active, capacity, output, SHAPE: gl.constexpr):
    """Multiplies what is loaded."""
    dtype: gl.constexpr = output.base.dtype.element_ty
    number = _consume_up(stages, lists, up_scales.weights, active, capacity, dtype, SHAPE)
    _consume_down(stages, lists, down_scales.weights, output, number, SHAPE)


@gluon.jit
def _consume_up(stages, lists, scales, active, capacity, DTYPE: gl.constexpr, SHAPE: gl.constexpr):
    """Makes activations and rounds them; returns the number of the next step."""
    owners, num_blocks = lists.experts, gl.load(lists.count)
    WIDE: gl.constexpr = stages.inputs.type.shape[0] // SHAPE.stages
    TILES: gl.constexpr = SHAPE.tiles
    STEPS: gl.constexpr = SHAPE.inputs // _BLOCK
    o_n = gl.arange(0, _BLOCK, layout=gl.SliceLayout(1, RESULT))
    o_m = gl.arange(0, _M, layout=gl.SliceLayout(0, RESULT))
    number = 0
    for unit in range(gl.program_id(0), num_blocks * TILES, gl.num_programs(0)):
        place, tile = unit // TILES, unit % TILES
        expert = gl.load(owners + place)
        row = place * _M + o_m
        is_row = gl.load(lists.routed + row) >= 0
        p_gate = scales + (expert * (2 * TILES) + tile) * STEPS
        p_up = p_gate + TILES * STEPS
        if WIDE == 2:
            gate, up = add_up_in_turn(stages, number, p_gate, p_up, STEPS, SHAPE)
        else:
            gate, up = add_up_at_once(stages, number, p_gate, p_up, STEPS, SHAPE)
        number += STEPS
        values, scale = round_active(gate, up, DTYPE)
        gl.store(active.scales + tile * capacity + row, scale)
        target = (
            active.base + row.to(gl.int64)[None, :] * SHAPE.size + (tile * _BLOCK + o_n)[:, None]
        )
        gl.store(target, values, mask=is_row[None, :])
        fence_async()
        thread_barrier()
        gl.atomic_add(lists.counters + place, 1, sem="release")
    return number


@gluon.jit
def _consume_down(stages, lists, scales, output, number, SHAPE: gl.constexpr):
    """Stores the experts' outputs, times their routing weights, to `output` [P, INPUTS]."""
    owners, num_blocks = lists.experts, gl.load(lists.count)
    WIDE: gl.constexpr = stages.inputs.type.shape[0] // SHAPE.stages
    COLUMNS: gl.constexpr = SHAPE.columns
    STEPS: gl.constexpr = SHAPE.tiles
    o_n = gl.arange(0, _BLOCK, layout=gl.SliceLayout(1, RESULT))
    o_m = gl.arange(0, _M, layout=gl.SliceLayout(0, RESULT))
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
        if WIDE == 2:
            first = add_up(stages, number, p_first, STEPS, SHAPE)
            second = add_up(stages, number + STEPS // 2, p_second, STEPS, SHAPE)
        else:
            first, second = add_up_at_once(stages, number, p_first, p_second, STEPS, SHAPE)
        number += STEPS
        target = output.base + own.to(gl.int64)[None, :] * SHAPE.inputs
        target += (tile * (2 * _BLOCK) + o_n)[:, None]
        is_row = (own >= 0)[None, :]
        gl.store(target, (first * weight[None, :]).to(output.base.dtype.element_ty), mask=is_row)
        target += _BLOCK
        gl.store(target, (second * weight[None, :]).to(output.base.dtype.element_ty), mask=is_row)
        expert = next_expert


_WIDE = MixtureForm(_open_wide, _load_up, _load_down, _consume)
_NARROW = MixtureForm(_open_narrow, _load_up, _load_down, _consume)
