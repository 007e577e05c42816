"""Products that a program makes of FP8 experts with few tokens on Hopper, in Gluon.

`fp8_experts` describes the stages.

Legend: M rows of a block.
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

BLOCK_M = 8
RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32]))
_BLOCK, _M = gl.constexpr(BLOCK), gl.constexpr(BLOCK_M)
_LARGEST, _LEAST_SCALE = gl.constexpr(FP8_MAX), gl.constexpr(LEAST_SCALE)


@gluon.jit
def add_up_at_once(
    stages,
    number,
    p_first,
    p_second,
    STEPS: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Two sums [_BLOCK, M] of products, each with its scales: a step has one block of either."""
    first, second = _nothing(), _nothing()
    first_scale, second_scale = gl.load(p_first), gl.load(p_second)
    for step in range(STEPS):
        ahead = gl.minimum(step + 1, STEPS - 1)
        next_first, next_second = gl.load(p_first + ahead), gl.load(p_second + ahead)
        product, other, scale, _ = _multiply(stages, number + step, SHAPE)
        first += product * (scale * first_scale)
        second += other * (scale * second_scale)
        first_scale, second_scale = next_first, next_second
    return first, second


@gluon.jit
def add_up_in_turn(
    stages,
    number,
    p_first,
    p_second,
    STEPS: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """As `add_up_at_once`, if a step has two blocks of one sum, and the next step two of the
    other."""
    first, second = _nothing(), _nothing()
    a, b = gl.load(p_first), gl.load(p_first + 1)
    c, d = gl.load(p_second), gl.load(p_second + 1)
    for step in range(0, STEPS, 2):
        ahead = gl.minimum(step + 2, STEPS - 2)
        next_a, next_b = gl.load(p_first + ahead), gl.load(p_first + ahead + 1)
        next_c, next_d = gl.load(p_second + ahead), gl.load(p_second + ahead + 1)
        product, other, scale, other_scale = _multiply(stages, number + step, SHAPE)
        first += product * (scale * a)
        first += other * (other_scale * b)
        product, other, scale, other_scale = _multiply(stages, number + step + 1, SHAPE)
        second += product * (scale * c)
        second += other * (other_scale * d)
        a, b, c, d = next_a, next_b, next_c, next_d
    return first, second


@gluon.jit
def add_up(stages, number, p_scale, STEPS: gl.constexpr, SHAPE: gl.constexpr):
    """Returns one such sum; a step has two of its blocks."""
    total = _nothing()
    for step in gl.static_range(0, STEPS, 2):
        a, b = gl.load(p_scale + step), gl.load(p_scale + step + 1)
        product, other, scale, other_scale = _multiply(stages, number + step // 2, SHAPE)
        total += product * (scale * a)
        total += other * (other_scale * b)
    return total


@gluon.jit
def _nothing():
    return gl.zeros([_BLOCK, _M], gl.float32, layout=RESULT)


@gluon.jit
def _multiply(stages, number, SHAPE: gl.constexpr):
    """Returns a step's two products [BLOCK, M], and the scales of the rows of each."""
    inputs, weights, held, bars = stages.inputs, stages.weights, stages.held, stages.bars
    STAGES: gl.constexpr = SHAPE.stages
    WIDE: gl.constexpr = inputs.type.shape[0] // STAGES
    stage = number % STAGES
    own, others = WIDE * stage, WIDE * stage + WIDE - 1
    mbarrier.wait(bars.index(stage), number // STAGES & 1)
    nothing = _nothing()
    right, other = inputs.index(own).permute((1, 0)), inputs.index(others).permute((1, 0))
    first = warpgroup_mma(weights.index(2 * stage), right, nothing, use_acc=False, is_async=True)
    second = warpgroup_mma(
        weights.index(2 * stage + 1), other, nothing, use_acc=False, is_async=True
    )
    scale = held.index(own).slice(0, _M, dim=1).load(RESULT)
    other_scale = held.index(others).slice(0, _M, dim=1).load(RESULT)
    first, second = warpgroup_mma_wait(0, [first, second])
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    return first, second, scale, other_scale


@gluon.jit
def round_active(gate, up, DTYPE: gl.constexpr):
    """SiLU(gate) * up [_BLOCK, M], rounded, and the rows' scales."""
    values = gate * (1 / (1 + gl.exp(-gate))) * up
    # Between the projections activations have 16 bits, whatever computes them.
    values = values.to(DTYPE).to(gl.float32)
    scale = gl.maximum(gl.max(gl.abs(values), 0) / _LARGEST, _LEAST_SCALE)
    values = gl.minimum(gl.maximum(values / scale[None, :], -_LARGEST), _LARGEST)
    return values.to(gl.float8e4nv), scale
