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

UNIT = tl.constexpr(128.0)
_OF_BFLOAT16 = tl.constexpr(2.0**127)
_OF_FLOAT16 = tl.constexpr(2.0**15)
"""2^126 and 2^14, over UNIT; times 256, by which scales are too small as they are decoded."""


@triton.jit
def weights(q, scale, TYPE: tl.constexpr):
    """Returns weights [N, K] over UNIT, from numbers q [N, K] int16 and their groups' scales [N,
    G], which are float8's bits."""
    N: tl.constexpr = q.shape[0]
    K: tl.constexpr = q.shape[1]
    G: tl.constexpr = scale.shape[1]
    groups = tl.reshape(numbers(q, TYPE), [N, G, K // G])
    return tl.reshape(groups * scales(scale, TYPE).to(TYPE)[:, :, None], [N, K])


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
