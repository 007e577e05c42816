"""Triton: the loop of a GEMM over its inputs, for weights of every form.

Quantised weights are the left operand, so they fill the tall side of tensor cores if rows are few.
FP8: after every BLOCK inputs the sum is multiplied by both scales and added in float32 registers,
because tensor cores keep only some 14 bits of a float8 sum; on chips without float8 arithmetic
numbers are converted to the activations' type, which is exact, and rows are not rounded. Int8: sums
are integers, multiplied by both scales at the end. Four bits: numbers are converted to the
activations' type and multiplied by their scales; sums of e2m1 are multiplied by their rows'
factors.

Legend: K inputs of a step, M rows, N outputs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from milepost.kernels.platform.numerics import decode, decode_as, encode, round_int8, scale_of
from milepost.kernels.products.forms import Raw
from milepost.kernels.products.forms.quantised import Quantised
from milepost.kernels.products.forms.w4a4 import W4A4
from milepost.kernels.products.portable import four_bits, w4a4_step
from milepost.kernels.products.portable.weights import (
    columns,
    find_both,
    find_row,
    lane,
    load_row_scale,
    load_scales,
    split_inputs,
)


def choose(weight: Raw | Quantised) -> Any:
    """Returns the device function that multiplies rows by a weight of this form."""
    if isinstance(weight, W4A4):
        return w4a4_step.multiply
    return multiply_raw if isinstance(weight, Raw) else multiply_quantised


@triton.jit
def multiply_raw(
    p_x,
    p_row_scale,  # noqa: ARG001
    stride,  # noqa: ARG001
    weight,
    expert,
    column,
    first,
    SHAPE: tl.constexpr,
):
    """Multiplies rows at `p_x` [M, 1] by the weights of outputs `column` [N], and of their gates if
    there are any, over a split's inputs from `first` on. Returns the sums of both, [M, N], or [N,
    M] if swapped. `p_row_scale` [M] and `stride` are of rounded rows and for other forms."""
    BLOCK_K: tl.constexpr = SHAPE.block_k
    INPUTS: tl.constexpr = split_inputs(SHAPE.inputs, SHAPE.split_k, BLOCK_K)
    o_k = first + tl.arange(0, BLOCK_K)
    p_x += o_k[None, :]
    p_gate = find_row(weight, expert, column, SHAPE)[0][:, None] + o_k[None, :]
    # Up rows stand after the gates'.
    p_up = p_gate
    if SHAPE.is_gated:
        p_up += SHAPE.outputs * SHAPE.inputs
    if SHAPE.is_swapped:
        b_gate = tl.zeros([column.shape[0], p_x.shape[0]], tl.float32)
    else:
        b_gate = tl.zeros([p_x.shape[0], column.shape[0]], tl.float32)
    b_up = b_gate
    for i_k in range(0, INPUTS, BLOCK_K):
        b_x = _load(p_x, i_k, o_k, SHAPE)
        if SHAPE.is_gated:
            b_gate = _add(b_x, _load(p_gate, i_k, o_k, SHAPE), b_gate, SHAPE)
        b_up = _add(b_x, _load(p_up, i_k, o_k, SHAPE), b_up, SHAPE)
    return b_up, b_gate


@triton.jit
def _load(pointers, i_k, o_k, SHAPE: tl.constexpr):
    """Loads a tile [rows, K] from a split's input i_k on."""
    if SHAPE.inputs % (SHAPE.split_k * SHAPE.block_k) == 0:
        return tl.load(pointers + i_k)
    else:
        return tl.load(pointers + i_k, mask=(i_k + o_k < SHAPE.inputs)[None, :], other=0.0)


@triton.jit
def _add(left, right, acc, SHAPE: tl.constexpr):
    """Returns acc + left @ right.T, transposed if swapped."""
    if SHAPE.is_swapped:
        return tl.dot(right, tl.trans(left), acc, input_precision="ieee")
    else:
        return tl.dot(left, tl.trans(right), acc, input_precision="ieee")


@triton.jit
def multiply_quantised(
    p_x, p_row_scale, stride, weight, expert, column, first, SHAPE: tl.constexpr
):
    """Does `multiply_raw` for quantised weights, swapped unless four-bit weights are scaled first.
    Scales of a row's blocks are `stride` apart."""
    BLOCK_K: tl.constexpr = SHAPE.block_k
    INPUTS: tl.constexpr = split_inputs(SHAPE.inputs, SHAPE.split_k, BLOCK_K)
    o_x, o_w = columns(SHAPE)
    p_x += o_x[None, :]
    gate, up = find_both(weight, expert, column, SHAPE)
    p_gate, p_up = gate[0][:, None] + o_w[None, :], up[0][:, None] + o_w[None, :]
    IS_INT8: tl.constexpr = weight.numbers.dtype.element_ty == tl.int8
    if SHAPE.is_swapped:
        b_gate = tl.zeros([column.shape[0], p_x.shape[0]], tl.int32 if IS_INT8 else tl.float32)
    else:
        b_gate = tl.zeros([p_x.shape[0], column.shape[0]], tl.float32)
    b_up = b_gate
    gate_scales, up_scales = load_scales(gate, first, SHAPE), load_scales(up, first, SHAPE)
    row_scale = load_row_scale(p_row_scale, stride, first, SHAPE)
    if weight.input_scales is not None:
        row_scale = tl.load(weight.input_scales + expert)
    stop = INPUTS
    if SHAPE.inputs % (SHAPE.split_k * BLOCK_K):
        stop = tl.minimum(stop, SHAPE.inputs - first)
    for i_step in tl.range(0, stop, BLOCK_K, loop_unroll_factor=SHAPE.steps):
        i_k = first + i_step
        next_up_scales = load_scales(up, i_k + BLOCK_K, SHAPE)
        next_row_scale = row_scale
        if weight.input_scales is None:
            next_row_scale = load_row_scale(p_row_scale, stride, i_k + BLOCK_K, SHAPE)
        x = p_x, row_scale, _sum_rows(p_x, p_row_scale, stride, p_up, i_k, SHAPE)
        if SHAPE.is_gated:
            next_gate_scales = load_scales(gate, i_k + BLOCK_K, SHAPE)
            b_gate = _add_step(b_gate, x, p_gate, gate_scales, i_k, SHAPE)
            gate_scales = next_gate_scales
        b_up = _add_step(b_up, x, p_up, up_scales, i_k, SHAPE)
        up_scales, row_scale = next_up_scales, next_row_scale
    if SHAPE.group == 0 and SHAPE.is_rounded and not SHAPE.has_block_scales:
        row_scale = tl.load(p_row_scale)[None, :]
    TYPE: tl.constexpr = p_x.dtype.element_ty
    return _finish(b_up, up, row_scale, TYPE, SHAPE), _finish(b_gate, gate, row_scale, TYPE, SHAPE)


@triton.jit
def _finish(acc, p_row, row_scale, TYPE: tl.constexpr, SHAPE: tl.constexpr):
    """Multiplies sums [N, M] by the factors that all inputs share; rows have the type TYPE."""
    if SHAPE.group == 0 and not SHAPE.has_block_scales:
        scale = tl.load(p_row[1])[:, None]
        if not SHAPE.is_decoded:
            scale *= row_scale
        acc = acc.to(tl.float32) * scale
    if SHAPE.group < 0:
        factor = four_bits.factors(p_row[2])
        acc *= factor[:, None] if SHAPE.is_swapped else factor[None, :]
    if SHAPE.is_decoded:
        if tl.bfloat16 != TYPE:
            acc *= 256.0
    elif not SHAPE.is_native:
        acc *= 65536.0
    return acc


@triton.jit
def _add_step(acc, x, p_w, scales, i_k, SHAPE: tl.constexpr):
    """Adds the product of K inputs from i_k on to acc [N, M], for weights at `p_w` [N, K]. `x` has
    pointers to the rows [M, K], the step's scales or that of all activations, and the rows' sums;
    all pointers are at `columns`."""
    if p_w.dtype.element_ty == tl.int8:
        return _add_int8(acc, x, p_w + i_k, i_k, SHAPE)
    elif SHAPE.group < 0 or SHAPE.scales_first:
        return _add_weights(acc, x[0], p_w, scales, i_k, SHAPE)
    elif SHAPE.group:
        return _add_int4(acc, x, p_w, scales, i_k, SHAPE)
    elif SHAPE.is_decoded:
        return _add_decoded(acc, x[0], p_w, scales[0], i_k, SHAPE)
    else:
        return _add_fp8(acc, x, p_w, scales[0], i_k, SHAPE)


@triton.jit
def _add_int8(acc, x, p_w, i_k, SHAPE: tl.constexpr):
    """Adds a step of int8 weights at `p_w` to sums in int32, whose order changes no bit. Rows are
    rounded on the way by the scale of all activations, unless they are already."""
    p_x, row_scale, _ = x
    b_x = tl.load(p_x + i_k)
    if not SHAPE.is_rounded:
        b_x = round_int8(b_x.to(tl.float32) / row_scale)
    return tl.dot(tl.load(p_w), tl.trans(b_x), acc, out_dtype=tl.int32)


@triton.jit
def _add_fp8(acc, x, p_w, scale, i_k, SHAPE: tl.constexpr):
    """Adds a step of FP8. Rows are rounded on the way unless they are already, by the scale of all
    activations if there is one."""
    p_x, row_scale, _ = x
    b_w = decode(tl.load(p_w + i_k), SHAPE.is_native)
    b_x = tl.load(p_x + i_k)
    if not SHAPE.is_rounded:
        b_x = b_x.to(tl.float32)
        if SHAPE.is_static:
            row_scale += tl.zeros([b_x.shape[0]], tl.float32)
        else:
            row_scale = scale_of(b_x, 1)
        b_x = encode(b_x / row_scale[:, None], SHAPE.is_native)
    b_dot = tl.dot(b_w, tl.trans(decode(b_x, SHAPE.is_native)))
    if SHAPE.has_block_scales:
        b_dot *= scale[:, None] * row_scale[None, :]
    return acc + b_dot


@triton.jit
def _add_decoded(acc, p_x, p_w, scale, i_k, SHAPE: tl.constexpr):
    """Adds a step of FP8 weights converted to the rows' type, which is exact."""
    b_x = tl.trans(tl.load(p_x + i_k))
    b_w = decode_as(tl.load(p_w + i_k), b_x.dtype)
    if SHAPE.has_block_scales:
        return acc + tl.dot(b_w, b_x) * scale[:, None]
    else:
        return tl.dot(b_w, b_x, acc)


@triton.jit
def _add_weights(acc, p_x, p_w, scales, i_k, SHAPE: tl.constexpr):
    """Adds a step of four-bit weights that are scaled before they are multiplied: e2m1, and Int4
    for many rows, whose sums per group outnumber its weights."""
    b_w, b_x = tl.load(p_w + i_k // 2), tl.load(p_x + i_k)
    b_low, b_high = four_bits.weights(b_w, scales, b_x.dtype, SHAPE)
    acc = _add(b_x, b_low, acc, SHAPE)
    return _add(tl.load(p_x + lane(SHAPE.group) + i_k), b_high, acc, SHAPE)


@triton.jit
def _add_int4(acc, x, p_w, scales, i_k, SHAPE: tl.constexpr):
    """Adds a step of one group or two of Int4. Numbers are multiplied as integers; zero points and
    the numbers' `offset` are subtracted from a group's sum by means of the rows' sums, and the
    difference is scaled.

    Only constants are applied to a number before it is multiplied, so it stays in the register in
    which it was unpacked.
    """
    LANE: tl.constexpr = lane(SHAPE.group)
    p_x, _, sums = x
    scale, zero, high_scale, high_zero = scales
    b_w, b_x, b_y = _load_step(p_x, p_w, i_k, LANE)
    b_low = tl.dot(four_bits.integers(b_w, 0, b_x.dtype, SHAPE.has_ptx), b_x)
    b_high = four_bits.integers(b_w, 1, b_x.dtype, SHAPE.has_ptx)
    zero = zero.to(tl.float32) + four_bits.offset(b_x.dtype)
    if SHAPE.group == LANE:
        high_zero = high_zero.to(tl.float32) + four_bits.offset(b_x.dtype)
        acc += _scaled(b_low, sums[0], scale, zero)
        return acc + _scaled(tl.dot(b_high, b_y), sums[1], high_scale, high_zero)
    else:
        return acc + _scaled(tl.dot(b_high, b_y, b_low), sums[0], scale, zero)


@triton.jit
def _load_step(p_x, p_w, i_k, LANE: tl.constexpr):
    """Loads a step's bytes, and the rows' inputs [K, M] for their low and for their high halves."""
    b_w = tl.load(p_w + i_k // 2)
    return b_w, tl.trans(tl.load(p_x + i_k)), tl.trans(tl.load(p_x + LANE + i_k))


@triton.jit
def _sum_rows(p_x, p_sum, stride, p_w, i_k, SHAPE: tl.constexpr):
    """Returns rows' sums over a step's groups of Int4, [1, M], or [N, M] if they are added up here.
    Few rows are: the matrix unit, which is idle, multiplies them by ones, so sums lie where
    products do. The ones have the layout of numbers at `p_w`."""
    LANE: tl.constexpr = lane(SHAPE.group)
    if SHAPE.scales_first:
        return ()
    elif SHAPE.group > 0 and SHAPE.is_rounded:
        p_sum += i_k // min(SHAPE.group, SHAPE.block_k) * stride
        b_sum = tl.load(p_sum)[None, :]
        if SHAPE.group == LANE:
            return b_sum, tl.load(p_sum + stride)[None, :]
        else:
            return (b_sum,)
    elif SHAPE.group > 0:
        b_w, b_x, b_y = _load_step(p_x, p_w, i_k, LANE)
        b_one = four_bits.ones(b_w, b_x.dtype, SHAPE.has_ptx)
        b_sum = tl.dot(b_one, b_x)
        if SHAPE.group == LANE:
            return b_sum, tl.dot(b_one, b_y)
        else:
            return (tl.dot(b_one, b_y, b_sum),)
    else:
        return ()


@triton.jit
def _scaled(b_dot, b_sum, scale, zero):
    """Scales a group's sums [N, M], less zero points times the rows' sums `b_sum`."""
    return (b_dot - b_sum * zero[:, None]) * scale.to(tl.float32)[:, None]
