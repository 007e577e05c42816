"""Products that a group of warps makes of int4 experts with many rows on Hopper, in Gluon.

Two groups of four warps multiply 64 outputs each of both parts of the weights with the same rows.
Weights are the left operand, which the tensor cores take from registers: while they multiply a
quarter of a step for a group, it unpacks the next one. A number is rounded to the rows' type, as
where a launch of its own unpacks it, and so the products have the same bits.

Legend: N outputs of a group, M rows, K inputs of a half of a step.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from milepost.kernels.platform.gluon import thread_barrier
from milepost.kernels.products.forms.quantised import BLOCK

HALF = BLOCK // 2
_BLOCK, _HALF = gl.constexpr(BLOCK), gl.constexpr(HALF)
_PACKED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[HALF, HALF // 2],
    )
)
"""Layout of packed weights, two bytes in a number: a thread has those whose numbers it
multiplies."""
OF_OUTPUTS = gl.constexpr(gl.SliceLayout(1, _PACKED.value))


@gluon.constexpr_function
def _products_layout(width: int) -> Any:
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def _weights_layout(width: int) -> Any:
    return gl.DotOperandLayout(0, _products_layout(width), 2)


@gluon.jit
def load_scales(p_scale, p_zero, stride, place):
    """Loads one group's scales and zero points [N] by part, `stride` apart, the `place`-th."""
    scales, zeros = (), ()
    for part in gl.static_range(2):
        scales += (gl.load(p_scale + part * stride + place),)
        zeros += (gl.load(p_zero + part * stride + place),)
    return scales, zeros


@gluon.jit
def multiply(
    stages,
    held,
    p_scale,
    p_zero,
    stride,
    number,
    OWN: gl.constexpr,
    WIDTH: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Returns both parts' products [N, WIDTH] of a tile, whose first step has the `number` among a
    program's and the scales `held`; those of later ones are at `p_scale` and `p_zero`.

    What the tensor cores read from registers must be there before they begin, and they are waited
    for before more is: ptxas lets nothing else overlap."""
    inputs, weights, bars = stages.inputs, stages.weights, stages.bars
    STEPS: gl.constexpr = SHAPE.steps
    STAGES: gl.constexpr = SHAPE.stages
    dtype: gl.constexpr = inputs.dtype
    scales, zeros = held
    first = gl.zeros([_HALF, WIDTH], gl.float32, _products_layout(WIDTH))
    second = gl.zeros([_HALF, WIDTH], gl.float32, _products_layout(WIDTH))
    mbarrier.wait(bars.index(number % STAGES), number // STAGES & 1)
    packed = _load(weights, number % STAGES, 0, OWN)
    left = _unpack(packed, zeros[0], scales[0], False, dtype, WIDTH)
    for step in range(STEPS):
        stage = number % STAGES
        low = inputs.index(2 * stage).slice(0, WIDTH, 0).permute((1, 0))
        high = inputs.index(2 * stage + 1).slice(0, WIDTH, 0).permute((1, 0))
        ahead = gl.minimum(step + 1, STEPS - 1)
        next_scales, next_zeros = load_scales(
            p_scale, p_zero, stride, ahead * _BLOCK // SHAPE.group
        )
        product = warpgroup_mma(left, low, first, is_async=True)
        left = _unpack(packed, zeros[0], scales[0], True, dtype, WIDTH)
        first = warpgroup_mma_wait(0, [product])
        product = warpgroup_mma(left, high, first, is_async=True)
        packed = _load(weights, stage, 1, OWN)
        left = _unpack(packed, zeros[1], scales[1], False, dtype, WIDTH)
        first = warpgroup_mma_wait(0, [product])
        product = warpgroup_mma(left, low, second, is_async=True)
        left = _unpack(packed, zeros[1], scales[1], True, dtype, WIDTH)
        second = warpgroup_mma_wait(0, [product])
        # The next step; after the last one the same once more, for nothing.
        number += gl.where(step + 1 < STEPS, 1, 0)
        mbarrier.wait(bars.index(number % STAGES), number // STAGES & 1)
        scales, zeros = next_scales, next_zeros
        product = warpgroup_mma(left, high, second, is_async=True)
        packed = _load(weights, number % STAGES, 0, OWN)
        left = _unpack(packed, zeros[0], scales[0], False, dtype, WIDTH)
        second = warpgroup_mma_wait(0, [product])
        thread_barrier()
        mbarrier.arrive(bars.index(STAGES + stage), count=1)
    return first, second


@gluon.jit
def _load(weights, stage, PART: gl.constexpr, OWN: gl.constexpr):
    """Loads a group's packed weights [N, HALF / 2] of a step's part."""
    place = weights.index(2 * stage + PART)
    return place.slice(OWN * _HALF, _HALF, 0).load(_PACKED)


@gluon.jit
def _unpack(packed, zero, scale, HIGH: gl.constexpr, dtype: gl.constexpr, WIDTH: gl.constexpr):
    """Unpacks the weights [N, K] in the low or in the high halves of bytes."""
    beside: gl.constexpr = 0x4300 if dtype == gl.bfloat16 else 0x6400
    # Two of each in 32 bits.
    zeros = (zero.to(gl.int32) | beside) * 0x10001
    scales = scale.to(dtype).to(gl.uint16, bitcast=True).to(gl.int32) * 0x10001
    how: gl.constexpr = _unpacking(dtype == gl.bfloat16, HIGH)
    even, odd = gl.inline_asm_elementwise(
        how, "=h,=h,h,r,r", [packed, zeros[:, None], scales[:, None]],
        dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    numbers = gl.reshape(gl.join(even, odd), [_HALF, _HALF]).to(dtype, bitcast=True)
    return gl.convert_layout(numbers, _weights_layout(WIDTH), assert_trivial=True)


@gluon.constexpr_function
def _unpacking(is_bfloat: bool, is_high: bool) -> str:
    """Two bytes' low or high halves, less zero points and times scales: a number is first put in
    the bits beside a power of two."""
    power, kind = ("0x43004300", "bf16x2") if is_bfloat else ("0x64006400", "f16x2")
    shift = "shr.u32 both, both, 4;" if is_high else ""
    return f"""{{
        .reg .b32 both;
        cvt.u32.u16 both, $2;
        prmt.b32 both, both, 0, 0x4140;
        {shift}
        lop3.b32 both, both, 0x000f000f, {power}, 0xea;
        sub.{kind} both, both, $3;
        mul.{kind} both, both, $4;
        mov.b32 {{$0, $1}}, both;
        }}"""
