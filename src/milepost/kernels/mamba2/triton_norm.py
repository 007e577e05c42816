"""Mamba2's grouped gated norm.

Legend: T tokens, I entries of a token, W = I / groups entries of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.platform.launches import wait_for_inputs
from milepost.kernels.recurrent.rules.mamba2 import gate_first, norm_first


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
    if BEFORE_GATE:
        b_y = norm_first(b_y, b_weight, b_gate, eps, W)
    else:
        b_y = gate_first(b_y, b_weight, b_gate, eps, W)
    in_output = (token < num_tokens)[:, None] & is_column[None, :]
    p_output = output + row * (GROUPS * W) + at
    tl.store(p_output, tl.where(is_real, b_y, 0).to(output.dtype.element_ty), in_output)
