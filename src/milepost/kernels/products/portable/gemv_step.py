"""Triton: multiplies a row by raw or FP8 weights, without tensor cores; `choose` knows the
functions for other forms.

Rows are rounded on the way if the form needs that, which saves a launch.

Legend: K inputs of a step, D blocks of a step, N outputs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from milepost.kernels.platform.launches import wait_for_inputs
from milepost.kernels.platform.numerics import decode, encode, scale_of
from milepost.kernels.products.forms import Raw
from milepost.kernels.products.forms.quantised import BLOCK, FourBits, Int8, Quantised
from milepost.kernels.products.portable import four_bits_row, int8_step
from milepost.kernels.products.portable.rounding import widen
from milepost.kernels.products.portable.weights import find_both, find_row

_BLOCK = tl.constexpr(BLOCK)


def choose(weight: Raw | Quantised) -> Any:
    """Returns the device function that multiplies a row by a weight of this form."""
    if isinstance(weight, FourBits):
        return four_bits_row.multiply_row
    if isinstance(weight, Int8):
        return int8_step.multiply_row
    return multiply_raw if isinstance(weight, Raw) else multiply_fp8


@triton.jit
def multiply_raw(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Multiplies the row at `p_x` by the weights of outputs `column` [N], and of their gates if
    there are any. Returns the sums of both, [N] each. If EARLY, it waits for inputs once the first
    weights are loaded."""
    INPUTS: tl.constexpr = SHAPE.inputs
    BLOCK_K: tl.constexpr = SHAPE.block_k
    o_k = tl.arange(0, BLOCK_K)
    p_gate = find_row(weight, expert, column, SHAPE)[0][:, None] + o_k[None, :]
    # Up rows stand after the gates'.
    p_up = p_gate
    if SHAPE.is_gated:
        p_up += SHAPE.outputs * SHAPE.inputs
    ups = tl.zeros([column.shape[0], BLOCK_K], tl.float32)
    gates = ups
    for i_k in tl.static_range(0, INPUTS, BLOCK_K):
        is_input = i_k + o_k < INPUTS
        if EARLY:
            if SHAPE.is_gated:
                b_gate = tl.load(p_gate + i_k, mask=is_input[None, :], other=0.0)
            b_up = tl.load(p_up + i_k, mask=is_input[None, :], other=0.0)
            if i_k == 0:
                wait_for_inputs()
        # If nothing waits, the row comes first: experts of several steps are read faster so.
        b_x = tl.load(p_x + i_k + o_k, mask=is_input, other=0.0).to(tl.float32)[None, :]
        if not EARLY:
            if SHAPE.is_gated:
                b_gate = tl.load(p_gate + i_k, mask=is_input[None, :], other=0.0)
            b_up = tl.load(p_up + i_k, mask=is_input[None, :], other=0.0)
        if SHAPE.is_gated:
            gates += b_gate.to(tl.float32) * b_x
        ups += b_up.to(tl.float32) * b_x
    return tl.sum(ups, 1), tl.sum(gates, 1)


@triton.jit
def multiply_fp8(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Does `multiply_raw` for FP8, block by block."""
    BLOCKS: tl.constexpr = SHAPE.inputs // _BLOCK
    BLOCK_D: tl.constexpr = SHAPE.block_k // _BLOCK
    gate, up = find_both(weight, expert, column, SHAPE)
    ups = tl.zeros([column.shape[0]], tl.float32)
    gates = ups
    for i_d in tl.static_range(0, BLOCKS, BLOCK_D):
        b_up = _load_weights(up[0], i_d, SHAPE)
        if SHAPE.is_gated:
            b_gate = _load_weights(gate[0], i_d, SHAPE)
        if EARLY and i_d == 0:
            wait_for_inputs()
        b_x = _load_row(p_x, i_d, SHAPE)
        if SHAPE.is_gated:
            gates += _dot(b_gate, b_x, gate[1], i_d, SHAPE)
        ups += _dot(b_up, b_x, up[1], i_d, SHAPE)
    if not SHAPE.has_block_scales:
        gates *= tl.load(gate[1])
        ups *= tl.load(up[1])
    return ups, gates


@triton.jit
def _load_row(p_x, i_d, SHAPE: tl.constexpr):
    """Loads a row's blocks from block `i_d` on, rounded to FP8 and scaled unless weights are
    decoded: [D, BLOCK] float32."""
    o_d, o_k = i_d + tl.arange(0, SHAPE.block_k // _BLOCK), tl.arange(0, _BLOCK)
    is_input = (o_d < SHAPE.inputs // _BLOCK)[:, None]
    place = o_d[:, None] * _BLOCK + o_k[None, :]
    b_x = tl.load(p_x + place, mask=is_input, other=0.0).to(tl.float32)
    if SHAPE.is_decoded:
        return b_x * 256.0  # weights are divided by as much
    else:
        scale = scale_of(b_x, 1)
        # Times its scale here, so that numbers are widened once and not for every output.
        b_q = encode(b_x / scale[:, None], SHAPE.is_native)
        return widen(b_q, SHAPE.is_native) * scale[:, None]


@triton.jit
def _load_weights(p_w, i_d, SHAPE: tl.constexpr):
    """Loads blocks of weights [N, D, BLOCK] of rows at `p_w` [N], from block `i_d` on."""
    o_d, o_k = i_d + tl.arange(0, SHAPE.block_k // _BLOCK), tl.arange(0, _BLOCK)
    place = (o_d[:, None] * _BLOCK + o_k[None, :])[None, :, :]
    if SHAPE.inputs % SHAPE.block_k == 0:
        return tl.load(p_w[:, None, None] + place)
    else:
        is_input = (o_d < SHAPE.inputs // _BLOCK)[None, :, None]
        return tl.load(p_w[:, None, None] + place, mask=is_input, other=0.0)


@triton.jit
def _dot(b_w, b_x, p_scale, i_d, SHAPE: tl.constexpr):
    """Multiplies weights with scales at `p_scale` [N] and a row, both from block `i_d` on: [N]."""
    scale = 1.0
    if SHAPE.has_block_scales:
        o_d = i_d + tl.arange(0, SHAPE.block_k // _BLOCK)
        is_input = (o_d < SHAPE.inputs // _BLOCK)[None, :]
        scale = tl.load(p_scale[:, None] + o_d[None, :], mask=is_input, other=0.0)
    if SHAPE.is_decoded:  # noqa: SIM108
        numbers = decode(b_w, False).to(tl.float32)
    else:
        numbers = widen(b_w, SHAPE.is_native)
    return tl.sum(tl.sum(numbers * b_x[None, :, :], 2) * scale, 1)
