"""A norm and a small product of the row that it makes, in one launch: every program norms the row
again, which costs less than to wait for another launch.

Legend: H hidden size, P parts, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.norm.triton import sum_and_norm
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import check_contiguous, check_rows
from milepost.kernels.platform.tiles import cdiv, next_power_of_2

_MOST_INPUTS, _MOST_OUTPUTS = 4096, 512
"""Of a product that takes no longer than the norm."""
_WEIGHTS = 8192
"""That a program reads."""


def suits(hidden: Tensor, weight: Tensor) -> bool:
    """Whether it is one row, and few weights of its type."""
    is_small = weight.shape[1] <= _MOST_INPUTS and weight.shape[0] <= _MOST_OUTPUTS
    is_row = len(hidden) == 1 and hidden.element_size() == 2
    return is_row and is_small and hidden.dtype == weight.dtype


def add_norm_and_multiply(
    hidden: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    eps: float,
    multiplier: float,
    weight: Tensor,
    output: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `triton.add_norm` of `hidden` [1, H]; `output` [1, O] becomes what `weight` [O, H] makes
    of the norm."""
    check_rows(hidden=hidden, delta=delta, scale=scale)
    check_contiguous(weight=weight)
    size, num_outputs = hidden.shape[1], len(weight)
    normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    total = hidden if delta is None else torch.empty_like(normed)
    num_parts = 0 if delta is None else 1 if delta.dim() == 2 else delta.shape[1]
    columns = next_power_of_2(size)
    block_n = max(1, _WEIGHTS // columns)
    _norm_gemv_kernel[(cdiv(num_outputs, block_n),)](
        hidden,
        delta,
        scale,
        weight,
        total,
        normed,
        output,
        delta.stride(1) if num_parts > 1 else 0,
        eps,
        SIZE=size,
        COLUMNS=columns,
        PARTS=num_parts,
        MULTIPLIER=multiplier,
        OUTPUTS=num_outputs,
        BLOCK_N=block_n,
        num_warps=8,
        **OVERLAPPED,
    )
    return total, normed


@quick
@triton.jit
def _norm_gemv_kernel(
    hidden,
    delta,
    scale,
    weight,
    total,
    normed,
    output,
    part_stride,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    launch_dependents()
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_h = tl.arange(0, COLUMNS)
    is_h = o_h < SIZE
    p_w = weight + (o_n % OUTPUTS)[:, None] * SIZE + o_h[None, :]
    b_w = tl.load(p_w, mask=is_h[None, :], other=0.0)
    b_scale = tl.load(scale + o_h, mask=is_h, other=0.0).to(tl.float32)
    wait_for_inputs()
    b_x, b_o = sum_and_norm(
        hidden, delta, b_scale, o_h, is_h, part_stride, eps,
        SIZE, PARTS, MULTIPLIER, normed.dtype.element_ty,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        if PARTS:
            tl.store(total + o_h, b_x, mask=is_h)
        tl.store(normed + o_h, b_o, mask=is_h)
    b_y = tl.sum(b_w.to(tl.float32) * b_o.to(tl.float32)[None, :], 1)
    tl.store(output + o_n, b_y.to(output.dtype.element_ty), mask=o_n < OUTPUTS)
