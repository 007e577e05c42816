"""A small raw product beside the tiles of Hopper's FP8 GEMM of few rows, in Gluon: the rows, before
rounding, times raw weights, such as gates have.

Its units come after those of the FP8 weights, so SMs with one tile fewer than others get them
first. Steps go through the GEMM's stages: one stage of its weights is read as 128 lines of 64
numbers of 16 bits. They are the rows, then a unit's weights; up to 32 rows, twice that, for the
next 64 inputs. Rows are the left operand, together with the lines after them, whose results are
dropped.

Legend: T tokens, I inputs, R raw outputs.
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
from milepost.kernels.platform.tiles import cdiv

_LINE = 64
"""Inputs of a line, the widest that TMA swizzles; and rows that tensor cores take."""
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_MMA_M = gl.constexpr(_LINE)
_WIDTH = gl.constexpr(16)
"""Outputs of a unit, half of them for each group of warps."""
_LINES = gl.constexpr(_LAYOUT)


@gluon.constexpr_function
def parts_of(block_m):
    """Returns the lines of a row in a step, if `block_m` rows are loaded: a stage has 128 lines."""
    return 1 if block_m == _LINE else 2


class SidedFeed(NamedTuple):
    """A `ScaledFeed` with raw units after those of FP8 weights."""

    hidden: Any
    weight: Any
    num_units: Any
    inputs: Any
    weights: Any
    bars: Any
    row_scales: Any
    held: Any
    raw_rows: Any
    """Descriptor of the rows [T, I], as they were before they were rounded."""
    raw_weight: Any
    """Descriptor of the raw weights [R, I]."""


class Consumed(NamedTuple):
    """Tensors, stages and barriers of the multiplying warps, on the device."""

    scales: Any
    output: Any
    num_tokens: Any
    stride: Any
    num_units: Any
    inputs: Any
    held: Any
    weights: Any
    bars: Any


def count_units(num_raw: int) -> int:
    """Returns the units of this many raw outputs."""
    return cdiv(num_raw, _WIDTH.value)


def describe(
    rows: Tensor, weight: Tensor, block_m: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Returns descriptors of `rows` [T, I], `block_m` at a time, and of a unit's weights [R, I]."""
    return (
        TensorDescriptor.from_tensor(rows, [block_m, _LINE], _LAYOUT),
        TensorDescriptor.from_tensor(weight, [_WIDTH.value, _LINE], _LAYOUT),
    )


@gluon.jit
def _find_units(num_units, RAW: gl.constexpr):
    """Returns how many units of FP8 weights this program has, its first raw unit, and the end of
    the raw units."""
    first, stride = gl.program_id(0), gl.num_programs(0)
    own = (num_units - first + stride - 1) // stride
    return own, first + own * stride, num_units + (RAW + _WIDTH - 1) // _WIDTH


@gluon.jit
def begin_beside(feed, INPUTS: gl.constexpr, STAGES: gl.constexpr, RAW: gl.constexpr):
    """Starts to load the first raw weights if the program has none of FP8; returns for how many
    steps."""
    num_units = feed.num_units
    STEPS: gl.constexpr = INPUTS // (parts_of(feed.raw_rows.block_type.shape[0]) * _MMA_M)
    own, unit, end = _find_units(num_units, RAW)
    num_ahead = gl.where((own == 0) & (unit < end), min(STEPS, STAGES), 0)
    for step in range(num_ahead):
        _fetch_weights(feed, unit - num_units, step, step)
    return num_ahead


@gluon.jit
def produce_beside(
    feed,
    num_ahead,
    INPUTS: gl.constexpr,
    FP8_STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RAW: gl.constexpr,
):
    """Loads the steps of the raw units after those of FP8 weights; the first `num_ahead` steps of
    weights are already on their way."""
    num_units, bars = feed.num_units, feed.bars
    STEPS: gl.constexpr = INPUTS // (parts_of(feed.raw_rows.block_type.shape[0]) * _MMA_M)
    own, begin, end = _find_units(num_units, RAW)
    number = own * FP8_STEPS
    for unit in range(begin, end, gl.num_programs(0)):
        for step in range(STEPS):
            stage = number % STAGES
            if number >= num_ahead:
                mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
                _fetch_weights(feed, unit - num_units, step, stage)
            _fetch_rows(feed, step, stage)
            number += 1


@gluon.jit
def _fetch_weights(feed, unit, step, stage):
    """Starts to load a step's weights; its barrier waits for the rows too."""
    rows, weight, bars = feed.raw_rows, feed.raw_weight, feed.bars
    ROWS: gl.constexpr = rows.block_type.shape[0]
    DEPTH: gl.constexpr = weight.block_type.shape[1]
    PARTS: gl.constexpr = parts_of(ROWS)
    bar, place = bars.index(stage), _as_lines(feed.weights.index(stage), weight.dtype)
    mbarrier.expect(bar, PARTS * (ROWS + _WIDTH) * DEPTH * 2)
    for part in gl.static_range(PARTS):
        at = [unit * _WIDTH, (step * PARTS + part) * DEPTH]
        load_box(weight, at, bar, place.slice(part * _MMA_M + _MMA_M // PARTS, _WIDTH))


@gluon.jit
def _fetch_rows(feed, step, stage):
    rows = feed.raw_rows
    ROWS: gl.constexpr = rows.block_type.shape[0]
    DEPTH: gl.constexpr = rows.block_type.shape[1]
    PARTS: gl.constexpr = parts_of(ROWS)
    place = _as_lines(feed.weights.index(stage), rows.dtype)
    for part in gl.static_range(PARTS):
        at = [0, (step * PARTS + part) * DEPTH]
        load_box(rows, at, feed.bars.index(stage), place.slice(part * _MMA_M, ROWS))


@gluon.jit
def consume_beside(
    consumed,
    number,
    PART: gl.constexpr,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    RAW: gl.constexpr,
):
    """Multiplies half of the outputs of raw units; the program has used up `number` steps."""
    _, output, num_tokens, stride, num_units, inputs, _, weights, bars = consumed
    HALF: gl.constexpr = _WIDTH // 2
    PARTS: gl.constexpr = parts_of(inputs.type.shape[1])
    STEPS: gl.constexpr = INPUTS // (PARTS * _MMA_M)
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    row = gl.arange(0, _MMA_M, layout=gl.SliceLayout(1, RESULT))[:, None]
    inside = PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, RESULT))[None, :]
    _, begin, end = _find_units(num_units, RAW)
    for unit in range(begin, end, gl.num_programs(0)):
        result = gl.zeros([_MMA_M, HALF], gl.float32, layout=RESULT)
        for _ in range(STEPS):
            stage = number % STAGES
            mbarrier.wait(bars.index(stage), number // STAGES & 1)
            place = _as_lines(weights.index(stage), output.dtype.element_ty)
            for part in gl.static_range(PARTS):
                left = place.slice(part * _MMA_M, _MMA_M)
                right = place.slice(part * _MMA_M + _MMA_M // PARTS + PART * HALF, HALF)
                result = warpgroup_mma(left, right.permute((1, 0)), result, is_async=True)
            result = warpgroup_mma_wait(0, [result])
            mbarrier.arrive(bars.index(STAGES + stage), count=1)
            number += 1
        column = (unit - num_units) * _WIDTH + inside
        target = output + row * stride + OUTPUTS + column
        values = result.to(output.dtype.element_ty)
        gl.store(target, values, mask=(row < num_tokens) & (column < RAW))


@gluon.jit
def _as_lines(stage, dtype: gl.constexpr):
    """Returns a stage of FP8 weights as twice 64 lines of 64 numbers."""
    return stage._reinterpret(dtype, [2 * _MMA_M, _MMA_M], _LINES)
