"""How Hopper's kernel of four-bit experts divides the work, and the warp that loads, in Gluon (see
`triton_hopper_nibble_experts`).

A unit is 128 rows of an expert's weights in two parts of 64, for one block of rows: of the up
projection gates and the ups that belong to them, or without gates 128 ups; of the down projection
128 outputs. A step is 256 inputs of a unit: TMA brings pieces of 128 bytes, for no wider ones fit
what banks of shared memory are swizzled by.

The stages are `inputs` [4 * STAGES, BLOCK_M, 64], a step's rows in halves of blocks, and `weights`
[2 * STAGES, 64, 128], bytes of both parts, in shared memory, and barriers: of those that are
`loaded`, which await weights and rows apart, and of those that are `used` up. `lists` are
`experts`, `counters` and `count` of `triton_gathering.Gathered`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from milepost.kernels.platform.gluon import load_box
from milepost.kernels.products.forms.quantised import BLOCK
from milepost.kernels.products.hopper.fp8_experts_parts import (
    find_down,
    find_place,
    share_down,
    wait_for,
)

HALF = BLOCK // 2
STEP = 2 * BLOCK
ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
WEIGHTS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)

_BLOCK, _HALF, _STEP = gl.constexpr(BLOCK), gl.constexpr(HALF), gl.constexpr(STEP)


@gluon.constexpr_function
def num_steps(num_inputs):
    """The last one may be half beyond the inputs, where all that is loaded is zeros."""
    return (num_inputs + STEP - 1) // STEP


@gluon.jit
def open_stages(rows, weight, STAGES: gl.constexpr):
    """Shared memory for the stages, and their barriers."""
    BLOCK_M: gl.constexpr = rows.block_type.shape[0]
    inputs = gl.allocate_shared_memory(rows.dtype, [4 * STAGES, BLOCK_M, _HALF], rows.layout)
    weights = gl.allocate_shared_memory(weight.dtype, [2 * STAGES, _HALF, _BLOCK], weight.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=2)
        mbarrier.init(used.index(stage), count=1)
    return inputs, weights, loaded, used


@gluon.jit
def produce(
    stages,
    lists,
    produced,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load every step as soon as there is room, the down projection's weights behind the up
    projection's; rows that other programs make are waited for."""
    owners, done, count = lists
    rows, up, active, down = produced
    BLOCK_M: gl.constexpr = stages[0].type.shape[1]
    WIDE: gl.constexpr = _HALF if GATED else _BLOCK
    APART: gl.constexpr = SIZE if GATED else _HALF
    HEIGHT: gl.constexpr = 2 * SIZE if GATED else SIZE
    TILES: gl.constexpr = SIZE // WIDE
    COLUMNS: gl.constexpr = INPUTS // _BLOCK
    num_blocks = gl.load(count)
    num_units, stride = num_blocks * TILES, gl.num_programs(0)
    # Who comes next is looked up a unit ahead: one is few steps, and would begin with waiting.
    expert = gl.load(owners + gl.minimum(gl.program_id(0) // TILES, num_blocks - 1))
    number = 0
    for unit in range(gl.program_id(0), num_units, stride):
        next_expert = gl.load(owners + gl.minimum(unit + stride, num_units - 1) // TILES)
        row = expert * HEIGHT + unit % TILES * WIDE
        for step in range(num_steps(INPUTS)):
            stage = _load_weights(up, row, APART, step, stages, number, STAGES)
            _load_rows(rows, unit // TILES * BLOCK_M, step, stages, stage)
            number += 1
        expert = next_expert
    share, num_units = share_down(num_blocks, TILES, COLUMNS, INPUTS // SIZE)
    expert = gl.load(owners + find_place(0, share, num_blocks, COLUMNS))
    for index in range(num_units):
        next_expert = gl.load(owners + find_place(index + 1, share, num_blocks, COLUMNS))
        unit = find_down(index, share)
        row = expert * INPUTS + unit % COLUMNS * _BLOCK
        for step in range(num_steps(SIZE)):
            stage = _load_weights(down, row, _HALF, step, stages, number, STAGES)
            if step == 0:
                wait_for(done + unit // COLUMNS, TILES)
            _load_rows(active, unit // COLUMNS * BLOCK_M, step, stages, stage)
            number += 1
        expert = next_expert


@gluon.jit
def _load_weights(matrix, row, APART: gl.constexpr, step, stages, number, STAGES: gl.constexpr):
    """Have a program's step of this number loaded, once its stage, which is returned, is used up:
    weights from `row` on and those APART from them."""
    _, weights, loaded, used = stages
    stage = number % STAGES
    mbarrier.wait(used.index(stage), (number // STAGES & 1) ^ 1)
    mbarrier.expect(loaded.index(stage), 2 * _HALF * _BLOCK)
    for part in gl.static_range(2):
        at = [row + part * APART, step * _BLOCK]
        load_box(matrix, at, loaded.index(stage), weights.index(2 * stage + part))
    return stage


@gluon.jit
def _load_rows(rows, first, step, stages, stage):
    """Have a step's rows from `first` on loaded."""
    inputs, _, loaded, _ = stages
    mbarrier.expect(loaded.index(stage), 2 * inputs.type.shape[1] * _STEP)
    for i in gl.static_range(4):
        at = [first, step * _STEP + i * _HALF]
        load_box(rows, at, loaded.index(stage), inputs.index(4 * stage + i))
