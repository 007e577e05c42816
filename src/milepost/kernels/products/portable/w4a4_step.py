"""Triton: multiplies rows rounded to e2m1 by e2m1 weights, with the instructions of chips that have
such products (sm_100, sm_120): see `forms.w4a4`. `tl.dot_scaled` multiplies both by the scales of
their groups, which are float8 in groups of 16 and powers of two, e8m0, in groups of 32.

Legend: K inputs of a step, M rows, N outputs, G groups of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.platform.numerics import decode
from milepost.kernels.products.portable.weights import find_both, split_inputs


@triton.jit
def multiply(p_x, p_row_scale, stride, weight, expert, column, first, SHAPE: tl.constexpr):
    """Multiplies rows of codes at `p_x` [M, 1] by the weights of outputs `column` [N], and of their
    gates if there are any, over a split's inputs from `first` on. Returns the sums of both, [N, M].
    Scales of a row's groups are `stride` apart.

    Gates have a loop of their own: in one loop Triton finds no place for the scales of the rows,
    which two instructions would read, on sm_100."""
    rows = p_x, p_row_scale, stride, tl.load(weight.input_scales)
    gate, up = find_both(weight, expert, column, SHAPE)
    b_up = _sum(rows, up, first, SHAPE)
    b_gate = b_up
    if SHAPE.is_gated:
        b_gate = _sum(rows, gate, first, SHAPE)
    return b_up, b_gate


@triton.jit
def _sum(rows, p_row, first, SHAPE: tl.constexpr):
    """Returns the sums [N, M] for `rows` of codes and rows of weights from `find_row`."""
    BLOCK_K: tl.constexpr = SHAPE.block_k
    GROUP: tl.constexpr = -SHAPE.group
    INPUTS: tl.constexpr = split_inputs(SHAPE.inputs, SHAPE.split_k, BLOCK_K)
    p_x, p_row_scale, stride, factor = rows
    o_b, o_g = tl.arange(0, BLOCK_K // 2)[None, :], tl.arange(0, BLOCK_K // GROUP)[None, :]
    p_x, p_w, p_scale = p_x + o_b, p_row[0][:, None] + o_b, p_row[1][:, None] + o_g
    p_row_scale = p_row_scale[:, None] + o_g * stride
    acc = tl.zeros([p_w.shape[0], p_x.shape[0]], tl.float32)
    for i_k in range(first, tl.minimum(first + INPUTS, SHAPE.inputs), BLOCK_K):
        i_g = i_k // GROUP
        b_w, b_x = tl.load(p_w + i_k // 2), tl.load(p_x + i_k // 2)
        b_scale, b_row_scale = tl.load(p_scale + i_g), tl.load(p_row_scale + i_g * stride)
        if GROUP == 16:
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
            b_row_scale = b_row_scale.to(tl.float8e4nv, bitcast=True)
        else:
            # Powers of two, decoded as 1 / 256 of themselves. For a scale of 0 stands 2^-119.
            wide = decode(b_scale, False).to(tl.float32)
            b_scale = ((wide.to(tl.int32, bitcast=True) >> 23) + 8).to(tl.uint8)
        acc = tl.dot_scaled(b_w, b_scale, "e2m1", tl.trans(b_x), b_row_scale, "e2m1", acc)
    return acc * (tl.load(p_row[2]) * factor)[:, None]
