"""Triton: multiplies rows rounded to int8 by int8 weights. Sums are integers, so their order
changes no bit.

Legend: K inputs of a step, M rows, N outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.platform.launches import wait_for_inputs
from milepost.kernels.platform.numerics import int8_scales, round_int8
from milepost.kernels.products.portable.weights import find_both

_WIDTH = tl.constexpr(16)
"""Weights that a thread loads at once."""


@triton.jit
def add(acc, x, p_w, i_k, SHAPE: tl.constexpr):
    """Adds the product of weights at `p_w` [N, K] and rows from input i_k on to acc [N, M] int32.
    `x` has pointers to the rows [M, K] and the scale of all activations, by which rows are rounded
    on the way unless they are already."""
    p_x, row_scale, _ = x
    b_x = tl.load(p_x + i_k)
    if not SHAPE.is_rounded:
        b_x = round_int8(b_x.to(tl.float32) / row_scale)
    return tl.dot(tl.load(p_w), tl.trans(b_x), acc, out_dtype=tl.int32)


@triton.jit
def multiply_row(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Multiplies the row at `p_x` by the weights of outputs `column` [N], and of their gates if
    there are any. Returns the sums of both, [N] each. The row is read twice, for its largest number
    and to be rounded. If EARLY, it waits for inputs once the first weights are loaded."""
    INPUTS: tl.constexpr = SHAPE.inputs
    BLOCK_K: tl.constexpr = SHAPE.block_k
    PARTS: tl.constexpr = SHAPE.block_k // _WIDTH
    # A thread adds up the numbers that it loads at once.
    o_k = tl.arange(0, PARTS)[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
    gate, up = find_both(weight, expert, column, SHAPE)
    b_up = _load(up[0], 0, o_k, SHAPE)
    if EARLY:
        wait_for_inputs()
    b_gate = b_up
    if SHAPE.is_gated:
        b_gate = _load(gate[0], 0, o_k, SHAPE)
    largest = tl.zeros([PARTS, _WIDTH], tl.float32)
    for i_k in tl.static_range(0, INPUTS, BLOCK_K):
        largest = tl.maximum(largest, tl.abs(_load_row(p_x, i_k, o_k, SHAPE)))
    scale, factor = int8_scales(tl.max(tl.max(largest, 1), 0))
    ups = tl.zeros([column.shape[0], PARTS], tl.int32)
    gates = ups
    # Weights are loaded a step ahead. Were the loop unrolled, long rows would need more registers
    # than there are.
    for i_k in range(0, INPUTS, BLOCK_K):
        b_x = round_int8(_load_row(p_x, i_k, o_k, SHAPE) * factor).to(tl.int32)[None, :, :]
        next_up = _load(up[0], i_k + BLOCK_K, o_k, SHAPE)
        if SHAPE.is_gated:
            next_gate = _load(gate[0], i_k + BLOCK_K, o_k, SHAPE)
            gates += tl.sum(b_gate.to(tl.int32) * b_x, 2)
            b_gate = next_gate
        ups += tl.sum(b_up.to(tl.int32) * b_x, 2)
        b_up = next_up
    return _scaled(ups, up, scale), _scaled(gates, gate, scale)


@triton.jit
def _load_row(p_x, i_k, o_k, SHAPE: tl.constexpr):
    """Loads a row's inputs from i_k on, in float32."""
    return tl.load(p_x + i_k + o_k, mask=i_k + o_k < SHAPE.inputs, other=0.0).to(tl.float32)


@triton.jit
def _load(p_w, i_k, o_k, SHAPE: tl.constexpr):
    """Loads weights [N, *K] of rows at `p_w` [N] from input i_k on; none past the last input."""
    is_input = (i_k + o_k < SHAPE.inputs)[None, :, :]
    return tl.load(p_w[:, None, None] + (i_k + o_k)[None, :, :], mask=is_input, other=0)


@triton.jit
def _scaled(sums, p_row, row_scale):
    """Adds up sums [N, parts of K] and multiplies them by both scales."""
    return tl.sum(sums, 1).to(tl.float32) * (tl.load(p_row[1]) * row_scale)
