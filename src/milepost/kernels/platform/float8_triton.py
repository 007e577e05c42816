"""Float8_e4m3fn in Triton, on chips with and without instructions for it."""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.platform.float8 import FP8_MAX, LEAST_SCALE

LARGEST = tl.constexpr(FP8_MAX)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


@triton.jit
def scale_of(x, AXIS: tl.constexpr):
    """Of numbers that share one along an axis."""
    return tl.maximum(tl.max(tl.abs(x), AXIS) / LARGEST, _LEAST_SCALE)


@triton.jit
def encode(x, NATIVE: tl.constexpr):
    """float32 rounded to float8_e4m3fn, as its bits."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if NATIVE:  # noqa: SIM108
        bits = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = _encode_plainly(x)
    return bits


@triton.jit
def _encode_plainly(x):
    """Rounds to three bits of mantissa, ties to even; below 2^-6 to multiples of 2^-9."""
    wide = x.to(tl.int32, bitcast=True)
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Floats about 1.5 * 2^13 are 2^-10 apart.
    small = ((x * 0.5 + 12288.0) - 12288.0) * 2
    rounded = tl.where(tl.abs(x) < 0.015625, small, normal)
    half = (rounded * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)
    return (((half >> 8) & 0x80) | ((half >> 7) & 0x7F)).to(tl.uint8)


@triton.jit
def decode(bits, NATIVE: tl.constexpr):
    """What float8_e4m3fn's bits stand for: as it is, or in float16 over 256. Where it is native
    these may be the numbers themselves."""
    if NATIVE:
        values = bits.to(tl.float8e4nv, bitcast=True)
    else:
        wide = bits.to(tl.int16)
        values = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return values
