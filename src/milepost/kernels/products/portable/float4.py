"""Triton: unpacks e2m1 numbers and the scales of their groups to a 16-bit type or to float32.

A number's exponent and mantissa are moved to the low end of a 16-bit type's exponent. The result is
the number over 2^126 in bfloat16 and over 2^14 in float16, even for 0.5, which is subnormal. Scales
are multiplied by as much over 2^7, because the largest would overflow otherwise. So numbers times
scales are the weights over `UNIT`, exactly, and sums are multiplied by it.

Legend: N outputs, K inputs, G groups of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.platform.numerics import decode
from milepost.kernels.products.portable import int4


def _taking(half: str, factor: int, mask: str) -> tl.constexpr:
    """Returns PTX that unpacks halves of four bytes to 16 bits each; one multiplication moves a
    number's sign and its other bits into place."""
    move = f"mul.lo.u32 pair, pair, {factor}; and.b32 pair, pair, {mask};"
    pairs = (
        f"prmt.b32 pair, half, 0, {order}; {move} mov.b32 ${i}, pair;"
        for i, order in enumerate(("0x4140", "0x4342"))
    )
    return tl.constexpr("{ .reg .b32 half, pair; " + half + " ".join(pairs) + " }")


MOVES = (int4.LOW, 0x1040), ("and.b32 half, $2, 0xf0f0f0f0;", 0x0104)
"""PTX of the low and the high halves of four bytes, and what a number in either is multiplied by to
stand in both of its places, 12 and 6 bits above the low end."""
_LOW, _HIGH = (_taking(half, factor, "0x81c081c0") for half, factor in MOVES)
"""PTX for bfloat16: a number's sign is bit 15, and its other bits begin at bit 6."""


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
"""PTX that converts the bits of four float8 to bfloat16, times 2^119 in all, in two
multiplications."""
UNIT = tl.constexpr(128.0)
_OF_BFLOAT16 = tl.constexpr(2.0**127)
_OF_FLOAT16 = tl.constexpr(2.0**15)
"""Factors of scales: 2^126 or 2^14, over UNIT, times 256, because `decode` returns 1 / 256 of a
scale."""
_OF_ROWS = tl.constexpr(2.0**63)
_WIDE, _PLAIN = tl.constexpr(2.0**64), tl.constexpr(2.0**-48)
"""Factors of rows that keep products within float32's range: they make up for all but 2^62 of the
numbers' scaling."""


def _widening(half: str, factor: int) -> tl.constexpr:
    """Returns PTX that unpacks halves of four bytes to bfloat16 and widens those to float32."""
    pairs = (
        f"prmt.b32 pair, half, 0, {order}; mul.lo.u32 pair, pair, {factor}; "
        f"and.b32 pair, pair, 0x81c081c0; shl.b32 ${i}, pair, 16; "
        f"and.b32 ${i + 1}, pair, 0xffff0000;"
        for i, order in ((0, "0x4140"), (2, "0x4342"))
    )
    half = half.replace("$2", "$4")
    return tl.constexpr("{ .reg .b32 half, pair; " + half + " ".join(pairs) + " }")


LOW_WIDE, HIGH_WIDE = (_widening(half, factor) for half, factor in MOVES)


@triton.jit
def low(b_w, scale, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns weights [N, K] over UNIT: numbers in the low halves of bytes b_w [N, K] times their
    groups' scales [N, G], given as bits of float8."""
    if PTX and tl.bfloat16 == TYPE:
        return _weights(int4.take(b_w, _LOW, TYPE), int4.take(scale, _SCALE_BFLOAT16, TYPE))
    else:
        return _weights(numbers(b_w.to(tl.int16) & 15, TYPE), scales(scale, TYPE).to(TYPE))


@triton.jit
def high(b_w, scale, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns weights [N, K] over UNIT, as `low` does, for the high halves of bytes."""
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
    """Unpacks the low and the high halves of bytes b_w to float32. Rows are to be multiplied by
    `row_factor`, and sums by `wide_scales`."""
    if PTX:
        return int4.take_wide(b_w, LOW_WIDE), int4.take_wide(b_w, HIGH_WIDE)
    else:
        q = b_w.to(tl.int16)
        return numbers(q & 15, tl.float16).to(tl.float32), numbers(q >> 4, tl.float16).to(
            tl.float32
        )


@triton.jit
def row_factor(PTX: tl.constexpr):
    """Returns the factor of a row that is multiplied by numbers from `widen`."""
    return _WIDE if PTX else _PLAIN


@triton.jit
def wide_scales(bits):
    """Returns the scales of sums of numbers from `widen`, over UNIT, in float32; `bits` are those
    of float8."""
    return decode(bits, False).to(tl.float32) * _OF_ROWS


@triton.jit
def numbers(q, TYPE: tl.constexpr):
    """Converts e2m1 numbers q int16 to a 16-bit TYPE, still to be multiplied by `scales`."""
    if tl.bfloat16 == TYPE:  # noqa: SIM108
        bits = ((q & 8) << 12) | ((q & 7) << 6)
    else:
        bits = ((q & 8) << 12) | ((q & 7) << 9)
    return bits.to(TYPE, bitcast=True)


@triton.jit
def scales(bits, TYPE: tl.constexpr):
    """Returns the scales of numbers from `numbers`, over UNIT, in float32; `bits` are those of
    float8."""
    if tl.bfloat16 == TYPE:
        scale = decode(bits, False).to(tl.float32) * _OF_BFLOAT16
    else:
        scale = decode(bits, False).to(tl.float32) * _OF_FLOAT16
    return scale
