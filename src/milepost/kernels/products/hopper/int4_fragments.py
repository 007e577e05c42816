"""Products of int4 experts with few tokens on Hopper, in Gluon: unpacking and multiplying in
registers.

Every thread reads just the bytes that it multiplies and unpacks them in registers. Weights are the
left operand. A block's product is made of whole numbers, less their zero point, then scaled and
added up in float32. The order of inputs in a product does not matter as long as both operands have
the same, nor does the order of outputs: so a thread has 16 bytes side by side.

Legend: N outputs of a part, M rows, K inputs of half a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from milepost.kernels.platform.gluon import thread_barrier
from milepost.kernels.products.forms.quantised import BLOCK
from milepost.kernels.products.hopper.experts import BLOCK_M

HALF = BLOCK // 2
_BLOCK, _HALF, _M = gl.constexpr(BLOCK), gl.constexpr(HALF), gl.constexpr(BLOCK_M)


def _layout(registers: Any, lanes: Any, warps: Any, shape: Any) -> Any:
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCTS.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, PRODUCTS.value, 2))
_WARPS = [[16, 0], [32, 0]]
_INSIDE = [[0, 1], [0, 2], [0, 4], [0, 8]]
_ACROSS = [[0, 16], [0, 32]]
_WEIGHTS = gl.constexpr(
    _layout([*_INSIDE, [8, 0]], [*_ACROSS, [4, 0], [1, 0], [2, 0]], _WARPS, [HALF, HALF])
)
"""Layout of weights' bytes [N, K] as they are loaded: a thread has 16 adjacent ones, of outputs
chosen so that no two threads read the same bank."""
_ROWS = gl.constexpr(
    _layout(_INSIDE, [*_ACROSS, [1, 0], [2, 0], [4, 0]], [[0, 0], [0, 0]], [BLOCK_M, HALF])
)
"""Layout of rows [M, K] as they are loaded, chosen likewise."""
_SCALED = gl.constexpr(
    _layout([[0, 1], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], _WARPS, [HALF, 2])
)
"""Layout of scales [N, blocks of a step], as products have them."""


class HalvedShape(NamedTuple):
    """One projection; a constant on the device. The second part's weights are `apart` rows from the
    first one's; a row has `scales`, one for each `group` of inputs."""

    apart: int
    scales: int
    group: int
    steps: int


@gluon.jit
def scales_of(scales, HALVES: gl.constexpr):
    """Returns pointers to scales and zero points of the outputs [N, 1] of the first unit's first
    part."""
    first = outputs_of(gl.SliceLayout(1, _SCALED))[:, None] * HALVES.scales
    return scales.weights + first, scales.zeros + first


@gluon.jit
def load_scales(own, place, step, HALVES: gl.constexpr):
    """Loads scales and zero points [N, blocks] of a step, by part."""
    SCALES: gl.constexpr = HALVES.scales
    block = 2 * step + gl.arange(0, 2, gl.SliceLayout(0, _SCALED))[None, :]
    # In this form the compiler loads both blocks' at once.
    group = block if HALVES.group == _BLOCK else block * _BLOCK // HALVES.group
    if SCALES * HALVES.group % (2 * _BLOCK) != 0:
        group = gl.minimum(group, SCALES - 1)
    scales, zeros = (), ()
    for part in gl.static_range(2):
        at = place + part * HALVES.apart * SCALES + group
        scales += (gl.load(own[0] + at),)
        zeros += (gl.load(own[1] + at),)
    return scales, zeros


@gluon.jit
def multiply(
    stages, held, own, place, next_place, number, HALVES: gl.constexpr, SHAPE: gl.constexpr
):
    """Returns both parts' products [N, M] of a unit, and the next unit's first scales. The unit's
    first step is the program's step `number` and has the scales `held`."""
    first = gl.zeros([_HALF, _M], gl.float32, PRODUCTS)
    second = gl.zeros([_HALF, _M], gl.float32, PRODUCTS)
    for step in range(HALVES.steps):
        is_last = step == HALVES.steps - 1
        later = gl.where(is_last, next_place, place)
        next_held = load_scales(own, later, gl.where(is_last, 0, step + 1), HALVES)
        first_scales, second_scales = (_split(held[0][0], PRODUCTS), _split(held[0][1], PRODUCTS))
        first_zeros, second_zeros = (_split(held[1][0], _LEFT), _split(held[1][1], _LEFT))
        stage = number % SHAPE.stages
        mbarrier.wait(stages.loaded.index(stage), number // SHAPE.stages & 1)
        for b in gl.static_range(2):
            low = _load_rows(stages.inputs.index(4 * stage + 2 * b))
            high = _load_rows(stages.inputs.index(4 * stage + 2 * b + 1))
            left = stages.weights.index(2 * stage).slice(b * _HALF, _HALF, 1)
            right = stages.weights.index(2 * stage + 1).slice(b * _HALF, _HALF, 1)
            first = _add_block(first, left, low, high, first_scales[b], first_zeros[b])
            second = _add_block(second, right, low, high, second_scales[b], second_zeros[b])
        thread_barrier()
        mbarrier.arrive(stages.used.index(stage), count=1)
        number += 1
        held = next_held
    return first, second, held


@gluon.jit
def _split(values, LAYOUT: gl.constexpr):
    """Splits values into those of each block [N]."""
    first, second = gl.split(values)
    OUTPUTS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    first = gl.convert_layout(first, OUTPUTS, assert_trivial=True)
    return first, gl.convert_layout(second, OUTPUTS, assert_trivial=True)


def _unpacking(power: str) -> gl.constexpr:
    """Returns code that splits four bytes into their low and high halves, in 16 bits each, beside a
    power of two."""
    return gl.constexpr(f"""{{
        .reg .b32 low, high, power;
        mov.b32 power, {power};
        and.b32 low, $4, 0x0f0f0f0f;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0f0f0f0f;
        prmt.b32 $0, low, power, 0x4140;
        prmt.b32 $1, low, power, 0x4342;
        prmt.b32 $2, high, power, 0x4140;
        prmt.b32 $3, high, power, 0x4342;
        }}""")


_TO_BFLOAT16, _TO_FLOAT16 = _unpacking("0x43434343"), _unpacking("0x64646464")


@gluon.jit
def unpack(b_w, dtype: gl.constexpr):
    """Returns the numbers in the low and in the high half of each byte, in the bits beside a power
    of two."""
    how: gl.constexpr = _TO_BFLOAT16 if dtype == gl.bfloat16 else _TO_FLOAT16
    low, high = gl.inline_asm_elementwise(
        how, "=r,=r,=r,=r,r", [b_w], dtype=(gl.int16, gl.int16), is_pure=True, pack=4
    )
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@gluon.jit
def _load_rows(kept):
    """Loads half of a block's rows [K, M], as they are multiplied."""
    rows = _in_turn(kept.load(_ROWS), kept.shape[0], 1)
    return gl.convert_layout(rows.permute((1, 0)), _RIGHT, assert_trivial=True)


@gluon.jit
def _in_turn(values, HEIGHT: gl.constexpr, SWAPPED: gl.constexpr):
    """Orders inputs as both operands are multiplied: 4 side by side are a thread's in one product.
    `outputs_of` says how outputs are ordered."""
    parts = gl.reshape(values, [HEIGHT // (4 * SWAPPED), SWAPPED, 4, 4, 4, 2, 2])
    return gl.reshape(gl.permute(parts, (0, 2, 1, 4, 5, 3, 6)), [HEIGHT, _HALF])


@gluon.jit
def outputs_of(LAYOUT: gl.constexpr):
    """Returns the output that each product [N] is."""
    o_n = gl.arange(0, _HALF, LAYOUT)
    return (o_n & -8) + (o_n & 1) * 4 + (o_n // 2 & 3)


@gluon.jit
def _add_block(result, numbers, low_rows, high_rows, scale, zero):
    """Adds a block's product to `result`."""
    dtype: gl.constexpr = low_rows.dtype
    low, high = unpack(numbers.load(_WEIGHTS), dtype)
    low = gl.convert_layout(_in_turn(low, _HALF, 2), _LEFT, assert_trivial=True)
    high = gl.convert_layout(_in_turn(high, _HALF, 2), _LEFT, assert_trivial=True)
    beside: gl.constexpr = 0x4300 if dtype == gl.bfloat16 else 0x6400
    shifted = (zero.to(gl.int16) | beside).to(dtype, bitcast=True)
    product = gl.zeros(result.shape, gl.float32, PRODUCTS)
    product = mma_v2(low - shifted[:, None], low_rows, product)
    product = mma_v2(high - shifted[:, None], high_rows, product)
    return result + product * scale.to(gl.float32)[:, None]
