"""GEMMs of few rows on Hopper, in Gluon: the frame that `raw_small_m` and `fp8_small_m` fill in.

One warp has TMA load steps of the weights and of the rows to stages in shared memory; the others
multiply without a pause between tiles. Weights do not depend on earlier kernels, so TMA loads them
while those still run and memory would be idle. A form says how a group of warps multiplies the
stages.

Legend: T tokens, I inputs, O outputs, S split-K partials; N outputs and M rows of a stage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from milepost.kernels.platform.gluon import OperandStages, load_box, open_bars, wait_free
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import cdiv

_MULTIPLYING, _LOADING = gl.constexpr(104), gl.constexpr(24)
"""Registers of a multiplying thread of the second group, and of a loading thread."""
BESIDE_N = 16
"""Outputs of a raw unit beside."""


class SmallShape(NamedTuple):
    """A product and its tiles; a constant on the device. A stage holds `block_m` rows and `mma_n`
    rows of weights, `lines` times `block_k` inputs of each; the first `block_n` of the weights are
    a tile's outputs. `beside` counts raw outputs, `group` the inputs that share a scale in four
    bits."""

    inputs: int
    outputs: int
    tiles: int
    steps: int
    block_n: int
    block_k: int
    split_k: int
    stages: int
    block_m: int
    mma_n: int
    is_swapped: bool = True
    """Whether the weights are the left operand."""
    beside: int = 0
    group: int = 0
    lines: int = 1
    launch_dependents: bool = True

    @staticmethod
    def of(weight: Any, tiles: Any, block_k: int, **how: Any) -> SmallShape:
        num_inputs, num_outputs = weight.num_inputs, weight.num_outputs
        block_n, split_k = tiles.block_n, tiles.split_k
        num_steps = num_inputs // (split_k * block_k * how.get("lines", 1))
        cut = cdiv(num_outputs, block_n), num_steps, block_n, block_k, split_k, tiles.num_stages
        return SmallShape(num_inputs, num_outputs, *cut, **how)


class SmallBoxes(NamedTuple):
    """TMA descriptors of rows, weights, rows' scales and the raw product beside; None for those
    that a form does not have."""

    rows: Any
    weight: Any
    row_scales: Any = None
    raw_rows: Any = None
    raw_weight: Any = None


class SmallProduct(NamedTuple):
    """The weights' scales, or None, and the tensor [S, T, at least O] that takes the outputs, whose
    rows are O elements apart unless a stride is given."""

    scales: Any
    base: Tensor
    num_tokens: Any
    stride: Any = None


def launch(
    boxes: SmallBoxes, product: SmallProduct, shape: SmallShape, num_programs: int, **how: Any
) -> Tensor:
    """Launches `num_programs` at most; returns the output [T, O], or partials [T, S, O]."""
    num_units = shape.tiles * shape.split_k + cdiv(shape.beside, BESIDE_N)
    grid, output = (min(num_units, num_programs),), product.base
    _gemm_kernel[grid](*boxes, *product, SHAPE=shape, **how, **OVERLAPPED)
    return output if shape.split_k == 1 else output.transpose(0, 1)


@quick
@gluon.jit(do_not_specialize=["num_tokens"])
def _gemm_kernel(
    rows,
    weight,
    row_scales,
    raw_rows,
    raw_weight,
    scales,
    output,
    num_tokens,
    stride,
    SHAPE: gl.constexpr,
    PRODUCE: gl.constexpr,
    CONSUME: gl.constexpr,
):
    """Multiplies units, each a tile of outputs and a share of the inputs. Rows with scales are
    multiplied by two groups of warps."""
    GROUPS: gl.constexpr = 1 if row_scales is None else 2
    inputs, weights, bars = _open_stages(rows, weight, SHAPE, GROUPS)
    if SHAPE.launch_dependents:
        launch_dependents()
    boxes = SmallBoxes(rows, weight, row_scales, raw_rows, raw_weight)
    product = SmallProduct(scales, output, num_tokens, stride)
    if row_scales is None:
        stages = OperandStages(inputs, weights, bars)
        gl.warp_specialize(
            [
                (_consume, (CONSUME, stages, product, 0, SHAPE)),
                (_produce, (PRODUCE, stages, boxes, SHAPE)),
            ],
            [1], [_LOADING],
        )  # fmt: skip
    else:
        # TMA writes from whole lines of 128 bytes on.
        HELD: gl.constexpr = max(SHAPE.block_m, 32)
        held = gl.allocate_shared_memory(gl.float32, [SHAPE.stages, 1, HELD], row_scales.layout)
        stages = OperandStages(inputs, weights, bars, held)
        gl.warp_specialize(
            [
                (_consume, (CONSUME, stages, product, 0, SHAPE)),
                (_consume, (CONSUME, stages, product, 1, SHAPE)),
                (_produce, (PRODUCE, stages, boxes, SHAPE)),
            ],
            [4, 1], [_MULTIPLYING, _LOADING],
        )  # fmt: skip


@gluon.jit
def _consume(CONSUME: gl.constexpr, stages, product, PART: gl.constexpr, SHAPE: gl.constexpr):
    CONSUME(stages, product, PART, SHAPE)


@gluon.jit
def _produce(PRODUCE: gl.constexpr, stages, boxes, SHAPE: gl.constexpr):
    PRODUCE(stages, boxes, SHAPE)


@gluon.jit
def _open_stages(rows, weight, SHAPE: gl.constexpr, GROUPS: gl.constexpr):
    """Allocates inputs [STAGES * LINES, BLOCK_M, K], weights [STAGES * LINES, MMA_N, K] and their
    barriers, for GROUPS of warps that use up a stage."""
    STAGES: gl.constexpr = SHAPE.stages
    LINES: gl.constexpr = STAGES * SHAPE.lines
    dtype: gl.constexpr = weight.dtype
    inputs = gl.allocate_shared_memory(dtype, [LINES, SHAPE.block_m, SHAPE.block_k], rows.layout)
    weights = gl.allocate_shared_memory(dtype, [LINES, SHAPE.mma_n, SHAPE.block_k], weight.layout)
    return inputs, weights, open_bars(STAGES, 1, GROUPS)


@gluon.jit
def produce(stages, boxes, SHAPE: gl.constexpr):
    """Loads every step as soon as there is room. The weights of the first steps are loaded before
    the inputs exist, which are waited for."""
    STAGES: gl.constexpr = SHAPE.stages
    first, stride = gl.program_id(0), gl.num_programs(0)
    num_units = (SHAPE.tiles * SHAPE.split_k - first + stride - 1) // stride
    num_steps = SHAPE.steps * num_units
    num_ahead = gl.minimum(num_steps, STAGES)
    for number in range(num_ahead):
        tile, step = _locate(number, first, stride, SHAPE)
        _fetch_weights(stages, boxes, tile, step, number, SHAPE)
    wait_for_inputs()
    for number in range(num_ahead):
        _, step = _locate(number, first, stride, SHAPE)
        _fetch_inputs(stages, boxes, step, number, SHAPE)
    for number in range(STAGES, num_steps):
        tile, step = _locate(number, first, stride, SHAPE)
        stage = wait_free(stages.bars, number)
        _fetch_weights(stages, boxes, tile, step, stage, SHAPE)
        _fetch_inputs(stages, boxes, step, stage, SHAPE)


@gluon.jit
def _locate(number, first, stride, SHAPE: gl.constexpr):
    """Returns the tile of outputs, and the step along the inputs, of a program's load."""
    unit = first + number // SHAPE.steps * stride
    return unit % SHAPE.tiles, unit // SHAPE.tiles * SHAPE.steps + number % SHAPE.steps


@gluon.jit
def _fetch_weights(stages, boxes, tile, step, stage, SHAPE: gl.constexpr):
    """Starts to load a step's weights; its barrier waits for the inputs too."""
    ROWS: gl.constexpr = boxes.rows.block_type.shape[0]
    BOX: gl.constexpr = boxes.weight.block_type.shape[0]
    bar = stages.bars.index(stage)
    BYTES: gl.constexpr = stages.weights.dtype.primitive_bitwidth // 8
    SCALES: gl.constexpr = 0 if boxes.row_scales is None else 4 * ROWS
    BLOCK_N: gl.constexpr = SHAPE.block_n
    LINES: gl.constexpr = SHAPE.lines
    N: gl.constexpr = BLOCK_N if boxes.row_scales is None else half_of(SHAPE)
    mbarrier.expect(bar, (BLOCK_N + ROWS) * LINES * SHAPE.block_k * BYTES + SCALES)
    for line in gl.static_range(LINES):
        place = stages.weights.index(stage * LINES + line)
        for first in gl.static_range(0, BLOCK_N, BOX):
            at = [tile * BLOCK_N + first, (step * LINES + line) * SHAPE.block_k]
            load_box(boxes.weight, at, bar, place.slice(_row_of(first, N, SHAPE), BOX))


@gluon.constexpr_function
def _row_of(output, N, SHAPE):
    """Returns the row of a stage that holds an output, where the first group of warps has N
    outputs."""
    return output if output < N else SHAPE.mma_n // 2 + output - N


@gluon.constexpr_function
def half_of(SHAPE):
    """Returns how many outputs of a tile the first of two groups of warps multiplies. Each group's
    rows of weights are half of a stage."""
    half = SHAPE.mma_n // 2
    return half if SHAPE.block_n > half else SHAPE.block_n // 2


@gluon.jit
def _fetch_inputs(stages, boxes, step, stage, SHAPE: gl.constexpr):
    bar = stages.bars.index(stage)
    ROWS: gl.constexpr = boxes.rows.block_type.shape[0]
    LINES: gl.constexpr = SHAPE.lines
    for line in gl.static_range(LINES):
        place = stages.inputs.index(stage * LINES + line).slice(0, ROWS)
        load_box(boxes.rows, [0, (step * LINES + line) * SHAPE.block_k], bar, place)
    if boxes.row_scales is not None:
        load_box(boxes.row_scales, [step, 0], bar, stages.row_scales.index(stage))


@gluon.jit
def store(
    product, values, unit, inside, END: gl.constexpr, ACROSS: gl.constexpr, SHAPE: gl.constexpr
):
    """Stores a unit's results for all tokens, which are along the dimension ACROSS. `inside` are
    the outputs within the tile; those from END on are dropped."""
    TOKENS: gl.constexpr = gl.SliceLayout(1 - ACROSS, values.type.layout)
    row = gl.expand_dims(gl.arange(0, values.shape[ACROSS], layout=TOKENS), 1 - ACROSS)
    column = unit % SHAPE.tiles * SHAPE.block_n + inside
    stride = SHAPE.outputs if product.stride is None else product.stride
    target = product.base + (unit // SHAPE.tiles * product.num_tokens + row) * stride + column
    is_column = (inside < END) & (column < SHAPE.outputs)
    gl.store(target, values, mask=is_column & (row < product.num_tokens))
