"""How Hopper's kernel of experts divides the work, and the warp that loads, in Gluon (see
`triton_hopper_experts`).

Units of the up projection are blocks of 128 activations of an expert with the gates beside them,
units of the down projection two blocks of 128 outputs of one, both for one block of rows. A step
loads two blocks of weights: WIDE ones are next to each other along the inputs, of gates, then of
ups, for memory is read in longer pieces then; else there is one of either. An odd number of blocks
cannot be taken two at a time.

The stages are `inputs` [WIDE * STAGES, BLOCK_M, BLOCK], `weights` [2 * STAGES, BLOCK, BLOCK] and
`held` [WIDE * STAGES, 1, BLOCK_M], the rows' scales, in shared memory, and `bars`: those that are
loaded, which await weights and rows apart, then those that are used up. WIDE is 2 or 1. `lists` are
`experts`, `counters` and `count` of `triton_gathering.Gathered`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from milepost.kernels.platform.gluon import load_box

_LINE = gl.constexpr(32)
"""Numbers of 32 bits that TMA can write at a time begin at multiples of so many."""


@gluon.jit
def open_stages(
    weight,
    row_scales,
    BLOCK_M: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Shared memory for the stages, and their barriers."""
    dtype: gl.constexpr = weight.dtype
    inputs = gl.allocate_shared_memory(dtype, [WIDE * STAGES, BLOCK_M, BLOCK], weight.layout)
    weights = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK, BLOCK], weight.layout)
    held = gl.allocate_shared_memory(gl.float32, [WIDE * STAGES, 1, _LINE], row_scales.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=2)
        mbarrier.init(bars.index(STAGES + stage), count=1)
    return inputs, weights, held, bars


@gluon.jit
def fence_async():
    """What other threads wrote to memory, or this one, and TMA reads next, is seen by it."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for(counter, value: gl.constexpr):
    """Until other programs have added so much to it."""
    count = _read(counter)
    while count < value:
        count = _read(counter)
    fence_async()


@gluon.jit
def _read(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def share_down(num_blocks, TILES: gl.constexpr, COLUMNS: gl.constexpr, RATIO: gl.constexpr):
    """A program's units of the down projection, for `find_down`, and how many. A block of rows has
    TILES units of the up projection, each worth RATIO of its COLUMNS of the down projection.

    Units of the up projection go round, and some programs have one less than others: first these
    get as much of the down projection instead. The rest goes round again."""
    program, stride = gl.program_id(0), gl.num_programs(0)
    num_units = num_blocks * COLUMNS
    num_long = num_blocks * TILES % stride
    is_short = (num_long > 0) & (program >= num_long)
    num_short = stride - num_long
    num_owed = gl.where(num_long > 0, gl.minimum(num_short * RATIO, num_units), 0)
    first = gl.where(is_short, program - num_long, 0)
    num_own = gl.where(is_short, (num_owed - first + num_short - 1) // num_short, 0)
    num_common = gl.maximum(num_units - num_owed - program + stride - 1, 0) // stride
    return (first, num_short, num_own, num_owed + program), num_own + num_common


@gluon.jit
def find_down(index, share):
    first, num_short, num_own, first_common = share
    common = first_common + (index - num_own) * gl.num_programs(0)
    return gl.where(index < num_own, first + index * num_short, common)


@gluon.jit
def find_place(index, share, num_blocks, COLUMNS: gl.constexpr):
    """The block of rows of such a unit; the last one beyond the last unit."""
    return gl.minimum(find_down(index, share) // COLUMNS, num_blocks - 1)


@gluon.jit
def _open_step(number, bars, STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """The stage of a program's step of this number, once it is used up; its barrier awaits the
    weights."""
    stage = number % STAGES
    mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
    mbarrier.expect(bars.index(stage), 2 * BLOCK * BLOCK)
    return stage


@gluon.jit
def _load_weights(
    matrix,
    row,
    step,
    part,
    APART: gl.constexpr,
    stages,
    number,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Have a step's weights loaded: of the rows from `row` on, or of those that stand APART."""
    _, weights, _, bars = stages
    BLOCK: gl.constexpr = weights.type.shape[2]
    stage = _open_step(number, bars, STAGES, BLOCK)
    for i in gl.static_range(2):
        at = [row + i * APART, step * BLOCK]
        if WIDE == 2:
            at = [row + part * APART, (step + i) * BLOCK]
        load_box(matrix, at, bars.index(stage), weights.index(2 * stage + i))
    return stage


@gluon.jit
def _load_rows(rows, scales, first, step, stages, stage, WIDE: gl.constexpr):
    """Have a step's rows from `first` on loaded, and their scales."""
    inputs, _, held, bars = stages
    BLOCK_M: gl.constexpr = inputs.type.shape[1]
    BLOCK: gl.constexpr = inputs.type.shape[2]
    bar = bars.index(stage)
    mbarrier.expect(bar, WIDE * BLOCK_M * (BLOCK + 4))
    for i in gl.static_range(WIDE):
        load_box(rows, [first, (step + i) * BLOCK], bar, inputs.index(WIDE * stage + i))
        load_box(scales, [step + i, first], bar, held.index(WIDE * stage + i))


@gluon.jit
def produce(
    stages,
    lists,
    produced,
    INPUTS: gl.constexpr,
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Load every step as soon as there is room, the down projection's weights behind the up
    projection's; rows that other programs make are waited for."""
    owners, done, count = lists
    rows, row_scales, up, active, active_scales, down = produced
    BLOCK_M: gl.constexpr = stages[0].type.shape[1]
    BLOCK: gl.constexpr = stages[0].type.shape[2]
    TILES: gl.constexpr = SIZE // BLOCK
    COLUMNS: gl.constexpr = INPUTS // (2 * BLOCK)
    num_blocks = gl.load(count)
    # Who comes next is looked up a unit ahead: one is few steps, and would begin with waiting.
    expert = gl.load(owners + gl.minimum(gl.program_id(0) // TILES, num_blocks - 1))
    number = 0
    for unit in range(gl.program_id(0), num_blocks * TILES, gl.num_programs(0)):
        row = expert * (2 * SIZE) + unit % TILES * BLOCK
        next_unit = gl.minimum(unit + gl.num_programs(0), num_blocks * TILES - 1)
        expert = gl.load(owners + next_unit // TILES)
        first = unit // TILES * BLOCK_M
        for step in range(0, INPUTS // BLOCK, WIDE):
            for part in gl.static_range(WIDE):
                stage = _load_weights(up, row, step, part, SIZE, stages, number, STAGES, WIDE)
                _load_rows(rows, row_scales, first, step, stages, stage, WIDE)
                number += 1
    share, num_units = share_down(num_blocks, TILES, COLUMNS, INPUTS // SIZE)
    expert = gl.load(owners + find_place(0, share, num_blocks, COLUMNS))
    for index in range(num_units):
        next_expert = gl.load(owners + find_place(index + 1, share, num_blocks, COLUMNS))
        unit = find_down(index, share)
        row = expert * INPUTS + unit % COLUMNS * (2 * BLOCK)
        first = unit // COLUMNS * BLOCK_M
        for part in gl.static_range(WIDE):
            for step in range(0, TILES, WIDE):
                stage = _load_weights(down, row, step, part, BLOCK, stages, number, STAGES, WIDE)
                if step + part == 0:
                    wait_for(done + unit // COLUMNS, TILES)
                _load_rows(active, active_scales, first, step, stages, stage, WIDE)
                number += 1
        expert = next_expert
