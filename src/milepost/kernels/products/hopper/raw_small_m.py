"""GEMMs of few rows with raw weights on Hopper, in Gluon: their part of `small_m`, alone or beside
the FP8 tiles of `fp8_small_m`.

The tensor cores add up each output's inputs one after the other, so the product of a few rows takes
as long as that chain wherever tiles are narrow. A step then has two lines of inputs, and the warps
that multiply wait for barriers half as often.

Beside FP8 tiles the rows, before rounding, are multiplied by raw weights such as gates have, in the
same launch. These units come after those of the FP8 weights, so SMs with one tile fewer than others
get them first. Steps go through the same stages: one stage of weights is read as 128 lines of 64
numbers of 16 bits. They are the rows, then a unit's weights; up to 32 rows, twice that, for the
next 64 inputs. Rows are the left operand, together with the lines after them, whose results are
dropped.

Legend: T tokens, I inputs, O outputs, S split-K partials; N outputs and M rows of a stage.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from milepost.kernels.platform.gluon import boxes_of, load_box, release, wait_free, wait_loaded
from milepost.kernels.products.forms import Raw
from milepost.kernels.products.hopper import small_m
from milepost.kernels.products.hopper.tiles import RAW_BLOCK_K, RawTiles
from milepost.kernels.products.run import Multiplication

_LINES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
LINE = 64
"""Inputs of a line, the widest that TMA swizzles, and rows of an MMA."""
_MMA_M, _RAW_N = gl.constexpr(LINE), gl.constexpr(small_m.BESIDE_N)


def run(given: Multiplication, tiles: RawTiles) -> Tensor:
    """Multiplies up to 64 rows by raw weights."""
    weight, hidden, output = given.weight_as(Raw), given.values, given.output(tiles.split_k)
    how = {"mma_n": tiles.mma_m, "launch_dependents": given.launch_dependents}
    how |= {"block_m": tiles.block_m, "lines": tiles.lines}
    shape = small_m.SmallShape.of(weight, tiles, RAW_BLOCK_K, **how)
    # Boxes have a power of two of rows.
    height = tiles.block_n & -tiles.block_n
    rows = boxes_of(hidden, tiles.block_m, RAW_BLOCK_K)
    boxes = small_m.SmallBoxes(rows, boxes_of(weight.values, height, RAW_BLOCK_K))
    stride = None if output.is_contiguous() else output.stride(0)
    product = small_m.SmallProduct(None, output, len(hidden), stride)
    # Few registers, so that the kernels before and after fit beside it.
    held = tiles.block_m * tiles.mma_m // (32 * tiles.num_warps)
    room = {"num_warps": tiles.num_warps, "maxnreg": 48 if held <= 16 else 64 if held <= 32 else 96}
    room |= {"PRODUCE": small_m.produce, "CONSUME": _consume}
    return small_m.launch(boxes, product, shape, tiles.programs * given.chip.num_sms, **room)


@gluon.jit
def _consume(stages, product, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Multiplies the loaded stages. Weights are the left operand, which fills the tall side of the
    tensor cores. A stage is released once the next step's multiplications have begun."""
    STAGES: gl.constexpr = SHAPE.stages
    LINES: gl.constexpr = SHAPE.lines
    M: gl.constexpr = SHAPE.block_m
    N: gl.constexpr = SHAPE.mma_n
    WARPS: gl.constexpr = gl.num_warps()
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 16])
    WIDTH: gl.constexpr = 8 if SHAPE.split_k == 1 else 4
    LANES: gl.constexpr = min(N // WIDTH, 32)
    STORED: gl.constexpr = gl.BlockedLayout([WIDTH, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    stage, phase, previous = 0, 0, 0
    for unit in range(gl.program_id(0), SHAPE.tiles * SHAPE.split_k, gl.num_programs(0)):
        result = gl.zeros([N, M], gl.float32, layout=RESULT)
        for step in range(SHAPE.steps):
            mbarrier.wait(stages.bars.index(stage), phase)
            for line in gl.static_range(LINES):
                number = stage * LINES + line
                right = stages.inputs.index(number).permute((1, 0))
                result = warpgroup_mma(stages.weights.index(number), right, result, is_async=True)
            result = warpgroup_mma_wait(LINES, [result])
            if step > 0:
                release(stages.bars, previous)
            # Counted, because a division takes longer than a step of few rows multiplies.
            previous, is_last = stage, stage == STAGES - 1
            stage, phase = gl.where(is_last, 0, stage + 1), phase ^ is_last.to(gl.int32)
        result = warpgroup_mma_wait(0, [result])
        release(stages.bars, previous)
        values = gl.convert_layout(result.to(product.base.dtype.element_ty), STORED)
        inside = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, STORED)), 1)
        small_m.store(product, values, unit, inside, SHAPE.block_n, 1, SHAPE)


@gluon.constexpr_function
def _parts_of(block_m):
    """Returns the number of lines per row in a step if `block_m` rows are loaded; a stage has 128
    lines."""
    return 1 if block_m == LINE else 2


@gluon.jit
def _find_units(SHAPE: gl.constexpr):
    """Returns how many units of FP8 weights this program has, its first raw unit, and the end of
    the raw units."""
    NUM_UNITS: gl.constexpr = SHAPE.tiles * SHAPE.split_k
    first, stride = gl.program_id(0), gl.num_programs(0)
    own = (NUM_UNITS - first + stride - 1) // stride
    return own, first + own * stride, NUM_UNITS + (SHAPE.beside + _RAW_N - 1) // _RAW_N


@gluon.jit
def begin_beside(stages, boxes, SHAPE: gl.constexpr):
    """Starts to load the first raw weights if the program has no FP8 units. Returns the number of
    steps that are under way."""
    STEPS: gl.constexpr = SHAPE.inputs // (_parts_of(boxes.raw_rows.block_type.shape[0]) * _MMA_M)
    own, unit, end = _find_units(SHAPE)
    num_begun = gl.where((own == 0) & (unit < end), min(STEPS, SHAPE.stages), 0)
    for step in range(num_begun):
        _fetch_raw(stages, boxes, unit - SHAPE.tiles * SHAPE.split_k, step, step)
    return num_begun


@gluon.jit
def produce_beside(stages, boxes, num_begun, SHAPE: gl.constexpr):
    """Loads the raw units after those of FP8 weights. Weights of the first `num_begun` steps are
    already under way."""
    STEPS: gl.constexpr = SHAPE.inputs // (_parts_of(boxes.raw_rows.block_type.shape[0]) * _MMA_M)
    own, first, end = _find_units(SHAPE)
    number = own * SHAPE.steps
    for unit in range(first, end, gl.num_programs(0)):
        for step in range(STEPS):
            stage = number % SHAPE.stages
            if number >= num_begun:
                wait_free(stages.bars, number)
                _fetch_raw(stages, boxes, unit - SHAPE.tiles * SHAPE.split_k, step, stage)
            _fetch_raw_rows(stages, boxes, step, stage)
            number += 1


@gluon.jit
def _fetch_raw(stages, boxes, unit, step, stage):
    """Starts to load a step's weights; its barrier waits for the rows too."""
    weight = boxes.raw_weight
    ROWS: gl.constexpr = boxes.raw_rows.block_type.shape[0]
    DEPTH: gl.constexpr = weight.block_type.shape[1]
    PARTS: gl.constexpr = _parts_of(ROWS)
    bar, place = stages.bars.index(stage), _as_lines(stages.weights.index(stage), weight.dtype)
    mbarrier.expect(bar, PARTS * (ROWS + _RAW_N) * DEPTH * 2)
    for part in gl.static_range(PARTS):
        at = [unit * _RAW_N, (step * PARTS + part) * DEPTH]
        load_box(weight, at, bar, place.slice(part * _MMA_M + _MMA_M // PARTS, _RAW_N))


@gluon.jit
def _fetch_raw_rows(stages, boxes, step, stage):
    rows = boxes.raw_rows
    ROWS: gl.constexpr = rows.block_type.shape[0]
    DEPTH: gl.constexpr = rows.block_type.shape[1]
    PARTS: gl.constexpr = _parts_of(ROWS)
    place = _as_lines(stages.weights.index(stage), rows.dtype)
    for part in gl.static_range(PARTS):
        at = [0, (step * PARTS + part) * DEPTH]
        load_box(rows, at, stages.bars.index(stage), place.slice(part * _MMA_M, ROWS))


@gluon.jit
def consume_beside(stages, product, number, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Multiplies half of the outputs of raw units; the program has used up `number` steps."""
    HALF: gl.constexpr = _RAW_N // 2
    PARTS: gl.constexpr = _parts_of(SHAPE.block_m)
    STEPS: gl.constexpr = SHAPE.inputs // (PARTS * _MMA_M)
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dtype: gl.constexpr = product.base.dtype.element_ty
    row = gl.arange(0, _MMA_M, layout=gl.SliceLayout(1, RESULT))[:, None]
    inside = PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, RESULT))[None, :]
    _, first, end = _find_units(SHAPE)
    for unit in range(first, end, gl.num_programs(0)):
        result = gl.zeros([_MMA_M, HALF], gl.float32, layout=RESULT)
        for _ in range(STEPS):
            stage = wait_loaded(stages.bars, number)
            place = _as_lines(stages.weights.index(stage), dtype)
            for part in gl.static_range(PARTS):
                left = place.slice(part * _MMA_M, _MMA_M)
                right = place.slice(part * _MMA_M + _MMA_M // PARTS + PART * HALF, HALF)
                result = warpgroup_mma(left, right.permute((1, 0)), result, is_async=True)
            result = warpgroup_mma_wait(0, [result])
            release(stages.bars, stage)
            number += 1
        column = (unit - SHAPE.tiles * SHAPE.split_k) * _RAW_N + inside
        target = product.base + row * product.stride + SHAPE.outputs + column
        mask = (row < product.num_tokens) & (column < SHAPE.beside)
        gl.store(target, result.to(dtype), mask=mask)


@gluon.jit
def _as_lines(stage, dtype: gl.constexpr):
    """Returns a stage of FP8 weights as twice 64 lines of 64 numbers."""
    return stage._reinterpret(dtype, [2 * _MMA_M, _MMA_M], _LINES)
