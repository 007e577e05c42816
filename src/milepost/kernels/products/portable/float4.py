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


def _taking(*steps: str) -> tl.constexpr:
    """Returns PTX that puts four bytes in the high halves of 16 bits each, and takes numbers out of
    both pairs with `steps`: `byte` is a pair, `number` what becomes of it."""
    code = "; ".join(steps)
    pairs = [
        f"prmt.b32 byte, $2, 0, {x}; {code}; mov.b32 ${i}, number;" for i, x in enumerate(_PAIRS)
    ]
    return tl.constexpr("{ .reg .b32 byte, sign, number; " + " ".join(pairs) + " }")


_PAIRS = "0x1404", "0x3424"


def _moving(sign: str, number: str, mask: str) -> tl.constexpr:
    """Returns PTX that moves signs and what is left of numbers by these instructions."""
    return _taking(
        f"{sign}",
        "and.b32 sign, sign, 0x80008000",
        f"{number}",
        f"and.b32 number, number, {mask}",
        "or.b32 number, number, sign",
    )


_LOW_BFLOAT16 = _moving("shl.b32 sign, byte, 4", "shr.u32 number, byte, 2", "0x01c001c0")
_HIGH_BFLOAT16 = _moving("mov.b32 sign, byte", "shr.u32 number, byte, 6", "0x01c001c0")
_LOW_FLOAT16 = _moving("shl.b32 sign, byte, 4", "shl.b32 number, byte, 1", "0x0e000e00")
_HIGH_FLOAT16 = _moving("mov.b32 sign, byte", "shr.u32 number, byte, 3", "0x0e000e00")

UNIT = tl.constexpr(128.0)
_OF_BFLOAT16 = tl.constexpr(2.0**127)
_OF_FLOAT16 = tl.constexpr(2.0**15)
"""2^126 and 2^14, over UNIT; times 256, by which scales are too small as they are decoded."""


@triton.jit
def low(b_w, scale, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns weights [N, K] over UNIT, from the numbers in the low halves of bytes b_w [N, K] and
    their groups' scales [N, G], which are float8's bits."""
    if not PTX:
        q = numbers(b_w.to(tl.int16) & 15, TYPE)
    elif tl.bfloat16 == TYPE:
        q = int4.take(b_w, _LOW_BFLOAT16, TYPE)
    else:
        q = int4.take(b_w, _LOW_FLOAT16, TYPE)
    return _weights(q, scale)


@triton.jit
def high(b_w, scale, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns those of the numbers in the high halves."""
    if not PTX:
        q = numbers(b_w.to(tl.int16) >> 4, TYPE)
    elif tl.bfloat16 == TYPE:
        q = int4.take(b_w, _HIGH_BFLOAT16, TYPE)
    else:
        q = int4.take(b_w, _HIGH_FLOAT16, TYPE)
    return _weights(q, scale)


@triton.jit
def _weights(q, scale):
    N: tl.constexpr = q.shape[0]
    K: tl.constexpr = q.shape[1]
    G: tl.constexpr = scale.shape[1]
    # A float8's exponent and mantissa stand at the low end of the type's exponent, too.
    if q.dtype == tl.bfloat16:
        scale = (scale.to(tl.int16) << 4).to(tl.bfloat16, bitcast=True) * 2.0**127 * 2.0**112
    else:
        scale = (scale.to(tl.int16) << 7).to(tl.float16, bitcast=True) * 2.0**15
    return tl.reshape(tl.reshape(q, [N, G, K // G]) * scale[:, :, None], [N, K])


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
