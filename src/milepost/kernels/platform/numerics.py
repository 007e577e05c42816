"""Device functions in Triton: activations, norms and softmax in float32, and float8_e4m3fn on chips
with and without instructions for it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from milepost.kernels.platform.tensors import FP8_MAX, INT8_MAX, LEAST_SCALE

LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(FP8_MAX)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_INT8_MAX = tl.constexpr(INT8_MAX)
_BIASES = tl.constexpr(2.0**120)
"""Factor by which a number grows that moves from float8 to bfloat16 with its exponent's bits."""
_TO_BFLOAT16 = tl.constexpr("""
{
    .reg .b32 low, high, sign, biases, zero;
    mov.b32 biases, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 sign, low, 0x80008000;
    shr.u32 low, low, 4;
    and.b32 low, low, 0x07f007f0;
    or.b32 low, low, sign;
    and.b32 sign, high, 0x80008000;
    shr.u32 high, high, 4;
    and.b32 high, high, 0x07f007f0;
    or.b32 high, high, sign;
    fma.rn.bf16x2 $0, low, biases, zero;
    fma.rn.bf16x2 $1, high, biases, zero;
}
""")
"""Four bytes become two pairs of bfloat16, which are multiplied by 2^120."""


@triton.jit
def sigmoid(x):
    """Returns the sigmoid in float32."""
    return 1 / (1 + _exp_negative(x.to(tl.float32)))


@triton.jit
def silu(x):
    """Returns x * sigmoid(x) for float32."""
    return x / (1 + _exp_negative(x))


@triton.jit
def _exp_negative(x):
    """Computes exp(-x) by exp2: one instruction, while tl.exp also handles subnormal numbers."""
    return tl.exp2(x * -LOG2_E)


@triton.jit
def softplus(x):
    """Computes log(1 + exp(x)); a polynomial for the logarithm takes half of the instructions.
    Fused multiply-adds are explicit, so that all kernels round alike."""
    e = _exp_negative(tl.abs(x))
    # log(1 + e) / e on [0, 1], interpolated at Chebyshev nodes: error below 1.7e-7.
    p = tl.fma(e, 0.005126102361828089, -0.029074065387248993)
    p = tl.fma(p, e, 0.0775160863995552)
    p = tl.fma(p, e, -0.13602247834205627)
    p = tl.fma(p, e, 0.19076880812644958)
    p = tl.fma(p, e, -0.2483539879322052)
    p = tl.fma(p, e, 0.3331812024116516)
    p = tl.fma(p, e, -0.4999944567680359)
    p = tl.fma(p, e, 0.9999999403953552)
    return tl.fma(e, p, tl.maximum(x, 0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def scale_of(x, AXIS: tl.constexpr):
    """Returns the scale of numbers that share one along an axis."""
    return tl.maximum(tl.max(tl.abs(x), AXIS) / LARGEST, _LEAST_SCALE)


@triton.jit
def int8_scales(largest):
    """Returns the scale of a row in int8 whose largest number has this size, and the factor that
    its numbers are multiplied by before they are rounded."""
    scale = tl.maximum(largest / _INT8_MAX, _LEAST_SCALE)
    return scale, 1.0 / scale


@triton.jit
def round_int8(x):
    """Rounds float32 to int8, ties to even: floats about 1.5 * 2^23 are 1 apart."""
    x = tl.minimum(tl.maximum(x, -128.0), 127.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def encode(x, NATIVE: tl.constexpr):
    """Rounds float32 to float8_e4m3fn and returns the bits."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if NATIVE:  # noqa: SIM108
        bits = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = _encode_plainly(x)
    return bits


@triton.jit
def _encode_plainly(x):
    """Rounds to three mantissa bits, ties to even; below 2^-6 to multiples of 2^-9."""
    wide = x.to(tl.int32, bitcast=True)
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Floats about 1.5 * 2^13 are 2^-10 apart.
    small = ((x * 0.5 + 12288.0) - 12288.0) * 2
    rounded = tl.where(tl.abs(x) < 0.015625, small, normal)
    half = (rounded * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)
    return (((half >> 8) & 0x80) | ((half >> 7) & 0x7F)).to(tl.uint8)


@triton.jit
def decode(bits, NATIVE: tl.constexpr):
    """Turns bits of float8_e4m3fn into numbers: FP8 itself if the chip has it (the input may be FP8
    already), else float16 divided by 256."""
    if NATIVE:
        values = bits.to(tl.float8e4nv, bitcast=True)
    else:
        wide = bits.to(tl.int16)
        values = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return values


@triton.jit
def decode_as(bits, TYPE: tl.constexpr):
    """Turns bits of float8_e4m3fn into bfloat16; or into float16 divided by 256, whose exponents
    reach no lower."""
    if tl.bfloat16 == TYPE:
        if is_cuda():
            return tl.inline_asm_elementwise(
                _TO_BFLOAT16, "=r,=r,r", [bits], tl.bfloat16, is_pure=True, pack=4
            )
        else:
            wide = bits.to(tl.int16)
            wide = ((wide & 0x80) << 8) | ((wide & 0x7F) << 4)
            return wide.to(TYPE, bitcast=True) * _BIASES
    else:
        return decode(bits, False)


@triton.jit
def add_parts(p_row, part_stride, mask, PARTS: tl.constexpr):
    """Returns the sum of a row's PARTS partials in float32; PARTS is at least 1."""
    b_sum = tl.load(p_row, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        b_sum += tl.load(p_row + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    return b_sum


@triton.jit
def online_softmax(m, l, b_s, scale, MASKED: tl.constexpr):
    """Adds a block's scores [ROWS, BLOCK] to the running softmax with maximum `m` and sum of
    weights `l`, both [ROWS]. Returns both, the block's weights, and the factor for earlier sums."""
    m_new = tl.maximum(m, tl.max(b_s, 1) * scale)
    base = m_new
    if MASKED:
        # A row without any visible key so far has no maximum to subtract.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = tl.exp2(b_s * scale - base[:, None])
    shrink = tl.exp2(m - base)
    return m_new, l * shrink + tl.sum(b_p, 1), b_p, shrink


@triton.jit
def norm_row(b_x, b_scale, eps, SIZE: tl.constexpr):
    """Returns the root mean square norm of a row, in its type; elements past its end are 0."""
    b_wide = b_x.to(tl.float32)
    mean = tl.sum(b_wide * b_wide) / SIZE
    return (b_wide * tl.rsqrt(mean + eps) * b_scale).to(b_x.dtype)


@triton.jit
def activate(up, gate, GATED: tl.constexpr, LIMIT: tl.constexpr = 0.0):
    """Returns SiLU(gate) * up, both within LIMIT if that is not 0; without gates the square of
    ReLU(up)."""
    if GATED:
        return multiply_within(gate * tl.sigmoid(gate), up, LIMIT)
    else:
        positive = tl.maximum(up, 0.0)
        return positive * positive


@triton.jit
def multiply_within(active, up, LIMIT: tl.constexpr):
    """Multiplies SiLU's outputs by ups, both within LIMIT if that is not 0: see `norm.silu_mul`."""
    if LIMIT > 0:
        active = tl.minimum(active, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return active * up
