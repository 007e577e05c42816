"""Norms and activations on a GPU: `reference`'s functions, each in one launch.

Legend: T tokens, H hidden size, P parts, I size of a feed-forward layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.launches import quick
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.strides import check_rows
from milepost.kernels.tiles import cdiv, next_power_of_2

_COLUMNS = 1024


def add_norm(
    hidden: Tensor, delta: Tensor | None, scale: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """As `reference.add_norm`; rows of `hidden` and `delta` may lie apart. Sums are float32."""
    check_rows(hidden=hidden, delta=delta, scale=scale)
    num_tokens, size = hidden.shape
    normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    total = hidden if delta is None else torch.empty_like(normed)
    if delta is None:
        num_parts, strides = 0, (0, 0)
    elif delta.dim() == 2:
        num_parts, strides = 1, (delta.stride(0), 0)
    else:
        num_parts, strides = delta.shape[1], delta.stride()[:2]
    columns = next_power_of_2(size)
    _add_norm_kernel[(num_tokens,)](
        hidden,
        delta,
        scale,
        total,
        normed,
        hidden.stride(0),
        *strides,
        eps,
        SIZE=size,
        COLUMNS=columns,
        PARTS=num_parts,
        MULTIPLIER=multiplier,
        num_warps=min(32, max(1, columns // 128)),
        **OVERLAPPED,
    )
    return total, normed


@quick
@triton.jit
def _add_norm_kernel(
    hidden,
    delta,
    scale,
    total,
    normed,
    hidden_stride,
    delta_stride,
    part_stride,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
):
    let_next_start()
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, COLUMNS)
    is_h = o_h < SIZE
    b_scale = tl.load(scale + o_h, mask=is_h, other=0.0).to(tl.float32)
    wait_for_inputs()
    element = normed.dtype.element_ty
    b_x = tl.load(hidden + i_t * hidden_stride + o_h, mask=is_h, other=0.0)
    if PARTS:
        b_delta = tl.zeros([COLUMNS], tl.float32)
        for part in tl.static_range(PARTS):
            p_delta = delta + i_t * delta_stride + part * part_stride + o_h
            b_delta += tl.load(p_delta, mask=is_h, other=0.0).to(tl.float32)
        if MULTIPLIER != 1:
            b_delta *= MULTIPLIER
        # What the next layer reads is what is normed, so the sum is rounded first.
        b_x = (b_x.to(tl.float32) + b_delta).to(element)
        tl.store(total + i_t * SIZE + o_h, b_x, mask=is_h)
    b_wide = b_x.to(tl.float32)
    mean = tl.sum(b_wide * b_wide) / SIZE
    b_o = b_wide * tl.rsqrt(mean + eps) * b_scale
    tl.store(normed + i_t * SIZE + o_h, b_o.to(element), mask=is_h)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `reference.silu_mul`; rows of `gate_up` may lie apart. Computed in float32."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    return _activate(gate_up, output, is_gated=True)


def relu_squared(hidden: Tensor) -> Tensor:
    """As `reference.relu_squared`; rows of `hidden` may lie apart. Computed in float32."""
    return _activate(hidden, hidden.new_empty(hidden.shape), is_gated=False)


def _activate(inputs: Tensor, output: Tensor, *, is_gated: bool) -> Tensor:
    num_tokens, size = output.shape
    _activate_kernel[(num_tokens, cdiv(size, _COLUMNS))](
        inputs,
        output,
        inputs.stride(0),
        SIZE=size,
        COLUMNS=_COLUMNS,
        GATED=is_gated,
        num_warps=4,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit
def _activate_kernel(
    inputs, output, stride, SIZE: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr
):
    let_next_start()
    wait_for_inputs()
    i_t = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_i = o_i < SIZE
    p_x = inputs + i_t * stride + o_i
    b_x = tl.load(p_x, mask=is_i, other=0.0).to(tl.float32)
    if GATED:
        b_up = tl.load(p_x + SIZE, mask=is_i, other=0.0).to(tl.float32)
        b_x = b_x * tl.sigmoid(b_x) * b_up
    else:
        b_x = tl.maximum(b_x, 0.0)
        b_x *= b_x
    tl.store(output + i_t * SIZE + o_i, b_x.to(output.dtype.element_ty), mask=is_i)
