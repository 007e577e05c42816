"""Triton: a step of a GEMM of quantised weights, along the inputs.

The weights are the left operand: with few rows they fill the tensor cores' tall side. FP8: every
BLOCK inputs the sum goes to float32 registers, times both scales; tensor cores keep some 14 bits of
a float8 sum. Four bits: numbers become the activations' type in registers, times their scales; sums
of e2m1 are multiplied with their rows' factors.

Legend: K inputs of a step, M rows, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.numerics import decode, encode, scale_of
from milepost.kernels.products.forms.quantised import BLOCK, Fp4, Fp8, Int4, Quantised
from milepost.kernels.products.portable import float4
from milepost.kernels.products.portable.rounding import readable


def operands(weight: Quantised, chip: Chip) -> tuple[Any, Any, Any]:
    """Returns numbers, scales and zero points; e2m1 has rows' factors in their place."""
    if isinstance(weight, Int4):
        return weight.packed, weight.scales, weight.zeros
    if isinstance(weight, Fp4):
        return weight.packed, weight.scales.view(torch.uint8), weight.factors
    return readable(weight.values, chip), weight.scales, None


def input_scales(weight: Quantised) -> Tensor | None:
    """Returns the scale of all activations, if the checkpoint sets one."""
    return weight.input_scale if isinstance(weight, Fp8) else None


def constants(weight: Quantised, chip: Chip) -> dict[str, int]:
    """Returns the constants of a form. GROUP counts the inputs of a scale: it is 0 for FP8, and
    less than 0 for e2m1. DEPTHS counts the scales of an output."""
    if not isinstance(weight, Fp8):
        group = weight.group if isinstance(weight, Int4) else -weight.group
        form = {"GROUP": group, "SCALE_ROWS": 1, "BLOCK_SCALES": False, "NATIVE": True}
    else:
        form = {
            "GROUP": 0,
            "SCALE_ROWS": weight.rows,
            "BLOCK_SCALES": weight.depth == BLOCK,
            "NATIVE": chip.has_fp8,
        }
    return {"BLOCK_K": BLOCK, "DEPTHS": weight.scales.shape[-1], **form}


@triton.jit
def columns(BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Returns a step's inputs in a row of activations, and where the weights' numbers stand in
    theirs. A byte has two numbers of four bits: these are the first ones' inputs (see
    `forms.Int4`)."""
    if GROUP:
        LANE: tl.constexpr = min(GROUP, 64) if GROUP > 0 else 64
        o_w = tl.arange(0, BLOCK_K // 2)
        return o_w // LANE * (2 * LANE) + o_w % LANE, o_w
    else:
        o_k = tl.arange(0, BLOCK_K)
        return o_k, o_k


@triton.jit
def pitch(INPUTS: tl.constexpr, GROUP: tl.constexpr):
    """Returns the bytes of a row of weights."""
    if GROUP:
        return INPUTS // 2
    else:
        return INPUTS


@triton.jit
def load_scales(
    p_scale,
    p_zero,
    p_row_scale,
    scales_stride,
    i_k,
    INPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
):
    """Scales [N] and zero points [N] of weights and scales [M] of rows, of the step that begins
    with input i_k; what a form does not have, or not for a whole step, is anything. Of e2m1 they
    are the scales [N, G] of the groups in bytes' low halves, and of those in their high halves.

    They are loaded a step ahead: no loop has them brought ahead by itself, and each step would wait
    for them."""
    i_k = tl.minimum(i_k, INPUTS - BLOCK_K)
    scale = tl.zeros([1], tl.float32)
    zero, row_scale = scale, scale
    if GROUP >= BLOCK_K:
        scale = tl.load(p_scale + i_k // GROUP).to(tl.float32)
        zero = tl.load(p_zero + i_k // GROUP).to(tl.float32)
    elif GROUP < 0:
        GROUPS: tl.constexpr = BLOCK_K // (2 * -GROUP)
        p_group = p_scale[:, None] + i_k // -GROUP + tl.arange(0, GROUPS)[None, :]
        scale, zero = tl.load(p_group), tl.load(p_group + GROUPS)
    elif BLOCK_SCALES:
        scale = tl.load(p_scale + i_k // BLOCK_K)
        if p_row_scale is not None:
            row_scale = tl.load(p_row_scale + i_k // BLOCK_K * scales_stride)
    return scale, zero, row_scale


@triton.jit
def multiply(
    p_x,
    p_w,
    p_scale,
    p_zero,
    p_row_scale,
    input_scale,
    scales_stride,
    first,
    SHARE: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Multiplies weights and rows: a tile [N, M], over SHARE inputs from `first` on, or over all of
    them if SHARE is 0 (see `add_step`)."""
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    scale, zero, row_scale = load_scales(
        p_scale, p_zero, p_row_scale, scales_stride, first, INPUTS, BLOCK_K, GROUP, BLOCK_SCALES
    )
    stop = INPUTS
    if SHARE:
        stop = tl.minimum(first + SHARE, INPUTS)
    for i_k in range(first, stop, BLOCK_K):
        next_scale, next_zero, next_row_scale = load_scales(
            p_scale, p_zero, p_row_scale, scales_stride, i_k + BLOCK_K,
            INPUTS, BLOCK_K, GROUP, BLOCK_SCALES,
        )  # fmt: skip
        acc = add_step(
            acc, p_x, input_scale, p_w, p_scale, p_zero, scale, zero, row_scale, i_k,
            BLOCK_K, GROUP, BLOCK_SCALES, NATIVE, p_row_scale is not None,
        )  # fmt: skip
        scale, zero, row_scale = next_scale, next_zero, next_row_scale
    if GROUP == 0 and not BLOCK_SCALES:
        acc *= tl.load(p_scale)[:, None] * whole_scale(p_row_scale, input_scale)
    if GROUP < 0:
        acc *= factors(p_zero)[:, None]
    if not NATIVE:
        acc *= 65536.0
    return acc


@triton.jit
def add_step(
    acc,
    p_x,
    input_scale,
    p_w,
    p_scale,
    p_zero,
    scale,
    zero,
    row_scale,
    i_k,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):
    """Adds the product of inputs i_k to i_k + BLOCK_K to acc [N, M], for weights at `p_w` [N, K]
    and rows at `p_x` [M, K], both at `columns`. `scale`, `zero` and `row_scale` are the step's (see
    `load_scales`), those of smaller groups are at `p_scale` and `p_zero` [N]. FP8 rows that are not
    rounded yet are rounded on the way, by their `input_scale` if there is one."""
    if GROUP < 0:
        return _add_fp4(acc, p_x, p_w, scale, zero, i_k)
    elif GROUP >= BLOCK_K:
        return _add_int4(acc, p_x, p_w, scale, zero, i_k)
    elif GROUP:
        return _add_small_groups(acc, p_x, p_w, p_scale, p_zero, i_k, BLOCK_K, GROUP)
    else:
        return _add_fp8(
            acc, p_x, input_scale, p_w, scale, row_scale, i_k, BLOCK_SCALES, NATIVE, IS_ROUNDED
        )


@triton.jit
def _add_fp8(
    acc,
    p_x,
    input_scale,
    p_w,
    scale,
    row_scale,
    i_k,
    BLOCK_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):
    b_w = decode(tl.load(p_w + i_k), NATIVE)
    b_x = tl.load(p_x + i_k)
    if not IS_ROUNDED:
        b_x = b_x.to(tl.float32)
        if input_scale is None:
            row_scale = scale_of(b_x, 1)
        else:
            row_scale = tl.zeros([b_x.shape[0]], tl.float32) + input_scale
        b_x = encode(b_x / row_scale[:, None], NATIVE)
    b_dot = tl.dot(b_w, tl.trans(decode(b_x, NATIVE)))
    if BLOCK_SCALES:
        b_dot *= scale[:, None] * row_scale[None, :]
    return acc + b_dot


@triton.jit
def _add_fp4(acc, p_x, p_w, low_scale, high_scale, i_k):
    TYPE: tl.constexpr = p_x.dtype.element_ty
    b_w = tl.load(p_w + i_k // 2).to(tl.int16)
    low = float4.weights(b_w & 15, low_scale, TYPE)
    acc = tl.dot(low, tl.trans(tl.load(p_x + i_k)), acc)
    high = float4.weights(b_w >> 4, high_scale, TYPE)
    return tl.dot(high, tl.trans(tl.load(p_x + 64 + i_k)), acc)


@triton.jit
def factors(p_factor):
    """Loads the factors of sums of e2m1 numbers."""
    return tl.load(p_factor) * float4.UNIT


@triton.jit
def _add_int4(acc, p_x, p_w, scale, zero, i_k):
    """Adds a step of one group: its numbers are multiplied as whole ones, and the sum is scaled."""
    TYPE: tl.constexpr = p_x.dtype.element_ty
    b_w = tl.load(p_w + i_k // 2).to(tl.int16)
    offset: tl.constexpr = 128.0 if tl.bfloat16 == TYPE else 1024.0
    b_zero = (zero + offset).to(TYPE)[:, None]
    b_dot = tl.dot(_beside(b_w & 15, TYPE) - b_zero, tl.trans(tl.load(p_x + i_k)))
    b_dot = tl.dot(_beside(b_w >> 4, TYPE) - b_zero, tl.trans(tl.load(p_x + 64 + i_k)), b_dot)
    return acc + b_dot * scale[:, None]


@triton.jit
def _beside(q, TYPE: tl.constexpr):
    """Puts four-bit numbers in the bits beside a power of two, 128 in bfloat16 and 1024 in float16:
    this costs less than a conversion."""
    if tl.bfloat16 == TYPE:
        return (q | 0x4300).to(TYPE, bitcast=True)
    else:
        return (q | 0x6400).to(TYPE, bitcast=True)


@triton.jit
def _add_small_groups(
    acc, p_x, p_w, p_scale, p_zero, i_k, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):
    LANE: tl.constexpr = min(GROUP, 64)
    TYPE: tl.constexpr = p_x.dtype.element_ty
    b_w = tl.load(p_w + i_k // 2).to(tl.int16)
    low = dequantise(b_w & 15, p_scale, p_zero, i_k, TYPE, BLOCK_K, GROUP)
    acc = tl.dot(low, tl.trans(tl.load(p_x + i_k)), acc)
    high = dequantise(b_w >> 4, p_scale, p_zero, i_k + LANE, TYPE, BLOCK_K, GROUP)
    return tl.dot(high, tl.trans(tl.load(p_x + LANE + i_k)), acc)


@triton.jit
def dequantise(
    q, p_scale, p_zero, i_k, TYPE: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):
    """Returns the weights of numbers q [N, K / 2] int16 in a 16-bit type; the first is input
    i_k's."""
    PIECES: tl.constexpr = BLOCK_K // (2 * min(GROUP, 64))
    if PIECES == 1:
        scale = tl.load(p_scale + i_k // GROUP)[:, None]
        zero = tl.load(p_zero + i_k // GROUP)[:, None]
    else:
        # A tile of numbers of several groups.
        LANE: tl.constexpr = min(GROUP, 64)
        group = (i_k + tl.arange(0, BLOCK_K // 2) // LANE * (2 * LANE)) // GROUP
        scale = tl.load(p_scale[:, None] + group[None, :])
        zero = tl.load(p_zero[:, None] + group[None, :])
    offset: tl.constexpr = 128.0 if tl.bfloat16 == TYPE else 1024.0
    return (_beside(q, TYPE) - (zero.to(tl.float32) + offset).to(TYPE)) * scale.to(TYPE)


@triton.jit
def whole_scale(p_row_scale, input_scale):
    """Returns the scale of rows that have one each, [1, M], or one for all."""
    if input_scale is None:
        return tl.load(p_row_scale)[None, :]
    else:
        return input_scale
