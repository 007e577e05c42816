"""Norms and activations on a GPU: `reference`'s functions, each in one launch.

Legend: T tokens, H hidden size, P parts, I size of a feed-forward layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.strides import check_rows

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
    columns = triton.next_power_of_2(size)
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
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_column = column < SIZE
    scales = tl.load(scale + column, mask=is_column, other=0.0).to(tl.float32)
    wait_for_inputs()
    element = normed.dtype.element_ty
    x = tl.load(hidden + token * hidden_stride + column, mask=is_column, other=0.0)
    if PARTS:
        added = tl.zeros([COLUMNS], tl.float32)
        for part in tl.static_range(PARTS):
            source = delta + token * delta_stride + part * part_stride + column
            added += tl.load(source, mask=is_column, other=0.0).to(tl.float32)
        if MULTIPLIER != 1:
            added *= MULTIPLIER
        # What the next layer reads is what is normed, so the sum is rounded first.
        x = (x.to(tl.float32) + added).to(element)
        tl.store(total + token * SIZE + column, x, mask=is_column)
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide) / SIZE
    result = wide * tl.rsqrt(mean + eps) * scales
    tl.store(normed + token * SIZE + column, result.to(element), mask=is_column)


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
    _activate_kernel[(num_tokens, triton.cdiv(size, _COLUMNS))](
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


@triton.jit
def _activate_kernel(
    inputs, output, stride, SIZE: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr
):
    let_next_start()
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < SIZE
    source = inputs + token * stride + column
    result = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(source + SIZE, mask=is_column, other=0.0).to(tl.float32)
        result = result * tl.sigmoid(result) * up
    else:
        result = tl.maximum(result, 0.0)
        result *= result
    tl.store(output + token * SIZE + column, result.to(output.dtype.element_ty), mask=is_column)
