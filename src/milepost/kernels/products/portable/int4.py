"""Triton: unpacks four-bit integers to a 16-bit type or to float32, in the register layout in which
they are multiplied.

In bfloat16 a number is put into the low bits of 128, which costs less than a conversion, and 128 is
subtracted from sums: a group's sum is some 1,500 then instead of 50, and float32 has 16 bits to
spare. In float16 it is put into the low bits of 1024, so 1032 is subtracted from each number. On
NVIDIA's chips four bytes are unpacked at a time.

Legend: N outputs, K bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _taking(half: str, beside: str) -> tl.constexpr:
    """Returns PTX that unpacks halves of four bytes to 16 bits each, in the low bits of a power of
    two."""
    return tl.constexpr(f"""{{
        .reg .b32 half, power;
        mov.b32 power, {beside};
        {half}
        prmt.b32 $0, half, power, 0x4140;
        prmt.b32 $1, half, power, 0x4342;
        }}""")


LOW = "and.b32 half, $2, 0x0f0f0f0f;"
HIGH = "shr.u32 half, $2, 4; and.b32 half, half, 0x0f0f0f0f;"
_LOW_BFLOAT16, _HIGH_BFLOAT16 = (_taking(half, "0x43434343") for half in (LOW, HIGH))
_LOW_FLOAT16, _HIGH_FLOAT16 = (_taking(half, "0x64646464") for half in (LOW, HIGH))
_ONE_BFLOAT16, _ONE_FLOAT16 = (
    tl.constexpr(f"mov.b32 $0, {one}; mov.b32 $1, {one};") for one in ("0x3f803f80", "0x3c003c00")
)


def _widening(half: str) -> tl.constexpr:
    """Returns PTX that unpacks halves of four bytes to float32, in the low bits of 128."""
    moves = " ".join(f"prmt.b32 ${i}, half, power, 0x7{i}44;" for i in range(4))
    return tl.constexpr(
        "{ .reg .b32 half, power; mov.b32 power, 0x43000000; "
        + half.replace("$2", "$4")
        + moves
        + " }"
    )


LOW_WIDE, HIGH_WIDE = _widening(LOW), _widening(HIGH)


@triton.jit
def low(b_w, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Unpacks the low halves of bytes b_w [N, K] to a 16-bit TYPE; numbers are `offset` too
    large."""
    if not PTX:
        q = _beside(b_w.to(tl.int16) & 15, TYPE)
    elif tl.bfloat16 == TYPE:
        q = take(b_w, _LOW_BFLOAT16, TYPE)
    else:
        q = take(b_w, _LOW_FLOAT16, TYPE)
    return _taken_off(q)


@triton.jit
def high(b_w, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Unpacks the high halves of bytes b_w [N, K] to a 16-bit TYPE; numbers are `offset` too
    large."""
    if not PTX:
        q = _beside(b_w.to(tl.int16) >> 4, TYPE)
    elif tl.bfloat16 == TYPE:
        q = take(b_w, _HIGH_BFLOAT16, TYPE)
    else:
        q = take(b_w, _HIGH_FLOAT16, TYPE)
    return _taken_off(q)


@triton.jit
def widen(b_w, PTX: tl.constexpr):
    """Unpacks the low and the high halves of bytes b_w to float32; numbers are 128 too large."""
    if PTX:
        return take_wide(b_w, LOW_WIDE), take_wide(b_w, HIGH_WIDE)
    else:
        b_w = b_w.to(tl.int32)
        low = ((b_w & 15) << 16) | 0x43000000
        high = ((b_w >> 4) << 16) | 0x43000000
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def take_wide(b_w, HOW: tl.constexpr):
    """Runs the PTX `HOW` on four bytes of b_w at a time, for four numbers in float32."""
    return tl.inline_asm_elementwise(
        HOW, "=r,=r,=r,=r,r", [b_w], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def ones(b_w, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Returns ones [N, K] of a 16-bit TYPE, in the register layout of numbers unpacked from b_w."""
    if not PTX:
        one = tl.full(b_w.shape, 1.0, TYPE)
    elif tl.bfloat16 == TYPE:
        one = take(b_w, _ONE_BFLOAT16, TYPE)
    else:
        one = take(b_w, _ONE_FLOAT16, TYPE)
    return one


@triton.jit
def take(b_w, HOW: tl.constexpr, TYPE: tl.constexpr):
    """Runs the PTX `HOW` on four bytes of b_w at a time, for four numbers of a 16-bit TYPE."""
    q = tl.inline_asm_elementwise(HOW, "=r,=r,r", [b_w], dtype=tl.int16, is_pure=True, pack=4)
    return q.to(TYPE, bitcast=True)


@triton.jit
def _beside(q, TYPE: tl.constexpr):
    """Puts numbers into the low bits of 128 (bfloat16) or 1024 (float16)."""
    if tl.bfloat16 == TYPE:
        return (q | 0x4300).to(TYPE, bitcast=True)
    else:
        return (q | 0x6400).to(TYPE, bitcast=True)


@triton.jit
def _taken_off(q):
    if q.dtype == tl.bfloat16:
        return q
    else:
        return q - 1032.0


@triton.jit
def offset(TYPE: tl.constexpr):
    """Returns the excess of the numbers that `low` and `high` unpack to a 16-bit TYPE."""
    return 128.0 if tl.bfloat16 == TYPE else -8.0


@triton.jit
def weights(numbers, scale, zero):
    """Returns the weights [N, K] of `numbers` from `low` or `high`, in their type. Scales and zero
    points are [N], or [N, G] for groups of inputs."""
    zero = (zero.to(tl.float32) + offset(numbers.dtype)).to(numbers.dtype)
    scale = scale.to(numbers.dtype)
    if len(scale.shape) == 1:
        return (numbers - zero[:, None]) * scale[:, None]
    else:
        N: tl.constexpr = numbers.shape[0]
        K: tl.constexpr = numbers.shape[1]
        G: tl.constexpr = scale.shape[1]
        q = tl.reshape(numbers, [N, G, K // G])
        return tl.reshape((q - zero[:, :, None]) * scale[:, :, None], [N, K])
