"""Four-bit numbers and their scales in registers, in Gluon: the parts that Hopper's products of
int4 share.

A number and its zero point stand in the bits beside the same power of two, so their difference is
exact. The scales of a block are loaded as one word, whether it has one, two or four of them.

`unpack` is for products that scale sums. `unpack_pairs` is for products of many rows, whose weights
are scaled as they are unpacked, two bytes at a time, to the registers from which tensor cores take
them. Inputs then follow each other as they do in memory: where a lane is half as long as a quarter
of a step, its low and high halves of bytes are unpacked at once.

Legend: N outputs of a group of warps, K inputs.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.products.forms.quantised import BLOCK

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
def scales_each(group):
    """Returns the number of scales of a word: those of a block."""
    return max(1, BLOCK // group)


@gluon.jit
def as_words(pointer, COUNT: gl.constexpr):
    """Returns a pointer to words of COUNT numbers each. Loaded one by one, each number would take a
    register."""
    if COUNT == 1:
        return pointer
    else:
        size: gl.constexpr = pointer.dtype.element_ty.primitive_bitwidth
        return pointer.to(gl.pointer_type(_word(COUNT * size)))


@gluon.constexpr_function
def _word(bits):
    return {16: gl.uint16, 32: gl.uint32, 64: gl.uint64}[bits]


@gluon.jit
def zero_of(words, INDEX: gl.constexpr, dtype: gl.constexpr):
    """Returns the INDEX-th zero point of each word, beside the same power of two as numbers in
    `dtype`."""
    beside: gl.constexpr = 0x4300 if dtype == gl.bfloat16 else 0x6400
    return ((words >> 8 * INDEX & 0xFF).to(gl.int16) | beside).to(dtype, bitcast=True)


@gluon.jit
def scale_of(words, INDEX: gl.constexpr, TYPE: gl.constexpr):
    """Returns the INDEX-th scale of each word, which is of a TYPE."""
    if words.dtype == TYPE:
        return words
    else:
        return (words >> 16 * INDEX).to(gl.uint16).to(TYPE, bitcast=True)


@gluon.jit
def halve(values):
    """Returns the first and the last half of the columns."""
    HEIGHT: gl.constexpr = values.shape[0]
    WIDTH: gl.constexpr = values.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(values, [HEIGHT, 2, WIDTH]), (0, 2, 1)))


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
    how: gl.constexpr = _unpacking_pairs(dtype == gl.bfloat16, HIGH)
    even, odd = gl.inline_asm_elementwise(
        how, "=h,=h,h,r,r", [packed, zeros, scales],
        dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(even, odd), [packed.shape[0], 2 * packed.shape[1]])


@gluon.constexpr_function
def _unpacking_pairs(is_bfloat: bool, is_high: bool) -> str:
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
