"""Products of few rows on Hopper, in Gluon: Triton's language for programs that place data
themselves.

The weights don't depend on what runs before, so the copy engine begins to fetch them before the
kernel whose output is multiplied has ended; the time is that of reading them once. Programs go
through tiles of outputs one after the other and fetch the next while they store one.

Legend: T tokens, I inputs, O outputs, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.overlap import OVERLAPPED
from milepost.kernels.overlap_gluon import let_next_start, wait_for_inputs

_DEPTH = 64
"""Inputs of one step: 128 bytes, the widest that the copy engine swizzles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a product is cut up."""

    rows: int
    columns: int
    stages: int
    programs: int
    """Of a multiprocessor."""
    splits: int = 1
    warps: int = 4
    is_early: bool = True
    registers: int = 64


def multiply(hidden: Tensor, weight: Tensor, tiles: Tiles, *, is_gated: bool = False) -> Tensor:
    """`hidden` [T, I] times `weight` [O, I] transposed: [T, O], T at most `tiles.rows`.

    Cut along I in S > 1 parts they stay apart: [T, S, O] in float32. Where `is_gated` the first
    half of the outputs are gates of the second: [T, O / 2], SiLU(gate) * up.
    """
    num_tokens, num_inputs = hidden.shape
    num_outputs = len(weight) // (2 if is_gated else 1)
    if tiles.splits == 1:
        output = hidden.new_empty(num_tokens, num_outputs)
    else:
        output = hidden.new_empty(tiles.splits, num_tokens, num_outputs, dtype=torch.float32)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    num_units = triton.cdiv(num_outputs, tiles.columns) * tiles.splits
    processors = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    _multiply_kernel[(min(num_units, tiles.programs * processors),)](
        TensorDescriptor.from_tensor(hidden, [tiles.rows, _DEPTH], layout),
        TensorDescriptor.from_tensor(weight, [tiles.columns, _DEPTH], layout),
        output,
        num_tokens,
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=_DEPTH,
        SPLITS=tiles.splits,
        STAGES=tiles.stages,
        PARTS=2 if is_gated else 1,
        EARLY=tiles.is_early,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        **OVERLAPPED,
    )
    return output if tiles.splits == 1 else output.transpose(0, 1)


@gluon.jit(do_not_specialize=["num_tokens"])
def _multiply_kernel(
    hidden,
    weight,
    output,
    num_tokens,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Every so many units, each a tile of outputs and a share of the inputs."""
    TILES: gl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    STEPS: gl.constexpr = INPUTS // (SPLITS * DEPTH)
    inputs = gl.allocate_shared_memory(hidden.dtype, [STAGES, ROWS, DEPTH], hidden.layout)
    weights = gl.allocate_shared_memory(
        weight.dtype, [STAGES * PARTS, COLUMNS, DEPTH], weight.layout
    )
    # Places that are loaded, places that are used up.
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2 * STAGES):
        mbarrier.init(bars.index(place), count=1)
    num_units = TILES * SPLITS
    let_next_start()
    consumed = (output, num_tokens, num_units, inputs, weights, bars)
    produced = (hidden, weight, num_units, inputs, weights, bars)
    gl.warp_specialize(
        [
            (_consume, (consumed, OUTPUTS, TILES, STEPS, SPLITS, STAGES, PARTS)),
            (_produce, (produced, OUTPUTS, TILES, STEPS, STAGES, PARTS, EARLY)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _produce(
    produced,
    OUTPUTS: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Load every step, as soon as its place is free; at first the weights, which can be had
    before the inputs."""
    hidden, weight, num_units, inputs, weights, bars = produced
    first, stride = gl.program_id(0), gl.num_programs(0)
    total = STEPS * ((num_units - first + stride - 1) // stride)
    if not EARLY:
        wait_for_inputs()
    num_ahead = gl.minimum(total, STAGES)
    for number in range(num_ahead):
        tile, step = _locate(number, first, stride, TILES, STEPS)
        _fetch_weights(produced, tile, step, number, OUTPUTS, PARTS)
    if EARLY:
        wait_for_inputs()
    for number in range(num_ahead):
        tile, step = _locate(number, first, stride, TILES, STEPS)
        _fetch_inputs(produced, step, number)
    for number in range(STAGES, total):
        tile, step = _locate(number, first, stride, TILES, STEPS)
        stage = number % STAGES
        mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
        _fetch_weights(produced, tile, step, stage, OUTPUTS, PARTS)
        _fetch_inputs(produced, step, stage)


@gluon.jit
def _locate(number, first, stride, TILES: gl.constexpr, STEPS: gl.constexpr):
    """The tile of outputs and the step along the inputs of a program's load of this number."""
    unit = first + number // STEPS * stride
    return unit % TILES, unit // TILES * STEPS + number % STEPS


@gluon.jit
def _fetch_weights(produced, tile, step, stage, OUTPUTS: gl.constexpr, PARTS: gl.constexpr):
    hidden, weight, num_units, inputs, weights, bars = produced
    ROWS: gl.constexpr = inputs.type.shape[1]
    COLUMNS: gl.constexpr = weights.type.shape[1]
    DEPTH: gl.constexpr = weights.type.shape[2]
    bar = bars.index(stage)
    mbarrier.expect(bar, (PARTS * COLUMNS + ROWS) * DEPTH * 2)
    for part in gl.static_range(PARTS):
        at = [part * OUTPUTS + tile * COLUMNS, step * DEPTH]
        tma.async_copy_global_to_shared(weight, at, bar, weights.index(stage * PARTS + part))


@gluon.jit
def _fetch_inputs(produced, step, stage):
    hidden, weight, num_units, inputs, weights, bars = produced
    DEPTH: gl.constexpr = weights.type.shape[2]
    at = [0, step * DEPTH]
    tma.async_copy_global_to_shared(hidden, at, bars.index(stage), inputs.index(stage))


@gluon.jit
def _consume(
    consumed,
    OUTPUTS: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Multiply what is loaded, and store a unit's outputs."""
    output, num_tokens, num_units, inputs, weights, bars = consumed
    ROWS: gl.constexpr = inputs.type.shape[1]
    COLUMNS: gl.constexpr = weights.type.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    WIDE: gl.constexpr = 8 if SPLITS == 1 else 4
    LANES: gl.constexpr = min(COLUMNS // WIDE, 32)
    STORED: gl.constexpr = gl.BlockedLayout([WIDE, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    number = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        result = gl.zeros([COLUMNS, ROWS], gl.float32, layout=RESULT)
        other = result
        for _ in range(STEPS):
            stage = number % STAGES
            mbarrier.wait(bars.index(stage), number // STAGES & 1)
            right = inputs.index(stage).permute((1, 0))
            result = warpgroup_mma(weights.index(stage * PARTS), right, result, is_async=True)
            if PARTS == 2:
                up = weights.index(stage * PARTS + 1)
                other = warpgroup_mma(up, right, other, is_async=True)
                result, other = warpgroup_mma_wait(0, [result, other])
            else:
                result = warpgroup_mma_wait(0, [result])
            mbarrier.arrive(bars.index(STAGES + stage), count=1)
            number += 1
        if PARTS == 2:
            result = result / (1 + gl.exp(-result)) * other
        values = gl.convert_layout(result.to(output.dtype.element_ty), STORED)
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, STORED))[:, None]
        column += unit % TILES * COLUMNS
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, STORED))[None, :]
        target = output + (unit // TILES * num_tokens + row) * OUTPUTS + column
        gl.store(target, values, mask=(column < OUTPUTS) & (row < num_tokens))
