"""GEMMs of few rows with raw weights on Hopper, in Gluon, and what FP8's share with them.

The weights do not depend on the kernels before, so TMA begins to fetch them while those still run,
when memory would be idle. One warp has TMA load the steps of the weights and of the inputs to
stages in shared memory, the others multiply; they do not pause between one tile and the next.

Legend: T tokens, I inputs, O outputs, S split-K partials.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import launch_dependents, load_box, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.products.forms.matrix import Raw
from milepost.kernels.products.run_products import Multiplication
from milepost.kernels.products.tiles import RAW_BLOCK_K as BLOCK_K
from milepost.kernels.products.tiles import RawTiles

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_PRODUCER_REGISTERS = 24


class Feed(NamedTuple):
    """Descriptors, stages and barriers of the loading warp, on the device."""

    hidden: Any
    """Descriptor of the rows."""
    weight: Any
    """Descriptor of the weight."""
    num_units: Any
    inputs: Any
    """[STAGES, BLOCK_M, BLOCK_K] in shared memory."""
    weights: Any
    """[STAGES, MMA_M, BLOCK_K] in shared memory."""
    bars: Any
    """Barriers: loaded stages first, then used ones."""


class ScaledFeed(NamedTuple):
    """A `Feed` whose rows have scales."""

    hidden: Any
    weight: Any
    num_units: Any
    inputs: Any
    weights: Any
    bars: Any
    row_scales: Any
    """Descriptor of the rows' scales."""
    held: Any
    """[STAGES, 1, BLOCK_M] in shared memory."""


def run(given: Multiplication, tiles: RawTiles) -> Tensor:
    """Multiplies up to 64 rows by raw weights."""
    hidden, weight = given.values, given.weight
    assert isinstance(weight, Raw), "the kernel's form"
    output = given.new_output(tiles.split_k)
    num_units = triton.cdiv(weight.num_outputs, tiles.block_n) * tiles.split_k
    # What is copied at a time has a power of two of rows.
    box = tiles.block_n & -tiles.block_n
    _gemm_kernel[(min(num_units, tiles.programs * given.chip.num_sms),)](
        TensorDescriptor.from_tensor(hidden, [tiles.block_m, BLOCK_K], _LAYOUT),
        TensorDescriptor.from_tensor(weight.values, [box, BLOCK_K], _LAYOUT),
        output,
        len(hidden),
        INPUTS=weight.num_inputs,
        OUTPUTS=weight.num_outputs,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        MMA_M=tiles.mma_m,
        BLOCK_K=BLOCK_K,
        SPLIT_K=tiles.split_k,
        STAGES=tiles.num_stages,
        LAUNCH_DEPENDENTS=given.launch_dependents,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=tiles.num_warps,
        maxnreg=_registers(tiles),
        **OVERLAPPED,
    )
    return output if tiles.split_k == 1 else output.transpose(0, 1)


def _registers(tiles: RawTiles) -> int:
    """Returns a thread's registers: few, so that the kernels before and after find room."""
    held = tiles.block_m * tiles.mma_m // (32 * tiles.num_warps)
    return 48 if held <= 16 else 64 if held <= 32 else 96


@quick
@gluon.jit(do_not_specialize=["num_tokens"])
def _gemm_kernel(
    hidden,
    weight,
    output,
    num_tokens,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    MMA_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    LAUNCH_DEPENDENTS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Multiplies units, each a tile of outputs and a share of the inputs."""
    TILES: gl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = INPUTS // (SPLIT_K * BLOCK_K)
    inputs, weights, bars = open_stages(hidden, weight, BLOCK_M, MMA_M, BLOCK_K, STAGES)
    num_units = TILES * SPLIT_K
    if LAUNCH_DEPENDENTS:
        launch_dependents()
    consumed = (output, num_tokens, num_units, inputs, weights, bars)
    feed = Feed(hidden, weight, num_units, inputs, weights, bars)
    gl.warp_specialize(
        [
            (_consume, (consumed, OUTPUTS, BLOCK_N, TILES, STEPS, SPLIT_K, STAGES)),
            (produce, (feed, BLOCK_N, TILES, STEPS, STAGES)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )


@gluon.jit
def _consume(
    consumed,
    OUTPUTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiplies what is loaded. The weights are the left operand: they fill the tensor cores' tall
    side. A step is used up once the multiplications of the next have begun."""
    output, num_tokens, num_units, inputs, weights, bars = consumed
    BLOCK_M: gl.constexpr = inputs.type.shape[1]
    MMA_M: gl.constexpr = weights.type.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    WIDTH: gl.constexpr = 8 if SPLIT_K == 1 else 4
    LANES: gl.constexpr = min(MMA_M // WIDTH, 32)
    STORED: gl.constexpr = gl.BlockedLayout([WIDTH, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    number = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        result = gl.zeros([MMA_M, BLOCK_M], gl.float32, layout=RESULT)
        for step in range(STEPS):
            stage = number % STAGES
            mbarrier.wait(bars.index(stage), number // STAGES & 1)
            right = inputs.index(stage).permute((1, 0))
            result = warpgroup_mma(weights.index(stage), right, result, is_async=True)
            result = warpgroup_mma_wait(1, [result])
            if step > 0:
                _release(bars, number - 1, STAGES)
            number += 1
        result = warpgroup_mma_wait(0, [result])
        _release(bars, number - 1, STAGES)
        values = gl.convert_layout(result.to(output.dtype.element_ty), STORED)
        store_tile(output, values, unit, num_tokens, OUTPUTS, BLOCK_N, TILES, STORED)


@gluon.jit
def _release(bars, number, STAGES: gl.constexpr):
    """Lets the stage of this step be loaded again."""
    mbarrier.arrive(bars.index(STAGES + number % STAGES), count=1)


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
    """Allocates the stages and their barriers."""
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
    feed,
    BLOCK_N: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Loads every step as soon as there is room: first the weights of those that fit, then, once
    there are any, their inputs."""
    num_units, bars = feed.num_units, feed.bars
    first, stride = gl.program_id(0), gl.num_programs(0)
    num_steps = STEPS * ((num_units - first + stride - 1) // stride)
    num_ahead = gl.minimum(num_steps, STAGES)
    for number in range(num_ahead):
        tile, step = _locate(number, first, stride, TILES, STEPS)
        _fetch_weights(feed, tile, step, number, BLOCK_N)
    wait_for_inputs()
    for number in range(num_ahead):
        _, step = _locate(number, first, stride, TILES, STEPS)
        _fetch_inputs(feed, step, number)
    for number in range(STAGES, num_steps):
        tile, step = _locate(number, first, stride, TILES, STEPS)
        stage = number % STAGES
        mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
        _fetch_weights(feed, tile, step, stage, BLOCK_N)
        _fetch_inputs(feed, step, stage)


@gluon.jit
def _locate(number, first, stride, TILES: gl.constexpr, STEPS: gl.constexpr):
    """Returns the tile of outputs, and the step along the inputs, of a program's load."""
    unit = first + number // STEPS * stride
    return unit % TILES, unit // TILES * STEPS + number % STEPS


@gluon.jit
def _fetch_weights(feed, tile, step, stage, BLOCK_N: gl.constexpr):
    """Starts to load a step's weights; its barrier waits for the inputs too."""
    hidden, weight, weights = feed.hidden, feed.weight, feed.weights
    ROWS: gl.constexpr = hidden.block_type.shape[0]
    BLOCK_K: gl.constexpr = weights.type.shape[2]
    BOX: gl.constexpr = weight.block_type.shape[0]
    bar = feed.bars.index(stage)
    BYTES: gl.constexpr = weights.dtype.primitive_bitwidth // 8
    SCALES: gl.constexpr = 4 * ROWS if len(feed) > 6 else 0
    mbarrier.expect(bar, (BLOCK_N + ROWS) * BLOCK_K * BYTES + SCALES)
    place = weights.index(stage)
    for first in gl.static_range(0, BLOCK_N, BOX):
        at = [tile * BLOCK_N + first, step * BLOCK_K]
        load_box(weight, at, bar, place.slice(first, BOX))


@gluon.jit
def _fetch_inputs(feed, step, stage):
    hidden, inputs, bars = feed.hidden, feed.inputs, feed.bars
    BLOCK_K: gl.constexpr = inputs.type.shape[2]
    ROWS: gl.constexpr = hidden.block_type.shape[0]
    place = inputs.index(stage).slice(0, ROWS)
    load_box(hidden, [0, step * BLOCK_K], bars.index(stage), place)
    if len(feed) > 6:
        load_box(feed.row_scales, [step, 0], bars.index(stage), feed.held.index(stage))


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
    """Stores a unit's results [MMA_M, BLOCK_M], whose first BLOCK_N rows are its outputs, to
    `output` [splits, tokens, OUTPUTS]."""
    inside = gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, STORED))[:, None]
    column = unit % TILES * BLOCK_N + inside
    row = gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, STORED))[None, :]
    target = output + (unit // TILES * num_tokens + row) * OUTPUTS + column
    is_column = (inside < BLOCK_N) & (column < OUTPUTS)
    gl.store(target, values, mask=is_column & (row < num_tokens))
