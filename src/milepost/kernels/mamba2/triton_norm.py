"""Mamba2's grouped gated norm.

Legend: T tokens, I entries of a token, W = I / groups entries of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.activations import silu
from milepost.kernels.overlap import wait_for_inputs


@triton.jit
def gated_norm(
    y,
    gate,
    weight,
    eps,
    BEFORE_GATE: tl.constexpr,
    W: tl.constexpr,
    AXIS: tl.constexpr,
    squares=None,
):
    """`y` times SiLU of `gate`, normed over AXIS (W entries, zeros beyond) behind that or before
    it, by the sum of its `squares` if that is known; without a `weight` not normed. float32."""
    gate = silu(gate.to(tl.float32))
    # In one piece: Triton compiles no function that returns from within a branch, and goes on.
    if weight is None:
        y *= gate
    elif BEFORE_GATE:
        y *= _rms_scale(y, squares, eps, W, AXIS) * weight
        y *= gate
    else:
        y *= gate
        y *= _rms_scale(y, squares, eps, W, AXIS) * weight
    return y


@triton.jit
def _rms_scale(y, squares, eps, W: tl.constexpr, AXIS: tl.constexpr):
    if squares is None:
        squares = tl.sum(y * y, AXIS, keep_dims=True)
    return tl.rsqrt(squares / W + eps)


@triton.jit
def finish_group(
    y,
    gate,
    output,
    weight,
    eps,
    group,
    BEFORE_GATE: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    squares=None,
):
    """Gate and norm what all programs of a group have read of a token. `squares` as in
    `gated_norm`."""
    column = tl.arange(0, BLOCK)
    o_w, is_w = group * W + column, column < W
    b_w = None
    if weight is not None:
        b_w = tl.load(weight + o_w, is_w, 0)
    b_gate = tl.load(gate + o_w, is_w, 0)
    b_y = tl.load(y + o_w, is_w, 0)
    b_y = gated_norm(b_y, b_gate, b_w, eps, BEFORE_GATE, W, 0, squares)
    tl.store(output + o_w, b_y.to(output.dtype.element_ty), is_w)


@triton.jit
def norm(
    y,
    projected,
    projected_stride,
    num_tokens,
    sequence_begin,
    num_sequences,
    weight,
    eps,
    output,
    GROUPS: tl.constexpr,
    W: tl.constexpr,
    BEFORE_GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A group of ROWS tokens: `y` [T, I], gated and normed, to `output` [T, I]; zeros for tokens
    that no sequence has."""
    i_group = tl.program_id(0)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_column = column < W
    b_weight = None
    if weight is not None:
        b_weight = tl.load(weight + i_group * W + column, is_column, 0)[None, :]
    begin, end = tl.load(sequence_begin), tl.load(sequence_begin + num_sequences)
    wait_for_inputs()
    is_real = ((token >= begin) & (token < end))[:, None] & is_column[None, :]
    at = i_group * W + column[None, :]
    row = token.to(tl.int64)[:, None]
    b_y = tl.load(y + row * (GROUPS * W) + at, is_real, 0).to(tl.float32)
    b_gate = tl.load(projected + row * projected_stride + at, is_real, 0)
    b_y = gated_norm(b_y, b_gate, b_weight, eps, BEFORE_GATE, W, 1)
    in_output = (token < num_tokens)[:, None] & is_column[None, :]
    p_output = output + row * (GROUPS * W) + at
    tl.store(p_output, tl.where(is_real, b_y, 0).to(output.dtype.element_ty), in_output)
