"""Triton: matrix-vector products of quantised experts, a routed token in each program, as
`triton_gemv`'s of dense weights.

Legend: T tokens, I an expert's size, H hidden size, X experts, N experts of a token, P = T * N
routed tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.products.forms.quantised import Quantised
from milepost.kernels.products.portable.activation import activate
from milepost.kernels.products.portable.gemm_step import factors, operands
from milepost.kernels.products.portable.gemv_parts import dot, load_row, load_weights
from milepost.kernels.products.portable.quantised_gemv import FEW_WEIGHTS, WEIGHTS, cut_up


def project_up(
    hidden: Tensor, experts: Tensor, up: Quantised, active: Tensor, chip: Chip, *, is_gated: bool
) -> None:
    """`active` [P, I]: what `up` [X, 2 * I, H] and SwiGLU make of the routed tokens' `hidden`
    [T, H], or `up` [X, I, H] and the square of a ReLU."""
    size, num_inputs = active.shape[1], hidden.shape[1]
    cut = cut_up(up, chip, WEIGHTS, 1 + is_gated)
    _up_kernel[(triton.cdiv(size, cut["BLOCK_N"]), experts.numel())](
        hidden,
        experts,
        *operands(up, chip),
        active,
        hidden.stride(0),
        TOP_K=experts.shape[1],
        INPUTS=num_inputs,
        SIZE=size,
        GATED=is_gated,
        **cut,
        **OVERLAPPED,
    )


@quick
@triton.jit
def _up_kernel(
    hidden,
    experts,
    up,
    scales,
    zeros,
    active,
    stride,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTHS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    PITCH: tl.constexpr = INPUTS // 2 if GROUP else INPUTS
    ROWS: tl.constexpr = 2 * SIZE if GATED else SIZE
    routed = tl.program_id(1)
    expert = tl.load(experts + routed).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Up rows stand behind the gates'.
    gate_row = o_n % SIZE
    up_row = gate_row + (ROWS - SIZE)
    row = hidden + (routed // TOP_K).to(tl.int64) * stride
    own = up + expert * (ROWS * PITCH)
    first_scale = expert * ((ROWS + SCALE_ROWS - 1) // SCALE_ROWS * DEPTHS)
    gate_scale = first_scale + gate_row // SCALE_ROWS * DEPTHS
    up_scale = first_scale + up_row // SCALE_ROWS * DEPTHS
    ZEROS: tl.constexpr = DEPTHS if GROUP > 0 else 1
    p_gate_zero = None if zeros is None else zeros + (expert * ROWS + gate_row) * ZEROS
    p_up_zero = None if zeros is None else zeros + (expert * ROWS + up_row) * ZEROS
    gates = tl.zeros([BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_N], tl.float32)
    for i_d in tl.static_range(0, INPUTS // BLOCK, BLOCK_D):
        b_up = load_weights(own + up_row * PITCH, i_d, INPUTS, BLOCK_D, BLOCK, GROUP)
        if GATED:
            b_gate = load_weights(own + gate_row * PITCH, i_d, INPUTS, BLOCK_D, BLOCK, GROUP)
        b_x, b_y, b_sum = load_row(row, i_d, INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE)
        if GATED:
            gates += dot(
                b_gate, b_x, b_y, b_sum, scales + gate_scale, p_gate_zero, i_d,
                INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE,
            )  # fmt: skip
        ups += dot(
            b_up, b_x, b_y, b_sum, scales + up_scale, p_up_zero, i_d,
            INPUTS, BLOCK_D, BLOCK, GROUP, NATIVE,
        )  # fmt: skip
    if GROUP < 0:
        gates *= factors(p_gate_zero)
        ups *= factors(p_up_zero)
    b_o = activate(ups, gates, GATED).to(active.dtype.element_ty)
    tl.store(active + routed * SIZE + o_n, b_o, mask=o_n < SIZE)


def project_down(
    active: Tensor, shares: Tensor, experts: Tensor, down: Quantised, partials: Tensor, chip: Chip
) -> None:
    """`partials` [P, H]: `shares` [P] times `active` [P, I] through `down` [X, H, I]."""
    size, num_outputs = active.shape[1], partials.shape[-1]
    cut = cut_up(down, chip, FEW_WEIGHTS)
    _down_kernel[(triton.cdiv(num_outputs, cut["BLOCK_N"]), experts.numel())](
        active,
        shares,
        experts,
        *operands(down, chip),
        partials,
        SIZE=size,
        OUTPUTS=num_outputs,
        **cut,
        **OVERLAPPED,
    )


@quick
@triton.jit
def _down_kernel(
    active,
    shares,
    experts,
    down,
    scales,
    zeros,
    partials,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTHS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    PITCH: tl.constexpr = SIZE // 2 if GROUP else SIZE
    routed = tl.program_id(1)
    expert = tl.load(experts + routed).to(tl.int64)
    share = tl.load(shares + routed).to(tl.float32)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = o_n % OUTPUTS
    p_w = down + expert * (OUTPUTS * PITCH) + column * PITCH
    own_scale = expert * ((OUTPUTS + SCALE_ROWS - 1) // SCALE_ROWS * DEPTHS)
    own_scale += column // SCALE_ROWS * DEPTHS
    ZEROS: tl.constexpr = DEPTHS if GROUP > 0 else 1
    p_zero = None if zeros is None else zeros + (expert * OUTPUTS + column) * ZEROS
    row = active + routed * SIZE
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i_d in tl.static_range(0, SIZE // BLOCK, BLOCK_D):
        b_w = load_weights(p_w, i_d, SIZE, BLOCK_D, BLOCK, GROUP)
        b_x, b_y, b_sum = load_row(row, i_d, SIZE, BLOCK_D, BLOCK, GROUP, NATIVE)
        acc += dot(
            b_w, b_x, b_y, b_sum, scales + own_scale, p_zero, i_d,
            SIZE, BLOCK_D, BLOCK, GROUP, NATIVE,
        )  # fmt: skip
    if GROUP < 0:
        acc *= factors(p_zero)
    b_o = (acc * share).to(partials.dtype.element_ty)
    tl.store(partials + routed.to(tl.int64) * OUTPUTS + o_n, b_o, mask=o_n < OUTPUTS)
