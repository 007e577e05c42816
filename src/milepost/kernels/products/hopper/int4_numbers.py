"""Four-bit numbers and their scales in registers, in Gluon: the parts that Hopper's products of
int4 share.

A number and its zero point stand in the bits beside the same power of two, so their difference is
exact. The scales of a block are loaded as one word, whether it has one, two or four of them.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.products.forms.quantised import BLOCK


@gluon.constexpr_function
def scales_each(group):
    """Returns the number of scales of a word: those of a block."""
    return max(1, BLOCK // group)


@gluon.jit
def as_words(pointer, COUNT: gl.constexpr):
    """Returns a pointer to words of COUNT numbers each: the compiler would hold each number in a
    register of its own."""
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
