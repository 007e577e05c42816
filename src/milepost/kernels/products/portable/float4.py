"""Triton: numbers in e2m1 and the scales of their groups, in 16 bits or wide.

A number's exponent and mantissa stand at the low end of a 16-bit type's exponent: that is the
number over 2^126 in bfloat16 and over 2^14 in float16, also where it is 0.5, which has no exponent.
Scales make up for it but for 2^7, by which the largest would be too large; so products are the
weights over `UNIT`, all of their digits, and sums are multiplied with it.

Legend: N outputs, K inputs, G groups of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.platform.numerics import decode
from milepost.kernels.products.portable import int4


def _taking(half: str, copy: str, mask: str) -> tl.constexpr:
    """Returns PTX that moves the halves of four bytes, in 16 bits each, with one multiplication to
    where a number's sign and the rest of it stand."""
    move = f"mul.lo.u32 pair, pair, {copy}; and.b32 pair, pair, {mask};"
    pairs = (
        f"prmt.b32 pair, half, 0, {order}; {move} mov.b32 ${i}, pair;"
        for i, order in enumerate(("0x4140", "0x4342"))
    )
    return tl.constexpr("{ .reg .b32 half, pair; " + half + " ".join(pairs) + " }")


_LOW, _HIGH = (_taking(half, "0x1040", "0x81c081c0") for half in (int4.LOW, int4.HIGH))
"""For bfloat16: a number's sign stands in bit 15, the rest of it from bit 6 on."""


def _scaling(pair: int, bytes_: str) -> str:
    return (
        f"prmt.b32 pair, $2, 0, {bytes_}; shr.u32 pair, pair, 4; "
        f"fma.rn.bf16x2 pair, pair, most, zero; fma.rn.bf16x2 ${pair}, pair, rest, zero;"
    )


_SCALE_BFLOAT16 = tl.constexpr(
    "{ .reg .b32 pair, zero, most, rest; mov.b32 zero, 0x80008000; "
    "mov.b32 most, 0x7f007f00; mov.b32 rest, 0x77807780; "
    + _scaling(0, "0x1404")
    + _scaling(1, "0x3424")
    + " }"
)
"""PTX that makes numbers times 2^119 of four float8's bits, by 2^127 and 2^112."""
UNIT = tl.constexpr(128.0)
_OF_BFLOAT16 = tl.constexpr(2.0**127)
_OF_FLOAT16 = tl.constexpr(2.0**15)
"""2^126 and 2^14, over UNIT; times 256, by which scales are too small as they are decoded."""
_OF_ROWS = tl.constexpr(2.0**63)
_WIDE, _PLAIN = tl.constexpr(2.0**64), tl.constexpr(2.0**-48)
"""Factors that keep products with rows off float32's ends: wide numbers are then over 2^62."""


def _widening(half: str) -> tl.constexpr:
    """Returns PTX that makes float32 of the halves of four bytes: those of bfloat16, widened."""
    pairs = (
        f"prmt.b32 pair, half, 0, {order}; mul.lo.u32 pair, pair, 0x1040; "
        f"and.b32 pair, pair, 0x81c081c0; shl.b32 ${i}, pair, 16; "
        f"and.b32 ${i + 1}, pair, 0xffff0000;"
        for i, order in ((0, "0x4140"), (2, "0x4342"))
    )
    half = half.replace("$2", "$4")
    return tl.constexpr("{ .reg .b32 half, pair; " + half + " ".join(pairs) + " }")


LOW_WIDE, HIGH_WIDE = _widening(int4.LOW), _widening(int4.HIGH)


@triton.jit
def low(b_w, scale, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns weights [N, K] over UNIT, from the numbers in the low halves of bytes b_w [N, K] and
    their groups' scales [N, G], which are float8's bits."""
    if PTX and tl.bfloat16 == TYPE:
        return _weights(int4.take(b_w, _LOW, TYPE), int4.take(scale, _SCALE_BFLOAT16, TYPE))
    else:
        return _weights(numbers(b_w.to(tl.int16) & 15, TYPE), scales(scale, TYPE).to(TYPE))


@triton.jit
def high(b_w, scale, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns those of the numbers in the high halves."""
    if PTX and tl.bfloat16 == TYPE:
        return _weights(int4.take(b_w, _HIGH, TYPE), int4.take(scale, _SCALE_BFLOAT16, TYPE))
    else:
        return _weights(numbers(b_w.to(tl.int16) >> 4, TYPE), scales(scale, TYPE).to(TYPE))


@triton.jit
def _weights(q, scale):
    N: tl.constexpr = q.shape[0]
    K: tl.constexpr = q.shape[1]
    G: tl.constexpr = scale.shape[1]
    return tl.reshape(tl.reshape(q, [N, G, K // G]) * scale[:, :, None], [N, K])


@triton.jit
def widen(b_w, PTX: tl.constexpr):
    """Returns the numbers in the low and in the high halves of bytes in float32, for rows times
    `row_factor`, and sums times `wide_scales`."""
    if PTX:
        return int4.take_wide(b_w, LOW_WIDE), int4.take_wide(b_w, HIGH_WIDE)
    else:
        q = b_w.to(tl.int16)
        return numbers(q & 15, tl.float16).to(tl.float32), numbers(q >> 4, tl.float16).to(
            tl.float32
        )


@triton.jit
def row_factor(PTX: tl.constexpr):
    """Returns what a row is multiplied by before it meets wide numbers."""
    return _WIDE if PTX else _PLAIN


@triton.jit
def wide_scales(bits):
    """Returns the scales of float8's bits for sums of wide numbers, over UNIT: float32."""
    return decode(bits, False).to(tl.float32) * _OF_ROWS


@triton.jit
def numbers(q, TYPE: tl.constexpr):
    """Returns numbers q int16 in a 16-bit type, still to be multiplied by `scales`."""
    if tl.bfloat16 == TYPE:  # noqa: SIM108
        bits = ((q & 8) << 12) | ((q & 7) << 6)
    else:
        bits = ((q & 8) << 12) | ((q & 7) << 9)
    return bits.to(TYPE, bitcast=True)


@triton.jit
def scales(bits, TYPE: tl.constexpr):
    """Returns the scales of float8's bits, times the factor of `numbers`, over UNIT: float32."""
    if tl.bfloat16 == TYPE:
        scale = decode(bits, False).to(tl.float32) * _OF_BFLOAT16
    else:
        scale = decode(bits, False).to(tl.float32) * _OF_FLOAT16
    return scale
