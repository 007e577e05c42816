"""Triton: the sums of a row times some outputs, without tensor cores, for weights of every form.

Rows are rounded on the way if the form asks for that, which needs no launch of its own. A number of
four bits stands in a float32's bits beside 128, and the surplus is subtracted from a group's sum;
numbers in e2m1 are summed up group by group.

Legend: K inputs of a step, D blocks of a step, of BLOCK inputs or of two smaller groups, N outputs,
W numbers or bytes of a block.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from milepost.kernels.platform.launches import wait_for_inputs
from milepost.kernels.platform.numerics import decode, encode, scale_of
from milepost.kernels.products.forms.matrix import Raw
from milepost.kernels.products.forms.quantised import BLOCK, Int8, Quantised
from milepost.kernels.products.portable import float4, int4, int8_step
from milepost.kernels.products.portable.gemm_step import factors
from milepost.kernels.products.portable.rounding import widen
from milepost.kernels.products.portable.weights import find_both, find_row

_BLOCK = tl.constexpr(BLOCK)


def choose(weight: Raw | Quantised) -> Any:
    """Returns the sums for a weight of this form."""
    if isinstance(weight, Int8):
        return int8_step.multiply_row
    return multiply_raw if isinstance(weight, Raw) else multiply_quantised


@triton.jit
def multiply_raw(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Multiplies the row at `p_x` by the outputs `column` [N], and by their gates if there are any:
    [N] each. If EARLY, it waits for inputs once the first weights are loaded."""
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
def multiply_quantised(p_x, weight, expert, column, SHAPE: tl.constexpr, EARLY: tl.constexpr):
    """Multiplies as `multiply_raw`, block by block."""
    BLOCKS: tl.constexpr = SHAPE.inputs // _depth(SHAPE.group)
    BLOCK_D: tl.constexpr = SHAPE.block_k // _depth(SHAPE.group)
    gate, up = find_both(weight, expert, column, SHAPE)
    ups = tl.zeros([column.shape[0]], tl.float32)
    gates = ups
    for i_d in tl.static_range(0, BLOCKS, BLOCK_D):
        b_up = _load_weights(up[0], i_d, SHAPE)
        if SHAPE.is_gated:
            b_gate = _load_weights(gate[0], i_d, SHAPE)
        if EARLY and i_d == 0:
            wait_for_inputs()
        x = _load_row(p_x, i_d, SHAPE)
        if SHAPE.is_gated:
            gates += _dot(b_gate, x, gate, i_d, SHAPE)
        ups += _dot(b_up, x, up, i_d, SHAPE)
    if SHAPE.group < 0:
        gates *= factors(gate[2])
        ups *= factors(up[2])
    elif SHAPE.group == 0 and not SHAPE.has_block_scales:
        gates *= tl.load(gate[1])
        ups *= tl.load(up[1])
    return ups, gates


@triton.constexpr_function
def _depth(group):
    """Returns the inputs of a block: those of a byte's halves have one scale each."""
    return 2 * group if 0 < group < BLOCK else BLOCK


@triton.jit
def _load_row(p_x, i_d, SHAPE: tl.constexpr):
    """Returns a row's blocks from the i_d-th on as they are multiplied, [D, W] twice: the inputs of
    bytes' low and high halves for four bits, the same blocks for FP8; and sums of both halves, or
    scales of blocks twice, [D]."""
    DEPTH: tl.constexpr = _depth(SHAPE.group)
    WIDTH: tl.constexpr = DEPTH // 2 if SHAPE.group else DEPTH
    o_d, o_k = i_d + tl.arange(0, SHAPE.block_k // DEPTH), tl.arange(0, WIDTH)
    is_input = (o_d < SHAPE.inputs // DEPTH)[:, None]
    place = o_d[:, None] * DEPTH + o_k[None, :]
    b_x = tl.load(p_x + place, mask=is_input, other=0.0).to(tl.float32)
    if SHAPE.group:
        b_y = tl.load(p_x + WIDTH + place, mask=is_input, other=0.0).to(tl.float32)
        if SHAPE.group == WIDTH:
            sums = tl.sum(b_x, 1), tl.sum(b_y, 1)
            b_sum = sums[0] + sums[1]
        else:
            b_sum = tl.sum(b_x + b_y, 1)
            sums = b_sum, b_sum
        # What depends on a sum is widened before it is spread over the outputs, not after.
        factor = float4.row_factor(SHAPE.has_ptx) if SHAPE.group < 0 else 1.0
        one = tl.where(b_sum == b_sum, factor, b_sum)[:, None]
        return b_x * one, b_y * one, sums
    elif SHAPE.is_decoded:
        b_x *= 256.0  # weights are divided by as much
        return b_x, b_x, b_x
    else:
        scale = scale_of(b_x, 1)
        # Times its scale here, so that numbers are widened once and not for every output.
        b_q = encode(b_x / scale[:, None], SHAPE.is_native)
        b_x = widen(b_q, SHAPE.is_native) * scale[:, None]
        return b_x, b_x, (scale, scale)


@triton.jit
def _load_weights(p_w, i_d, SHAPE: tl.constexpr):
    """Returns blocks of weights [N, D, W] of rows at `p_w` [N]."""
    DEPTH: tl.constexpr = _depth(SHAPE.group)
    WIDTH: tl.constexpr = DEPTH // 2 if SHAPE.group else DEPTH
    o_d, o_k = i_d + tl.arange(0, SHAPE.block_k // DEPTH), tl.arange(0, WIDTH)
    place = (o_d[:, None] * WIDTH + o_k[None, :])[None, :, :]
    if SHAPE.inputs % SHAPE.block_k == 0:
        return tl.load(p_w[:, None, None] + place)
    else:
        is_input = (o_d < SHAPE.inputs // DEPTH)[None, :, None]
        return tl.load(p_w[:, None, None] + place, mask=is_input, other=0.0)


@triton.jit
def _dot(b_w, x, p_row, i_d, SHAPE: tl.constexpr):
    """Multiplies weights of the rows `p_row` and a row `x`, both from block `i_d` on: [N]."""
    b_x, b_y, _ = x
    DEPTH: tl.constexpr = _depth(SHAPE.group)
    p_scale = p_row[1]
    o_d = i_d + tl.arange(0, SHAPE.block_k // DEPTH)
    is_input = (o_d < SHAPE.inputs // DEPTH)[None, :]
    if SHAPE.group < 0:
        return _dot_fp4(b_w, b_x, b_y, p_scale, o_d, is_input, SHAPE)
    elif SHAPE.group:
        return _dot_int4(b_w, x, p_row, o_d, is_input, SHAPE)
    else:
        scale = 1.0
        if SHAPE.has_block_scales:
            scale = tl.load(p_scale[:, None] + o_d[None, :], mask=is_input, other=0.0)
        if SHAPE.is_decoded:
            numbers = decode(b_w, False).to(tl.float32)
        else:
            numbers = widen(b_w, SHAPE.is_native)
        return tl.sum(tl.sum(numbers * b_x[None, :, :], 2) * scale, 1)


@triton.jit
def _dot_int4(b_w, x, p_row, o_d, is_input, SHAPE: tl.constexpr):
    b_x, b_y, b_sums = x
    IS_SMALL: tl.constexpr = SHAPE.group < _BLOCK
    place = 2 * o_d if IS_SMALL else o_d * _BLOCK // SHAPE.group
    scale, zero = _load_groups(p_row, place, is_input)
    if IS_SMALL:
        high_scale, high_zero = _load_groups(p_row, place + 1, is_input)
    low, high = int4.widen(b_w, SHAPE.has_ptx)
    low, high = tl.sum(low * b_x[None, :, :], 2), tl.sum(high * b_y[None, :, :], 2)
    if IS_SMALL:
        sums = (low - (zero + 128.0) * b_sums[0][None, :]) * scale
        sums += (high - (high_zero + 128.0) * b_sums[1][None, :]) * high_scale
    else:
        sums = (low + high - (zero + 128.0) * b_sums[0][None, :]) * scale
    return tl.sum(sums, 1)


@triton.jit
def _load_groups(p_row, place, is_input):
    """Loads groups' scales and zero points [N, D] in float32."""
    scale = tl.load(p_row[1][:, None] + place[None, :], mask=is_input, other=0.0).to(tl.float32)
    zero = tl.load(p_row[2][:, None] + place[None, :], mask=is_input, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def _dot_fp4(b_w, b_x, b_y, p_scale, o_d, is_input, SHAPE: tl.constexpr):
    GROUP: tl.constexpr = -SHAPE.group
    N: tl.constexpr = b_w.shape[0]
    D: tl.constexpr = b_w.shape[1]
    G: tl.constexpr = _BLOCK // (2 * GROUP)
    o_g = o_d[:, None] * (2 * G) + tl.arange(0, G)[None, :]
    p_group, is_group = p_scale[:, None, None] + o_g[None, :, :], is_input[:, :, None]
    low_scale = tl.load(p_group, mask=is_group, other=0)
    high_scale = tl.load(p_group + G, mask=is_group, other=0)
    low, high = float4.widen(b_w, SHAPE.has_ptx)
    sums = tl.sum(tl.reshape(low * b_x[None, :, :], [N, D, G, GROUP]), 3)
    sums *= float4.wide_scales(low_scale)
    other = tl.sum(tl.reshape(high * b_y[None, :, :], [N, D, G, GROUP]), 3)
    sums += other * float4.wide_scales(high_scale)
    return tl.sum(tl.sum(sums, 2), 1)
