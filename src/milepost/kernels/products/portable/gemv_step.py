"""Triton: the loop of a product of one row over its inputs, for weights of every form. Rows are
rounded on the way if the form needs that, which saves a launch.

Each function multiplies the row at `p_x` by the weights of outputs `column` [N], and of their gates
if there are any, and returns the sums of both, [N] each. If EARLY, it waits for inputs once the
first weights are loaded.

Legend: K inputs of a step, D blocks of a step, N outputs of a program.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from milepost.kernels.platform.launches import wait_for_inputs
from milepost.kernels.platform.numerics import decode, encode, int8_scales, round_int8, scale_of
from milepost.kernels.products.forms import Raw
from milepost.kernels.products.forms.quantised import BLOCK, Int8, Quantised
from milepost.kernels.products.portable import four_bits, four_bits_row
from milepost.kernels.products.portable.rounding import widen
from milepost.kernels.products.portable.weights import find_both, find_row

_BLOCK = tl.constexpr(BLOCK)
_WIDTH = tl.constexpr(16)
"""Weights in int8 that a thread loads at once."""


def choose(weight: Raw | Quantised) -> Any:
    """Returns the device function that multiplies a row by a weight of this form."""
    if isinstance(weight, Raw):
        return multiply_raw
    return multiply_int8 if isinstance(weight, Int8) else multiply_quantised


@triton.jit
def multiply_raw(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Multiplies by raw weights: see the module."""
    INPUTS: tl.constexpr = SHAPE.inputs
    BLOCK_K: tl.constexpr = SHAPE.block_k
    o_k = tl.arange(0, BLOCK_K)
    p_gate = find_row(weight, expert, column, SHAPE)[0][:, None] + o_k[None, :]
    # Rows of the up projection follow those of the gate.
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
def multiply_quantised(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Multiplies by FP8 or by four-bit weights, a step at a time with its scales: see the
    module."""
    INPUTS: tl.constexpr = SHAPE.inputs
    BLOCK_K: tl.constexpr = SHAPE.block_k
    # Inputs whose weights are loaded before the row is waited for.
    AHEAD: tl.constexpr = INPUTS if SHAPE.is_ahead else BLOCK_K
    TYPE: tl.constexpr = weight.scales.dtype.element_ty
    gate, up = find_both(weight, expert, column, SHAPE)
    if SHAPE.group:
        ups = tl.zeros([four_bits_row.num_pieces(BLOCK_K), column.shape[0]], tl.float32)
    else:
        ups = tl.zeros([column.shape[0]], tl.float32)
    gates, b_ups, b_gates = ups, (), ()
    for i_k in tl.static_range(0, AHEAD, BLOCK_K):
        b_ups += (_load_weights(up, i_k, SHAPE),)
        if SHAPE.is_gated:
            b_gates += (_load_weights(gate, i_k, SHAPE),)
    if EARLY:
        wait_for_inputs()
    for i_k in tl.static_range(0, INPUTS, BLOCK_K):
        if i_k >= AHEAD:
            b_ups += (_load_weights(up, i_k, SHAPE),)
            if SHAPE.is_gated:
                b_gates += (_load_weights(gate, i_k, SHAPE),)
        x = _load_row(p_x, i_k, SHAPE)
        if SHAPE.is_gated:
            gates += _dot(b_gates[i_k // BLOCK_K], x, gate, i_k, TYPE, SHAPE)
        ups += _dot(b_ups[i_k // BLOCK_K], x, up, i_k, TYPE, SHAPE)
    if SHAPE.group:
        ups, gates = tl.sum(ups, 0), tl.sum(gates, 0)
    if SHAPE.group < 0:
        gates *= four_bits.factors(gate[2])
        ups *= four_bits.factors(up[2])
    elif SHAPE.group == 0 and not SHAPE.has_block_scales:
        gates *= tl.load(gate[1])
        ups *= tl.load(up[1])
    return ups, gates


@triton.jit
def _load_weights(p_row, i_k, SHAPE: tl.constexpr):
    """Loads a step of weights: blocks [N, D, BLOCK] of FP8, or pieces of four bits with their
    scales."""
    if SHAPE.group:
        return four_bits_row.load_weights(p_row, i_k, SHAPE)
    else:
        place, is_block = _blocks(i_k, SHAPE)
        p_w = p_row[0][:, None, None] + place[None, :, :]
        if SHAPE.inputs % SHAPE.block_k == 0:
            return tl.load(p_w)
        else:
            return tl.load(p_w, mask=is_block[None, :, None], other=0.0)


@triton.jit
def _load_row(p_x, i_k, SHAPE: tl.constexpr):
    """Loads a step of a row: blocks [D, BLOCK] float32, rounded to FP8 and scaled unless weights
    are decoded; or pieces for four bits."""
    if SHAPE.group:
        return four_bits_row.load_row(p_x, i_k, SHAPE)
    else:
        place, is_block = _blocks(i_k, SHAPE)
        b_x = tl.load(p_x + place, mask=is_block[:, None], other=0.0).to(tl.float32)
        if SHAPE.is_decoded:
            return b_x * 256.0  # weights are divided by as much
        else:
            scale = scale_of(b_x, 1)
            # Times its scale here, so that numbers are widened once and not for every output.
            b_q = encode(b_x / scale[:, None], SHAPE.is_native)
            return widen(b_q, SHAPE.is_native) * scale[:, None]


@triton.jit
def _dot(weights, x, p_row, i_k, TYPE: tl.constexpr, SHAPE: tl.constexpr):
    """Multiplies a step of weights by that of a row. Returns [N], or sums of pieces [P, N] of four
    bits, whose scales have the type TYPE."""
    if SHAPE.group:
        return four_bits_row.dot(weights, x, TYPE, SHAPE)
    else:
        scale = 1.0
        if SHAPE.has_block_scales:
            o_d = i_k // _BLOCK + tl.arange(0, SHAPE.block_k // _BLOCK)
            is_block = (o_d < SHAPE.inputs // _BLOCK)[None, :]
            scale = tl.load(p_row[1][:, None] + o_d[None, :], mask=is_block, other=0.0)
        if SHAPE.is_decoded:
            numbers = decode(weights, False).to(tl.float32)
        else:
            numbers = widen(weights, SHAPE.is_native)
        return tl.sum(tl.sum(numbers * x[None, :, :], 2) * scale, 1)


@triton.jit
def _blocks(i_k, SHAPE: tl.constexpr):
    """Returns a step's inputs [D, BLOCK], and which of its blocks [D] exist."""
    o_d = i_k // _BLOCK + tl.arange(0, SHAPE.block_k // _BLOCK)
    return o_d[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :], o_d < SHAPE.inputs // _BLOCK


@triton.jit
def multiply_int8(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Multiplies by int8: see the module. The row is read twice, for its largest number and to be
    rounded."""
    INPUTS: tl.constexpr = SHAPE.inputs
    BLOCK_K: tl.constexpr = SHAPE.block_k
    PARTS: tl.constexpr = SHAPE.block_k // _WIDTH
    # A thread adds up the numbers that it loads at once.
    o_k = tl.arange(0, PARTS)[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
    gate, up = find_both(weight, expert, column, SHAPE)
    b_up = _load_int8(up[0], 0, o_k, SHAPE)
    if EARLY:
        wait_for_inputs()
    b_gate = b_up
    if SHAPE.is_gated:
        b_gate = _load_int8(gate[0], 0, o_k, SHAPE)
    largest = tl.zeros([PARTS, _WIDTH], tl.float32)
    for i_k in tl.static_range(0, INPUTS, BLOCK_K):
        largest = tl.maximum(largest, tl.abs(_load_wide(p_x, i_k, o_k, SHAPE)))
    scale, factor = int8_scales(tl.max(tl.max(largest, 1), 0))
    ups = tl.zeros([column.shape[0], PARTS], tl.int32)
    gates = ups
    # Weights are loaded a step ahead. Were the loop unrolled, long rows would need more registers
    # than there are.
    for i_k in range(0, INPUTS, BLOCK_K):
        b_x = round_int8(_load_wide(p_x, i_k, o_k, SHAPE) * factor).to(tl.int32)[None, :, :]
        next_up = _load_int8(up[0], i_k + BLOCK_K, o_k, SHAPE)
        if SHAPE.is_gated:
            next_gate = _load_int8(gate[0], i_k + BLOCK_K, o_k, SHAPE)
            gates += tl.sum(b_gate.to(tl.int32) * b_x, 2)
            b_gate = next_gate
        ups += tl.sum(b_up.to(tl.int32) * b_x, 2)
        b_up = next_up
    return _scaled(ups, up, scale), _scaled(gates, gate, scale)


@triton.jit
def _load_wide(p_x, i_k, o_k, SHAPE: tl.constexpr):
    """Loads a row's inputs from i_k on, in float32."""
    return tl.load(p_x + i_k + o_k, mask=i_k + o_k < SHAPE.inputs, other=0.0).to(tl.float32)


@triton.jit
def _load_int8(p_w, i_k, o_k, SHAPE: tl.constexpr):
    """Loads weights [N, *K] of rows at `p_w` [N] from input i_k on; none past the last input."""
    is_input = (i_k + o_k < SHAPE.inputs)[None, :, :]
    return tl.load(p_w[:, None, None] + (i_k + o_k)[None, :, :], mask=is_input, other=0)


@triton.jit
def _scaled(sums, p_row, row_scale):
    """Adds up sums [N, parts of K] and multiplies them by both scales."""
    return tl.sum(sums, 1).to(tl.float32) * (tl.load(p_row[1]) * row_scale)
