"""Triton: the experts' matrix-vector products, for so few tokens that hardly two share an expert.

Every routed token reads its expert's matrices by itself: nothing has to be grouped first.

Legend: T tokens, N experts of a token, P = T * N routed tokens, H hidden size, I an expert's size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.products.portable.activation import activate, is_gated


def project_up(
    hidden: Tensor,
    experts: Tensor,
    up: Tensor,
    active: Tensor,
    *,
    block_n: int,
    block_k: int,
    num_warps: int,
) -> None:
    """`active` [P, I]: the routed tokens' `hidden` [T, H] through `up` [X, 2 * I, H] and SwiGLU, or
    through `up` [X, I, H] and the square of a ReLU."""
    size = active.shape[1]
    _up_kernel[(triton.cdiv(size, block_n), experts.numel())](
        hidden,
        experts,
        up,
        active,
        hidden.stride(0),
        TOP_K=experts.shape[1],
        INPUTS=hidden.shape[1],
        SIZE=size,
        GATED=is_gated(up, size),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        **OVERLAPPED,
    )


@quick
@triton.jit
def _up_kernel(
    hidden,
    experts,
    up,
    active,
    stride,
    TOP_K: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    routed = tl.program_id(1)
    expert = tl.load(experts + routed).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    p_x = hidden + (routed // TOP_K).to(tl.int64) * stride + o_k
    ROWS: tl.constexpr = 2 * SIZE if GATED else SIZE
    # Up rows stand behind the gates'.
    p_gate = up + expert * (ROWS * INPUTS) + (o_n % SIZE)[:, None] * INPUTS + o_k[None, :]
    p_up = p_gate + (ROWS - SIZE) * INPUTS
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i_k in tl.static_range(0, INPUTS, BLOCK_K):
        is_input = i_k + o_k < INPUTS
        b_x = tl.load(p_x + i_k, mask=is_input, other=0.0).to(tl.float32)[None, :]
        if GATED:
            b_gate = tl.load(p_gate + i_k, mask=is_input[None, :], other=0.0)
            gates += b_gate.to(tl.float32) * b_x
        b_up = tl.load(p_up + i_k, mask=is_input[None, :], other=0.0)
        ups += b_up.to(tl.float32) * b_x
    b_o = activate(tl.sum(ups, 1), tl.sum(gates, 1), GATED).to(active.dtype.element_ty)
    tl.store(active + routed * SIZE + o_n, b_o, mask=o_n < SIZE)


def project_down(
    active: Tensor,
    weights: Tensor,
    experts: Tensor,
    down: Tensor,
    partials: Tensor,
    *,
    block_n: int,
    block_k: int,
    num_warps: int,
) -> None:
    """`partials` [P, H]: `weights` [P] times `active` [P, I] through `down` [X, H, I]."""
    num_outputs, size = down.shape[1:]
    _down_kernel[(triton.cdiv(num_outputs, block_n), experts.numel())](
        active,
        weights,
        experts,
        down,
        partials,
        SIZE=size,
        OUTPUTS=num_outputs,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        **OVERLAPPED,
    )


@quick
@triton.jit
def _down_kernel(
    active,
    weights,
    experts,
    down,
    partials,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    launch_dependents()
    wait_for_inputs()
    routed = tl.program_id(1)
    expert = tl.load(experts + routed).to(tl.int64)
    weight = tl.load(weights + routed).to(tl.float32)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    p_w = down + expert * (OUTPUTS * SIZE) + (o_n % OUTPUTS)[:, None] * SIZE + o_k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i_k in tl.static_range(0, SIZE, BLOCK_K):
        is_input = i_k + o_k < SIZE
        b_x = tl.load(active + routed * SIZE + i_k + o_k, mask=is_input, other=0.0)
        b_w = tl.load(p_w + i_k, mask=is_input[None, :], other=0.0)
        acc += b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
    b_o = (tl.sum(acc, 1) * weight).to(partials.dtype.element_ty)
    tl.store(partials + routed.to(tl.int64) * OUTPUTS + o_n, b_o, mask=o_n < OUTPUTS)
