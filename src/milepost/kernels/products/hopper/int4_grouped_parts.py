"""Parts of Hopper's products of int4 experts with many rows, in Gluon: unpacking numbers to the
registers from which tensor cores take them.

Two bytes at a time are unpacked and scaled. Inputs follow each other as they do in memory: where a
lane is half as long as a quarter of a step, its low and high halves of bytes are unpacked at once.

Legend: N outputs of a group, K inputs.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.products.forms.quantised import BLOCK
from milepost.kernels.products.hopper.int4_numbers import halve, scale_of, zero_of

PIECE = BLOCK // 2
"""Outputs of a group, and inputs that are multiplied at a time."""
_N = gl.constexpr(PIECE)
_REGISTERS, _LANES = [[8, 0], [0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
PACKED = gl.constexpr(
    gl.DistributedLinearLayout(_REGISTERS, _LANES, [[16, 0], [32, 0]], [], [PIECE, PIECE // 2])
)
"""Layout of packed weights, two bytes in a number: a thread has those whose numbers it
multiplies."""


@gluon.constexpr_function
def products_layout(width: int) -> Any:
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def unpack_pairs(
    packed,
    words,
    HALF: gl.constexpr,
    TYPE: gl.constexpr,
    dtype: gl.constexpr,
    WIDTH: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Unpacks the weights [N, K] of a block's first or second 64 inputs: low or high halves of
    bytes, or with short lanes both halves of half the bytes."""
    if SHAPE.group < _N:
        own = halve(packed)[HALF]
        low = _take(own, words, 2 * HALF, 0, TYPE, dtype)
        high = _take(own, words, 2 * HALF + 1, 1, TYPE, dtype)
        numbers = gl.permute(gl.join(low, high), (0, 2, 1))
    else:
        numbers = _take(packed, words, HALF if SHAPE.group == _N else 0, HALF, TYPE, dtype)
    numbers = gl.reshape(numbers, [_N, _N]).to(dtype, bitcast=True)
    return gl.convert_layout(
        numbers, gl.DotOperandLayout(0, products_layout(WIDTH), 2), assert_trivial=True
    )


@gluon.jit
def _take(
    packed, words, INDEX: gl.constexpr, HIGH: gl.constexpr, TYPE: gl.constexpr, dtype: gl.constexpr
):
    """Unpacks the low or the high halves of bytes, whose scale is a word's INDEX-th."""
    # Two of each in 32 bits.
    zeros = zero_of(words[1], INDEX, dtype).to(gl.uint16, bitcast=True).to(gl.int32) * 0x10001
    scale = scale_of(words[0], INDEX, TYPE).to(dtype)
    scales = scale.to(gl.uint16, bitcast=True).to(gl.int32) * 0x10001
    OUTPUTS: gl.constexpr = gl.SliceLayout(1, packed.type.layout)
    zeros = gl.convert_layout(zeros, OUTPUTS, assert_trivial=True)[:, None]
    scales = gl.convert_layout(scales, OUTPUTS, assert_trivial=True)[:, None]
    how: gl.constexpr = _unpacking(dtype == gl.bfloat16, HIGH)
    even, odd = gl.inline_asm_elementwise(
        how, "=h,=h,h,r,r", [packed, zeros, scales],
        dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(even, odd), [packed.shape[0], 2 * packed.shape[1]])


@gluon.constexpr_function
def _unpacking(is_bfloat: bool, is_high: bool) -> str:
    """Returns code for two bytes' low or high halves, less zero points and times scales: a number
    is first put in the bits beside a power of two."""
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
