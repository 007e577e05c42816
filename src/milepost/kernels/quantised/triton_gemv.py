"""Triton: matrix-vector products of FP8 weights with blocks of scales, dense ones and those of
experts, for so few rows that reading the weights is what costs.

Every program rounds its row on the way: it needs no launch of its own for that.

Legend: T tokens, I inputs, O outputs, N experts of a token, P = T * N routed tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.device import Chip
from milepost.kernels.moe.activation import activate
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.quantised.forms import BLOCK, Fp8
from milepost.kernels.quantised.triton_rounding import readable, scale_of, widen
from milepost.kernels.triton_float8 import encode, has_fp8

_PROGRAM = 1 << 14
"""Weights that a program reads at a time."""
_DEPTH = 2048
"""Inputs of a step."""


def _constants(weight: Fp8, chip: Chip) -> dict[str, int]:
    return {"DEPTH": BLOCK, "SCALE_ROWS": weight.rows, "NATIVE": has_fp8(chip)}


def _cut(num_inputs: int, num_matrices: int = 1) -> dict[str, int]:
    """Outputs and blocks of inputs of a step."""
    block_k = min(triton.next_power_of_2(num_inputs), _DEPTH)
    return {
        "BLOCK_N": _PROGRAM // (num_matrices * block_k),
        "BLOCK_D": block_k // BLOCK,
        "num_warps": 8,
    }


@triton.jit
def _round(
    p_x, i_d, INPUTS: tl.constexpr, BLOCK_D: tl.constexpr, DEPTH: tl.constexpr, NATIVE: tl.constexpr
):
    """Blocks of a row [BLOCK_D, DEPTH] from the i_d-th on, rounded, and their scales."""
    o_d, o_k = i_d + tl.arange(0, BLOCK_D), tl.arange(0, DEPTH)
    is_input = (o_d < INPUTS // DEPTH)[:, None]
    b_x = tl.load(p_x + o_d[:, None] * DEPTH + o_k[None, :], mask=is_input, other=0.0)
    b_x = b_x.to(tl.float32)
    scale = scale_of(b_x, 1)
    return widen(encode(b_x / scale[:, None], NATIVE), NATIVE), scale


@triton.jit
def _load(p_w, i_d, INPUTS: tl.constexpr, BLOCK_D: tl.constexpr, DEPTH: tl.constexpr):
    """Blocks of weights [N, BLOCK_D, DEPTH] of rows at `p_w` [N]."""
    o_d, o_k = i_d + tl.arange(0, BLOCK_D), tl.arange(0, DEPTH)
    place = o_d[:, None] * DEPTH + o_k[None, :]
    is_input = (o_d < INPUTS // DEPTH)[None, :, None]
    if INPUTS % (BLOCK_D * DEPTH) == 0:
        return tl.load(p_w[:, None, None] + place[None, :, :])
    else:
        return tl.load(p_w[:, None, None] + place[None, :, :], mask=is_input, other=0.0)


@triton.jit
def _dot(
    b_w,
    b_x,
    x_scale,
    p_scale,
    i_d,
    INPUTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPTH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Products [N] of weights `_load`ed and a row `_round`ed; the weights' scales are at
    `p_scale` [N]."""
    o_d = i_d + tl.arange(0, BLOCK_D)
    is_input = (o_d < INPUTS // DEPTH)[None, :]
    scale = tl.load(p_scale[:, None] + o_d[None, :], mask=is_input, other=0.0)
    sums = tl.sum(widen(b_w, NATIVE) * b_x[None, :, :], 2)
    return tl.sum(sums * (scale * x_scale[None, :]), 1)


def multiply(hidden: Tensor, weight: Fp8, bias: Tensor | None, output: Tensor, chip: Chip) -> None:
    """`output` [T, O]: `hidden` [T, I] times `weight` [O, I], plus `bias` [O]."""
    num_tokens, num_inputs = hidden.shape
    num_outputs = output.shape[1]
    cut = _cut(num_inputs)
    _dense_kernel[(triton.cdiv(num_outputs, cut["BLOCK_N"]), num_tokens)](
        hidden,
        readable(weight.values, chip),
        weight.scales,
        bias,
        output,
        hidden.stride(0),
        output.stride(0),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        **cut,
        **_constants(weight, chip),
        **OVERLAPPED,
    )


@triton.jit
def _dense_kernel(
    hidden,
    weight,
    scales,
    bias,
    output,
    stride,
    output_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    let_next_start()
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    column = o_n % OUTPUTS
    p_w = weight + column.to(tl.int64) * INPUTS
    p_scale = scales + column // SCALE_ROWS * (INPUTS // DEPTH)
    b_w = _load(p_w, 0, INPUTS, BLOCK_D, DEPTH)
    wait_for_inputs()
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i_d in tl.static_range(0, INPUTS // DEPTH, BLOCK_D):
        if i_d > 0:
            b_w = _load(p_w, i_d, INPUTS, BLOCK_D, DEPTH)
        b_x, x_scale = _round(hidden + token * stride, i_d, INPUTS, BLOCK_D, DEPTH, NATIVE)
        acc += _dot(b_w, b_x, x_scale, p_scale, i_d, INPUTS, BLOCK_D, DEPTH, NATIVE)
    is_column = o_n < OUTPUTS
    if bias is not None:
        acc += tl.load(bias + o_n, mask=is_column, other=0.0).to(tl.float32)
    b_o = acc.to(output.dtype.element_ty)
    tl.store(output + token * output_stride + o_n, b_o, mask=is_column)


def project_up(
    hidden: Tensor, experts: Tensor, up: Fp8, active: Tensor, chip: Chip, *, is_gated: bool
) -> None:
    """`active` [P, I]: what `up` [X, 2 * I, H] and SwiGLU make of the routed tokens' `hidden`
    [T, H], or `up` [X, I, H] and the square of a ReLU."""
    size, num_inputs = active.shape[1], hidden.shape[1]
    cut = _cut(num_inputs, 1 + is_gated)
    _up_kernel[(triton.cdiv(size, cut["BLOCK_N"]), experts.numel())](
        hidden,
        experts,
        readable(up.values, chip),
        up.scales,
        active,
        hidden.stride(0),
        TOP_K=experts.shape[1],
        INPUTS=num_inputs,
        SIZE=size,
        GATED=is_gated,
        **cut,
        **_constants(up, chip),
        **OVERLAPPED,
    )


@triton.jit
def _up_kernel(
    hidden,
    experts,
    up,
    scales,
    active,
    stride,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    DEPTHS: tl.constexpr = INPUTS // DEPTH
    ROWS: tl.constexpr = 2 * SIZE if GATED else SIZE
    routed = tl.program_id(1)
    expert = tl.load(experts + routed).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Up rows stand behind the gates'.
    gate_row = o_n % SIZE
    up_row = gate_row + (ROWS - SIZE)
    p_x = hidden + (routed // TOP_K).to(tl.int64) * stride
    own, own_scales = (
        up + expert * (ROWS * INPUTS),
        scales + expert * ((ROWS + SCALE_ROWS - 1) // SCALE_ROWS * DEPTHS),
    )
    p_gate_scale = own_scales + gate_row // SCALE_ROWS * DEPTHS
    p_up_scale = own_scales + up_row // SCALE_ROWS * DEPTHS
    gates = tl.zeros([BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_N], tl.float32)
    for i_d in tl.static_range(0, DEPTHS, BLOCK_D):
        b_up = _load(own + up_row * INPUTS, i_d, INPUTS, BLOCK_D, DEPTH)
        if GATED:
            b_gate = _load(own + gate_row * INPUTS, i_d, INPUTS, BLOCK_D, DEPTH)
        b_x, x_scale = _round(p_x, i_d, INPUTS, BLOCK_D, DEPTH, NATIVE)
        if GATED:
            gates += _dot(b_gate, b_x, x_scale, p_gate_scale, i_d, INPUTS, BLOCK_D, DEPTH, NATIVE)
        ups += _dot(b_up, b_x, x_scale, p_up_scale, i_d, INPUTS, BLOCK_D, DEPTH, NATIVE)
    b_o = activate(ups, gates, GATED).to(active.dtype.element_ty)
    tl.store(active + routed * SIZE + o_n, b_o, mask=o_n < SIZE)


def project_down(
    active: Tensor, shares: Tensor, experts: Tensor, down: Fp8, partials: Tensor, chip: Chip
) -> None:
    """`partials` [P, H]: `shares` [P] times `active` [P, I] through `down` [X, H, I]."""
    size, num_outputs = active.shape[1], partials.shape[-1]
    cut = _cut(size)
    _down_kernel[(triton.cdiv(num_outputs, cut["BLOCK_N"]), experts.numel())](
        active,
        shares,
        experts,
        readable(down.values, chip),
        down.scales,
        partials,
        SIZE=size,
        OUTPUTS=num_outputs,
        **cut,
        **_constants(down, chip),
        **OVERLAPPED,
    )


@triton.jit
def _down_kernel(
    active,
    shares,
    experts,
    down,
    scales,
    partials,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    let_next_start()
    wait_for_inputs()
    DEPTHS: tl.constexpr = SIZE // DEPTH
    routed = tl.program_id(1)
    expert = tl.load(experts + routed).to(tl.int64)
    share = tl.load(shares + routed).to(tl.float32)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = o_n % OUTPUTS
    p_w = down + expert * (OUTPUTS * SIZE) + column * SIZE
    p_scale = scales + expert * ((OUTPUTS + SCALE_ROWS - 1) // SCALE_ROWS * DEPTHS)
    p_scale += column // SCALE_ROWS * DEPTHS
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i_d in tl.static_range(0, DEPTHS, BLOCK_D):
        b_w = _load(p_w, i_d, SIZE, BLOCK_D, DEPTH)
        b_x, x_scale = _round(active + routed * SIZE, i_d, SIZE, BLOCK_D, DEPTH, NATIVE)
        acc += _dot(b_w, b_x, x_scale, p_scale, i_d, SIZE, BLOCK_D, DEPTH, NATIVE)
    b_o = (acc * share).to(partials.dtype.element_ty)
    tl.store(partials + routed.to(tl.int64) * OUTPUTS + o_n, b_o, mask=o_n < OUTPUTS)
