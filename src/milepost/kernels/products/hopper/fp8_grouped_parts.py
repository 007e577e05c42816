"""Products that a group of warps makes of FP8 experts with many rows on Hopper, in Gluon.

Two groups of four warps multiply 64 rows each of the same block: while one adds a step's product up
in float32, times its scales, the other's runs on the tensor cores. They begin in turn: begun at
once they end at once, and the tensor cores wait for both (a layer's up projection on an H200, 8,192
tokens: 378 us, not in turn 458). A step is as deep as a block that shares a scale.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from milepost.kernels.platform.tensors import FP8_MAX, LEAST_SCALE
from milepost.kernels.products.forms.quantised import BLOCK

HALF = 64
"""Rows of a group of warps, half of a block's."""
RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32]))
_LARGEST, _LEAST_SCALE = gl.constexpr(FP8_MAX), gl.constexpr(LEAST_SCALE)
_HALF, _BLOCK = gl.constexpr(HALF), gl.constexpr(BLOCK)


@gluon.jit
def multiply(
    p_first,
    APART: gl.constexpr,
    p_row,
    stride,
    number,
    turn,
    is_tall,
    stages,
    _HALFTILE: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Returns both parts' products [HALF, BLOCK] of a tile, whose scales are at `p_first` and APART
    from it; those of its rows at `p_row`, step by step `stride` apart. `turn` counts the products
    of tiles in which both groups have rows, `is_tall`."""
    STAGES: gl.constexpr = SHAPE.stages
    PARTS: gl.constexpr = SHAPE.parts
    bars = stages.bars
    p_second = p_first + APART
    first = gl.zeros([_HALF, _BLOCK], gl.float32, layout=RESULT)
    second = first
    first_scale, second_scale, row_scale = gl.load(p_first), gl.load(p_second), gl.load(p_row)
    for step in range(SHAPE.steps):
        ahead = gl.minimum(step + 1, SHAPE.steps - 1)
        next_first, next_second = gl.load(p_first + ahead), gl.load(p_second + ahead)
        next_row = gl.load(p_row + ahead * stride)
        stage = number % STAGES
        mbarrier.wait(bars.index(stage), number // STAGES & 1)
        left = stages.inputs.index(2 * stage + _HALFTILE)
        right = stages.weights.index(stage * PARTS).permute((1, 0))
        product = _multiply_in_turn(left, right, stages.turns, turn, is_tall, _HALFTILE)
        turn += 1
        if PARTS == 1:
            mbarrier.arrive(bars.index(STAGES + stage), count=1)
        first = _add_here(first, product, row_scale * first_scale)
        if PARTS == 2:
            right = stages.weights.index(stage * PARTS + 1).permute((1, 0))
            product = _multiply_in_turn(left, right, stages.turns, turn, is_tall, _HALFTILE)
            turn += 1
            mbarrier.arrive(bars.index(STAGES + stage), count=1)
            second = _add_here(second, product, row_scale * second_scale)
        first_scale, second_scale, row_scale = next_first, next_second, next_row
        number += 1
    return first, second


@gluon.jit
def _multiply_in_turn(left, right, turns, turn, is_tall, _HALFTILE: gl.constexpr):
    """The product, begun when the other group's is: both at once would end at once, and then the
    tensor cores would wait for both."""
    nothing = gl.zeros([_HALF, _BLOCK], gl.float32, layout=RESULT)
    mbarrier.wait(turns.index(_HALFTILE), (turn & 1) ^ (1 - _HALFTILE), pred=is_tall)
    product = warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - _HALFTILE), count=1, pred=is_tall)
    return warpgroup_mma_wait(0, [product])


@gluon.jit
def _add_here(total, product, scale):
    """`total` plus rows of `product` times their scales. The compiler would rather add up after
    the next product, and has no registers for two: so what comes of it is used at once."""
    total += product * scale[:, None]
    return gl.inline_asm_elementwise(
        "mov.f32 $0, $1;", "=f,f", [total], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def skip(number, bars, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Gives a tile's steps back without rows of one's own."""
    for _ in range(STEPS):
        mbarrier.wait(bars.index(number % STAGES), number // STAGES & 1)
        mbarrier.arrive(bars.index(STAGES + number % STAGES), count=1)
        number += 1


@gluon.jit
def round_active(gate, up, SHAPE: gl.constexpr):
    """Returns rounded activations and their rows' scales."""
    if SHAPE.is_gated:
        values = gate / (1 + gl.exp(-gate)) * up
    else:
        values = gl.maximum(gate, 0.0)
        values *= values
    # Between the projections activations have 16 bits, whatever computes them.
    values = values.to(gl.bfloat16 if SHAPE.is_bfloat else gl.float16).to(gl.float32)
    scale = gl.maximum(gl.max(gl.abs(values), 1) / _LARGEST, _LEAST_SCALE)
    values = gl.minimum(gl.maximum(values / scale[:, None], -_LARGEST), _LARGEST)
    return values.to(gl.float8e4nv), scale
