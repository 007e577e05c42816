"""Triton: multiplies a row by four-bit weights, without tensor cores.

A thread multiplies a *piece*, the bytes that it loads at once, and scales the piece's sum, so no
thread waits for another before the last input. Integers are unpacked to float32, 128 too large; the
surplus is subtracted from a piece's sum together with the zero point.

Legend: N outputs, P pieces of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.platform.launches import wait_for_inputs
from milepost.kernels.products.forms.quantised import BLOCK, FP4_LANE
from milepost.kernels.products.portable import float4, int4
from milepost.kernels.products.portable.gemm_step import factors
from milepost.kernels.products.portable.weights import find_both

_PIECE = tl.constexpr(16)
"""Bytes of a piece."""
_BLOCK = tl.constexpr(BLOCK)
_LANE = tl.constexpr(FP4_LANE)


@triton.jit
def multiply_row(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Multiplies the row at `p_x` by the weights of outputs `column` [N], and of their gates if
    there are any. Returns the sums of both, [N] each. If EARLY, it waits for inputs once the first
    weights are loaded."""
    INPUTS: tl.constexpr = SHAPE.inputs
    BLOCK_K: tl.constexpr = SHAPE.block_k
    TYPE: tl.constexpr = weight.scales.dtype.element_ty
    gate, up = find_both(weight, expert, column, SHAPE)
    ups = tl.zeros([column.shape[0], BLOCK_K // (2 * _PIECE)], tl.float32)
    gates = ups
    if SHAPE.is_ahead:
        b_ups, b_gates = (), ()
        for i_k in tl.static_range(0, INPUTS, BLOCK_K):
            b_ups += (_load_weights(up, i_k, SHAPE),)
            if SHAPE.is_gated:
                b_gates += (_load_weights(gate, i_k, SHAPE),)
        if EARLY:
            wait_for_inputs()
        for i_k in tl.static_range(0, INPUTS, BLOCK_K):
            x = _load_row(p_x, i_k, SHAPE)
            if SHAPE.is_gated:
                gates += _dot(b_gates[i_k // BLOCK_K], x, TYPE, SHAPE)
            ups += _dot(b_ups[i_k // BLOCK_K], x, TYPE, SHAPE)
    else:
        for i_k in tl.static_range(0, INPUTS, BLOCK_K):
            b_up = _load_weights(up, i_k, SHAPE)
            if SHAPE.is_gated:
                b_gate = _load_weights(gate, i_k, SHAPE)
            if EARLY and i_k == 0:
                wait_for_inputs()
            x = _load_row(p_x, i_k, SHAPE)
            if SHAPE.is_gated:
                gates += _dot(b_gate, x, TYPE, SHAPE)
            ups += _dot(b_up, x, TYPE, SHAPE)
    ups, gates = tl.sum(ups, 1), tl.sum(gates, 1)
    if SHAPE.group < 0:
        gates *= factors(gate[2])
        ups *= factors(up[2])
    return ups, gates


@triton.constexpr_function
def _lane(group):
    """Returns the number of adjacent inputs in low halves of bytes; as many in high halves
    follow."""
    return min(group, FP4_LANE) if group > 0 else FP4_LANE


@triton.jit
def _pieces(i_k, SHAPE: tl.constexpr):
    """Returns a step's pieces [P]: their numbers, the first inputs of their low halves, and whether
    they exist."""
    LANE: tl.constexpr = _lane(SHAPE.group)
    EACH: tl.constexpr = LANE // _PIECE
    o_p = i_k // (2 * _PIECE) + tl.arange(0, SHAPE.block_k // (2 * _PIECE))
    o_k = o_p // EACH * (2 * LANE) + o_p % EACH * _PIECE
    return o_p, o_k, o_k < SHAPE.inputs


@triton.jit
def _load_row(p_x, i_k, SHAPE: tl.constexpr):
    """Loads the inputs of the pieces' low and high halves [P, PIECE], and returns their sums [P]
    too."""
    LANE: tl.constexpr = _lane(SHAPE.group)
    _, o_k, is_input = _pieces(i_k, SHAPE)
    p_x += o_k[:, None] + tl.arange(0, _PIECE)[None, :]
    b_x = tl.load(p_x, mask=is_input[:, None], other=0.0).to(tl.float32)
    b_y = tl.load(p_x + LANE, mask=is_input[:, None], other=0.0).to(tl.float32)
    x_sum, y_sum = tl.sum(b_x, 1), tl.sum(b_y, 1)
    # What depends on a sum is widened before it is spread over the outputs, not after.
    factor = float4.row_factor(SHAPE.has_ptx) if SHAPE.group < 0 else 1.0
    one = tl.where(x_sum == x_sum, factor, x_sum)[:, None]
    return b_x * one, b_y * one, x_sum, y_sum


@triton.jit
def _load_weights(p_row, i_k, SHAPE: tl.constexpr):
    """Loads pieces of weights [N, P, PIECE] of rows from `find_row`, and two tensors [N, P] that
    scale them. For integers these are scales and zero points, packed for two neighbouring groups if
    a byte's halves are in different groups; for e2m1, the scales of the low and of the high
    halves."""
    o_p, o_k, is_input = _pieces(i_k, SHAPE)
    place = o_p[:, None] * _PIECE + tl.arange(0, _PIECE)[None, :]
    p_w = p_row[0][:, None, None] + place[None, :, :]
    GROUP: tl.constexpr = SHAPE.group if SHAPE.group > 0 else -SHAPE.group
    o_g = (o_k // GROUP)[None, :]
    p_first = p_row[1][:, None] + o_g
    if SHAPE.group < 0:
        p_second = p_first + _LANE // GROUP
    else:
        p_second = p_row[2][:, None] + o_g
        if SHAPE.group < _BLOCK:
            p_first = p_first.to(tl.pointer_type(tl.int32), bitcast=True)
            p_second = p_second.to(tl.pointer_type(tl.uint16), bitcast=True)
    if SHAPE.inputs % SHAPE.block_k == 0:
        return tl.load(p_w), tl.load(p_first), tl.load(p_second)
    else:
        b_w = tl.load(p_w, mask=is_input[None, :, None], other=0)
        first = tl.load(p_first, mask=is_input[None, :], other=0)
        return b_w, first, tl.load(p_second, mask=is_input[None, :], other=0)


@triton.jit
def _dot(weights, x, TYPE: tl.constexpr, SHAPE: tl.constexpr):
    """Multiplies pieces of weights by pieces of a row: [N, P]. Packed scales have the type TYPE."""
    b_w, first, second = weights
    b_x, b_y, x_sum, y_sum = x
    if SHAPE.group < 0:
        low, high = float4.widen(b_w, SHAPE.has_ptx)
    else:
        low, high = int4.widen(b_w, SHAPE.has_ptx)
    low, high = tl.sum(low * b_x[None, :, :], 2), tl.sum(high * b_y[None, :, :], 2)
    if SHAPE.group < 0:
        return low * float4.wide_scales(first) + high * float4.wide_scales(second)
    elif SHAPE.group < _BLOCK:
        low = (low - _surplus(second & 255) * x_sum[None, :]) * _take(first, TYPE)
        return low + (high - _surplus(second >> 8) * y_sum[None, :]) * _take(first >> 16, TYPE)
    else:
        return (low + high - _surplus(second) * (x_sum + y_sum)[None, :]) * first.to(tl.float32)


@triton.jit
def _surplus(zero):
    """Returns the surplus of an unpacked integer: its zero point plus 128."""
    return zero.to(tl.float32) + 128.0


@triton.jit
def _take(pair, TYPE: tl.constexpr):
    """Returns the low half of a 32-bit pair, a number of a 16-bit TYPE, in float32."""
    return (pair & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
