"""GEMMs of up to 64 rows on Hopper, in Gluon: the frame, and raw weights (`fp8_small_m` has FP8).

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
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import load_box
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.forms import Raw
from milepost.kernels.products.hopper.tiles import RAW_BLOCK_K, RawTiles
from milepost.kernels.products.run import Multiplication

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_MULTIPLYING, _LOADING = gl.constexpr(104), gl.constexpr(24)
"""Registers of a multiplying thread of the second group, and of a loading thread."""
BESIDE_N = 16
"""Outputs of a raw unit beside."""


class SmallShape(NamedTuple):
    """A product and its tiles; a constant on the device. A stage holds `block_m` rows and `mma_n`
    rows of weights; the first `block_n` of these are a tile's outputs. `beside` counts raw outputs,
    `group` the inputs that share a scale in four bits."""

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
    launch_dependents: bool = True

    @staticmethod
    def of(weight: Any, tiles: Any, block_k: int, **how: Any) -> SmallShape:
        num_inputs, num_outputs = weight.num_inputs, weight.num_outputs
        block_n, split_k = tiles.block_n, tiles.split_k
        num_tiles, num_steps = cdiv(num_outputs, block_n), num_inputs // (split_k * block_k)
        cut = num_tiles, num_steps, block_n, block_k, split_k, tiles.num_stages
        return SmallShape(num_inputs, num_outputs, *cut, **how)


class SmallBoxes(NamedTuple):
    """TMA descriptors of rows, weights, rows' scales and the raw product beside; None for those
    that a form does not have."""

    rows: Any
    weight: Any
    row_scales: Any = None
    raw_rows: Any = None
    raw_weight: Any = None


class SmallStages(NamedTuple):
    """Inputs [STAGES, BLOCK_M, BLOCK_K], weights [STAGES, MMA_N, BLOCK_K] and rows' scales [STAGES,
    1, at least BLOCK_M] in shared memory, and barriers: loaded stages first, then used ones."""

    inputs: Any
    weights: Any
    bars: Any
    row_scales: Any


class SmallProduct(NamedTuple):
    """The weights' scales, or None, and the tensor [S, T, at least O] that takes the outputs, whose
    rows are O elements apart unless a stride is given."""

    scales: Any
    base: Tensor
    num_tokens: Any
    stride: Any = None


def run(given: Multiplication, tiles: RawTiles) -> Tensor:
    """Multiplies up to 64 rows by raw weights."""
    weight, hidden, output = given.weight, given.values, given.output(tiles.split_k)
    assert isinstance(weight, Raw), "the kernel's form"
    how = {"mma_n": tiles.mma_m, "launch_dependents": given.launch_dependents}
    shape = SmallShape.of(weight, tiles, RAW_BLOCK_K, block_m=tiles.block_m, **how)
    # Boxes have a power of two of rows.
    box = [tiles.block_n & -tiles.block_n, RAW_BLOCK_K]
    boxes = SmallBoxes(
        TensorDescriptor.from_tensor(hidden, [tiles.block_m, RAW_BLOCK_K], _LAYOUT),
        TensorDescriptor.from_tensor(weight.values, box, _LAYOUT),
    )
    stride = None if output.is_contiguous() else output.stride(0)
    product = SmallProduct(None, output, len(hidden), stride)
    # Few registers, so that the kernels before and after fit beside it.
    held = tiles.block_m * tiles.mma_m // (32 * tiles.num_warps)
    room = {"num_warps": tiles.num_warps, "maxnreg": 48 if held <= 16 else 64 if held <= 32 else 96}
    room |= {"PRODUCE": produce, "CONSUME": _consume_raw}
    return launch(boxes, product, shape, tiles.programs * given.chip.num_sms, **room)


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
        stages = SmallStages(inputs, weights, bars, None)
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
        stages = SmallStages(inputs, weights, bars, held)
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
    """Allocates the stages and their barriers, for GROUPS of warps that use up a stage."""
    STAGES: gl.constexpr = SHAPE.stages
    dtype: gl.constexpr = weight.dtype
    inputs = gl.allocate_shared_memory(dtype, [STAGES, SHAPE.block_m, SHAPE.block_k], rows.layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES, SHAPE.mma_n, SHAPE.block_k], weight.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(STAGES):
        mbarrier.init(bars.index(bar), count=1)
        mbarrier.init(bars.index(STAGES + bar), count=GROUPS)
    return inputs, weights, bars


@gluon.jit
def produce(stages, boxes, SHAPE: gl.constexpr):
    """Loads every step as soon as there is room: first the weights of those that fit, then, once
    there are any, their inputs."""
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
        stage = number % STAGES
        mbarrier.wait(stages.bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
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
    BLOCK_N: gl.constexpr = SHAPE.block_n
    bar = stages.bars.index(stage)
    BYTES: gl.constexpr = stages.weights.dtype.primitive_bitwidth // 8
    SCALES: gl.constexpr = 0 if boxes.row_scales is None else 4 * ROWS
    mbarrier.expect(bar, (BLOCK_N + ROWS) * SHAPE.block_k * BYTES + SCALES)
    place = stages.weights.index(stage)
    for first in gl.static_range(0, BLOCK_N, BOX):
        at = [tile * BLOCK_N + first, step * SHAPE.block_k]
        load_box(boxes.weight, at, bar, place.slice(first, BOX))


@gluon.jit
def _fetch_inputs(stages, boxes, step, stage, SHAPE: gl.constexpr):
    bar = stages.bars.index(stage)
    ROWS: gl.constexpr = boxes.rows.block_type.shape[0]
    place = stages.inputs.index(stage).slice(0, ROWS)
    load_box(boxes.rows, [0, step * SHAPE.block_k], bar, place)
    if boxes.row_scales is not None:
        load_box(boxes.row_scales, [step, 0], bar, stages.row_scales.index(stage))


@gluon.jit
def _consume_raw(stages, product, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Multiplies the loaded stages. Weights are the left operand, which fills the tall side of the
    tensor cores. A stage is released once the next step's multiplications have begun."""
    STAGES: gl.constexpr = SHAPE.stages
    M: gl.constexpr = SHAPE.block_m
    N: gl.constexpr = SHAPE.mma_n
    WARPS: gl.constexpr = gl.num_warps()
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 16])
    WIDTH: gl.constexpr = 8 if SHAPE.split_k == 1 else 4
    LANES: gl.constexpr = min(N // WIDTH, 32)
    STORED: gl.constexpr = gl.BlockedLayout([WIDTH, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    number = 0
    for unit in range(gl.program_id(0), SHAPE.tiles * SHAPE.split_k, gl.num_programs(0)):
        result = gl.zeros([N, M], gl.float32, layout=RESULT)
        for step in range(SHAPE.steps):
            stage = number % STAGES
            mbarrier.wait(stages.bars.index(stage), number // STAGES & 1)
            right = stages.inputs.index(stage).permute((1, 0))
            result = warpgroup_mma(stages.weights.index(stage), right, result, is_async=True)
            result = warpgroup_mma_wait(1, [result])
            if step > 0:
                mbarrier.arrive(stages.bars.index(STAGES + (number - 1) % STAGES), count=1)
            number += 1
        result = warpgroup_mma_wait(0, [result])
        mbarrier.arrive(stages.bars.index(STAGES + (number - 1) % STAGES), count=1)
        values = gl.convert_layout(result.to(product.base.dtype.element_ty), STORED)
        inside = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, STORED)), 1)
        store(product, values, unit, inside, 1, SHAPE)


@gluon.jit
def store(product, values, unit, inside, ACROSS: gl.constexpr, SHAPE: gl.constexpr):
    """Stores a unit's results: outputs `inside` its tile, and tokens ACROSS them."""
    TOKENS: gl.constexpr = gl.SliceLayout(1 - ACROSS, values.type.layout)
    row = gl.expand_dims(gl.arange(0, values.shape[ACROSS], layout=TOKENS), 1 - ACROSS)
    column = unit % SHAPE.tiles * SHAPE.block_n + inside
    stride = SHAPE.outputs if product.stride is None else product.stride
    target = product.base + (unit // SHAPE.tiles * product.num_tokens + row) * stride + column
    is_column = (inside < SHAPE.block_n) & (column < SHAPE.outputs)
    gl.store(target, values, mask=is_column & (row < product.num_tokens))
