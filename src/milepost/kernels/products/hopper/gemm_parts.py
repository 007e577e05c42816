"""What Hopper's GEMMs of few rows have in common, in Gluon: one warp has TMA load the steps of the
weights and of the inputs, while the others multiply.

The stages are `inputs` [STAGES, BLOCK_M, BLOCK_K] and `weights` [STAGES, MMA_M, BLOCK_K] in
shared memory, and `bars`: those that are loaded, then those that are used up.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from milepost.kernels.platform.gluon import load_box, wait_for_inputs


@gluon.jit
def open_stages(
    hidden,
    weight,
    BLOCK_M: gl.constexpr,
    MMA_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr = 1,
):
    """Shared memory for the stages, and their barriers."""
    dtype: gl.constexpr = weight.dtype
    inputs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], hidden.layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES, MMA_M, BLOCK_K], weight.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(STAGES):
        mbarrier.init(bars.index(bar), count=1)
        mbarrier.init(bars.index(STAGES + bar), count=CONSUMERS)
    return inputs, weights, bars


@gluon.jit
def produce(
    produced,
    BLOCK_N: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load every step as soon as there is room: of the first ones the weights, then, once there
    are any, the inputs."""
    num_units, bars = produced[2], produced[5]
    first, stride = gl.program_id(0), gl.num_programs(0)
    num_steps = STEPS * ((num_units - first + stride - 1) // stride)
    num_ahead = gl.minimum(num_steps, STAGES)
    for number in range(num_ahead):
        tile, step = _locate(number, first, stride, TILES, STEPS)
        _fetch_weights(produced, tile, step, number, BLOCK_N)
    wait_for_inputs()
    for number in range(num_ahead):
        _, step = _locate(number, first, stride, TILES, STEPS)
        _fetch_inputs(produced, step, number)
    for number in range(STAGES, num_steps):
        tile, step = _locate(number, first, stride, TILES, STEPS)
        stage = number % STAGES
        mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
        _fetch_weights(produced, tile, step, stage, BLOCK_N)
        _fetch_inputs(produced, step, stage)


@gluon.jit
def _locate(number, first, stride, TILES: gl.constexpr, STEPS: gl.constexpr):
    """The tile of outputs and the step along the inputs of a program's load of this number."""
    unit = first + number // STEPS * stride
    return unit % TILES, unit // TILES * STEPS + number % STEPS


@gluon.jit
def _fetch_weights(produced, tile, step, stage, BLOCK_N: gl.constexpr):
    """Have a step's weights loaded; its barrier waits for the inputs too."""
    hidden, weight, weights, bars = produced[0], produced[1], produced[4], produced[5]
    ROWS: gl.constexpr = hidden.block_type.shape[0]
    BLOCK_K: gl.constexpr = weights.type.shape[2]
    BOX: gl.constexpr = weight.block_type.shape[0]
    bar = bars.index(stage)
    BYTES: gl.constexpr = weights.dtype.primitive_bitwidth // 8
    SCALES: gl.constexpr = 4 * ROWS if len(produced) > 6 else 0
    mbarrier.expect(bar, (BLOCK_N + ROWS) * BLOCK_K * BYTES + SCALES)
    place = weights.index(stage)
    for first in gl.static_range(0, BLOCK_N, BOX):
        at = [tile * BLOCK_N + first, step * BLOCK_K]
        load_box(weight, at, bar, place.slice(first, BOX))


@gluon.jit
def _fetch_inputs(produced, step, stage):
    hidden, inputs, bars = produced[0], produced[3], produced[5]
    BLOCK_K: gl.constexpr = inputs.type.shape[2]
    ROWS: gl.constexpr = hidden.block_type.shape[0]
    place = inputs.index(stage).slice(0, ROWS)
    load_box(hidden, [0, step * BLOCK_K], bars.index(stage), place)
    if len(produced) > 6:
        load_box(produced[6], [step, 0], bars.index(stage), produced[7].index(stage))


@gluon.jit
def store_tile(
    output,
    values,
    unit,
    num_tokens,
    OUTPUTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TILES: gl.constexpr,
    STORED: gl.constexpr,
):
    """A unit's results [MMA_M, BLOCK_M], of which BLOCK_N outputs are its own, to `output`
    [splits, tokens, OUTPUTS]."""
    inside = gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, STORED))[:, None]
    column = unit % TILES * BLOCK_N + inside
    row = gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, STORED))[None, :]
    target = output + (unit // TILES * num_tokens + row) * OUTPUTS + column
    is_column = (inside < BLOCK_N) & (column < OUTPUTS)
    gl.store(target, values, mask=is_column & (row < num_tokens))
