"""Triton: unpacks four-bit numbers, integers or e2m1, in the register layout in which they are
multiplied. On NVIDIA's chips four bytes are unpacked at a time.

Integers: in bfloat16 a number is put into the low bits of 128, which costs less than a conversion,
and 128 is subtracted from sums: a group's sum is some 1,500 then instead of 50, and float32 has 16
bits to spare. In float16 it is put into the low bits of 1024, so 1032 is subtracted from each
number.

e2m1: a number's exponent and mantissa are moved to the low end of a 16-bit type's exponent. The
result is the number over 2^126 in bfloat16 and over 2^14 in float16, even for 0.5, which is
subnormal. Scales are multiplied by as much over 2^7, because the largest would overflow otherwise.
So numbers times scales are the weights over `_UNIT`, exactly, and sums are multiplied by it.

Legend: N outputs, K bytes, G groups of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.platform.numerics import decode

_HALVES = "and.b32 half, {}, 0x0f0f0f0f;", "shr.u32 half, {}, 4; and.b32 half, half, 0x0f0f0f0f;"
"""PTX that takes the low or the high halves of four bytes."""
MOVES = (_HALVES[0], 0x1040), ("and.b32 half, {}, 0xf0f0f0f0;", 0x0104)
"""PTX that takes halves of four bytes, and a factor: times this, a number of e2m1 stands in both of
its places, 12 and 6 bits above the low end."""
_PAIRS = "0x4140", "0x4342"
"""Orders of bytes that spread four of them over two pairs of 16 bits."""


@triton.constexpr_function
def integer_ptx(half, power, is_wide=False):
    """Returns PTX that unpacks the low (0) or high (1) halves of four bytes into the low bits of a
    power of two: to 16 bits each, or to float32 if `is_wide`."""
    orders = [f"0x7{i}44" for i in range(4)] if is_wide else _PAIRS
    moves = (f"prmt.b32 ${i}, half, power, {order};" for i, order in enumerate(orders))
    first = f"mov.b32 power, {power}; " + _HALVES[half].format(f"${len(orders)}")
    return "{ .reg .b32 half, power; " + first + " ".join(moves) + " }"


@triton.constexpr_function
def float_ptx(half, is_wide=False):
    """Returns PTX that unpacks e2m1 numbers in the low (0) or high (1) halves of four bytes to
    bfloat16, or to float32 if `is_wide`. A number's sign is bit 15 and its other bits begin at bit
    6."""
    take, factor = MOVES[half]
    code = take.format("$4" if is_wide else "$2")
    for i, order in enumerate(_PAIRS):
        code += f"prmt.b32 pair, half, 0, {order}; mul.lo.u32 pair, pair, {factor}; "
        code += "and.b32 pair, pair, 0x81c081c0; "
        if is_wide:
            code += f"shl.b32 ${2 * i}, pair, 16; and.b32 ${2 * i + 1}, pair, 0xffff0000; "
        else:
            code += f"mov.b32 ${i}, pair; "
    return "{ .reg .b32 half, pair; " + code + "}"


def _scaling(pair: int, order: str) -> str:
    return (
        f"prmt.b32 pair, $2, 0, {order}; shr.u32 pair, pair, 4; "
        f"fma.rn.bf16x2 pair, pair, most, zero; fma.rn.bf16x2 ${pair}, pair, rest, zero;"
    )


_SCALES_PTX = tl.constexpr(
    "{ .reg .b32 pair, zero, most, rest; mov.b32 zero, 0x80008000; "
    "mov.b32 most, 0x7f007f00; mov.b32 rest, 0x77807780; "
    + _scaling(0, "0x1404")
    + _scaling(1, "0x3424")
    + " }"
)
"""PTX that converts the bits of four float8 to bfloat16, times 2^119 in all, in two
multiplications."""
_UNIT = tl.constexpr(128.0)
_OF_BFLOAT16 = tl.constexpr(2.0**127)
_OF_FLOAT16 = tl.constexpr(2.0**15)
"""Factors of scales: 2^126 or 2^14, over _UNIT, times 256, because `decode` returns 1 / 256 of a
scale."""
_OF_ROWS = tl.constexpr(2.0**63)
_WIDE, _PLAIN = tl.constexpr(2.0**64), tl.constexpr(2.0**-48)
"""Factors of rows that keep products within float32's range: they make up for all but 2^62 of the
numbers' scaling."""


@triton.jit
def weights(b_w, scales, TYPE: tl.constexpr, SHAPE: tl.constexpr):
    """Returns the weights [N, K] of the low and of the high halves of bytes b_w [N, K] in a 16-bit
    TYPE, those of e2m1 over `_UNIT`. `scales` are a step's from `load_scales`."""
    if SHAPE.group < 0:
        low = _scaled_floats(b_w, scales[0], 0, TYPE, SHAPE.has_ptx)
        return low, _scaled_floats(b_w, scales[1], 1, TYPE, SHAPE.has_ptx)
    else:
        low = _scaled_integers(integers(b_w, 0, TYPE, SHAPE.has_ptx), scales[0], scales[1])
        high = integers(b_w, 1, TYPE, SHAPE.has_ptx)
        return low, _scaled_integers(high, scales[2], scales[3])


@triton.jit
def _scaled_floats(b_w, scale, HALF: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns e2m1 numbers in halves of bytes times their groups' scales [N, G], which are given as
    bits of float8."""
    if PTX and tl.bfloat16 == TYPE:
        q = _take(b_w, float_ptx(HALF), TYPE)
        scale = _take(scale, _SCALES_PTX, TYPE)
    else:
        q = _floats(b_w, HALF, TYPE)
        factor = _OF_BFLOAT16 if tl.bfloat16 == TYPE else _OF_FLOAT16
        scale = (decode(scale, False).to(tl.float32) * factor).to(TYPE)
    return _by_group(q, scale)


@triton.jit
def _scaled_integers(q, scale, zero):
    """Returns the weights of numbers from `integers`, in their type. Scales and zero points are
    [N], or [N, G] for groups of inputs."""
    zero = (zero.to(tl.float32) + offset(q.dtype)).to(q.dtype)
    scale = scale.to(q.dtype)
    if len(scale.shape) == 1:
        return (q - zero[:, None]) * scale[:, None]
    else:
        N: tl.constexpr = q.shape[0]
        K: tl.constexpr = q.shape[1]
        G: tl.constexpr = scale.shape[1]
        q = tl.reshape(q, [N, G, K // G])
        return tl.reshape((q - zero[:, :, None]) * scale[:, :, None], [N, K])


@triton.jit
def _by_group(q, scale):
    """Multiplies numbers [N, K] by the scales [N, G] of their groups."""
    N: tl.constexpr = q.shape[0]
    K: tl.constexpr = q.shape[1]
    G: tl.constexpr = scale.shape[1]
    return tl.reshape(tl.reshape(q, [N, G, K // G]) * scale[:, :, None], [N, K])


@triton.jit
def integers(b_w, HALF: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Unpacks the low (0) or high (1) halves of bytes b_w [N, K] to a 16-bit TYPE; numbers are
    `offset` too large."""
    if tl.bfloat16 == TYPE:
        if PTX:
            return _take(b_w, integer_ptx(HALF, "0x43434343"), TYPE)
        else:
            return (_half(b_w, HALF) | 0x4300).to(TYPE, bitcast=True)
    else:
        if PTX:
            q = _take(b_w, integer_ptx(HALF, "0x64646464"), TYPE)
        else:
            q = (_half(b_w, HALF) | 0x6400).to(TYPE, bitcast=True)
        return q - 1032.0


@triton.jit
def offset(TYPE: tl.constexpr):
    """Returns the excess of the numbers that `integers` unpacks to a 16-bit TYPE."""
    return 128.0 if tl.bfloat16 == TYPE else -8.0


@triton.jit
def ones(b_w, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns ones [N, K] of a 16-bit TYPE, in the register layout of numbers unpacked from b_w."""
    if not PTX:
        one = tl.full(b_w.shape, 1.0, TYPE)
    elif tl.bfloat16 == TYPE:
        one = _take(b_w, "mov.b32 $0, 0x3f803f80; mov.b32 $1, 0x3f803f80;", TYPE)
    else:
        one = _take(b_w, "mov.b32 $0, 0x3c003c00; mov.b32 $1, 0x3c003c00;", TYPE)
    return one


@triton.jit
def _half(b_w, HALF: tl.constexpr):
    """Returns the low (0) or high (1) halves of bytes as int16."""
    return b_w.to(tl.int16) >> 4 if HALF else b_w.to(tl.int16) & 15


@triton.jit
def _floats(b_w, HALF: tl.constexpr, TYPE: tl.constexpr):
    """Unpacks e2m1 numbers in the low (0) or high (1) halves of bytes to a 16-bit TYPE."""
    q = _half(b_w, HALF)
    SHIFT: tl.constexpr = 6 if tl.bfloat16 == TYPE else 9
    return (((q & 8) << 12) | ((q & 7) << SHIFT)).to(TYPE, bitcast=True)


@triton.jit
def _take(b_w, CODE: tl.constexpr, TYPE: tl.constexpr):
    """Runs the PTX `CODE` on four bytes of b_w at a time, for four numbers of a 16-bit TYPE."""
    q = tl.inline_asm_elementwise(CODE, "=r,=r,r", [b_w], dtype=tl.int16, is_pure=True, pack=4)
    return q.to(TYPE, bitcast=True)


@triton.jit
def factors(p_factor):
    """Loads the factors of e2m1 weights' rows, for sums over `_UNIT`."""
    return tl.load(p_factor) * _UNIT


# --- in float32, for a row ------------------------------------------------------------------------


@triton.jit
def widen(b_w, SHAPE: tl.constexpr):
    """Unpacks the low and the high halves of bytes b_w to float32. Integers are 128 too large; for
    e2m1 the row is to be multiplied by `row_factor`, and sums by `wide_scales`."""
    if SHAPE.has_ptx:
        return _take_wide(b_w, 0, SHAPE.group < 0), _take_wide(b_w, 1, SHAPE.group < 0)
    elif SHAPE.group < 0:
        low = _floats(b_w, 0, tl.float16).to(tl.float32)
        return low, _floats(b_w, 1, tl.float16).to(tl.float32)
    else:
        b_w = b_w.to(tl.int32)
        low = ((b_w & 15) << 16) | 0x43000000
        high = ((b_w >> 4) << 16) | 0x43000000
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def _take_wide(b_w, HALF: tl.constexpr, IS_FLOAT: tl.constexpr):
    """Unpacks halves of four bytes of b_w at a time to float32."""
    CODE: tl.constexpr = (
        float_ptx(HALF, True) if IS_FLOAT else integer_ptx(HALF, "0x43000000", True)
    )
    return tl.inline_asm_elementwise(
        CODE, "=r,=r,=r,=r,r", [b_w], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def row_factor(PTX: tl.constexpr):
    """Returns the factor of a row that is multiplied by e2m1 numbers from `widen`."""
    return _WIDE if PTX else _PLAIN


@triton.jit
def wide_scales(bits):
    """Returns the scales of sums of e2m1 numbers from `widen`, over `_UNIT`, in float32; `bits` are
    those of float8."""
    return decode(bits, False).to(tl.float32) * _OF_ROWS
