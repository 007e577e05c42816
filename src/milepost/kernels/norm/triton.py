"""Norms and activations on a GPU: `reference`'s functions, each in one launch.

Legend: T tokens, H hidden size, O outputs, P parts, I size of a feed-forward layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.layout.emit import (
    Emit,
    Inputs,
    as_arguments,
    handed_on,
    keeps_values,
    room_for,
)
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import add_parts, encode, norm_row, scale_of
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import (
    BLOCK,
    cdiv,
    check_contiguous,
    check_rows,
    next_power_of_2,
    parts_of,
)

_WEIGHTS = 8192
"""Weights per program of `add_norm_and_multiply`."""
_MANY = 512
"""Above this many rows memory is the limit, and a thread loads 16 bytes at a time. With fewer rows
or many parts more threads are faster."""


def add_norm(
    hidden: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    eps: float,
    multiplier: float = 1.0,
    *,
    delta_scale: Tensor | None = None,
    emit: Emit = Emit.VALUES,
    order: SumOrder = SumOrder.FREE,
) -> tuple[Tensor, Inputs]:
    """See `reference.add_norm`; rows of `hidden` and `delta` may be strided, and sums are float32.
    The number of threads per row is the same for any number of rows if the `order` is FIXED, and
    that for many rows if it is LIKE_MANY."""
    check_rows(hidden=hidden, delta=delta, scale=scale, delta_scale=delta_scale)
    num_tokens, size = hidden.shape
    fp8 = room_for(num_tokens, size, hidden, emit, order=order)
    normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    total = hidden if delta is None else torch.empty_like(normed)
    num_parts, *strides = parts_of(delta)
    columns = next_power_of_2(size)
    is_like_many = order is SumOrder.LIKE_MANY or (num_tokens > _MANY and not order.is_fixed)
    of_thread = 8 if is_like_many and num_parts <= 1 else 4
    _add_norm_kernel[(num_tokens,)](
        hidden,
        delta,
        scale,
        delta_scale,
        total,
        normed if keeps_values(fp8) else None,
        *as_arguments(fp8),
        hidden.stride(0),
        *strides,
        eps,
        SIZE=size,
        COLUMNS=columns,
        PARTS=num_parts,
        MULTIPLIER=multiplier,
        DEPTH=BLOCK,
        NATIVE=probe(hidden.device).has_fp8,
        num_warps=min(32, max(1, columns // (32 * of_thread))),
        **OVERLAPPED,
    )
    return total, handed_on(normed, fp8)


@quick
@triton.jit(do_not_specialize=["scales_stride"])
def _add_norm_kernel(
    hidden,
    delta,
    scale,
    delta_scale,
    total,
    normed,
    values,
    scales,
    scales_stride,
    hidden_stride,
    delta_stride,
    part_stride,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    DEPTH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, COLUMNS)
    is_h = o_h < SIZE
    b_scale = tl.load(scale + o_h, mask=is_h, other=0.0).to(tl.float32)
    b_delta_scale = None
    if delta_scale is not None:
        b_delta_scale = tl.load(delta_scale + o_h, mask=is_h, other=0.0).to(tl.float32)
    wait_for_inputs()
    p_delta = None if delta is None else delta + i_t * delta_stride
    b_x, b_o = sum_and_norm(
        hidden + i_t * hidden_stride, p_delta, b_scale, b_delta_scale, o_h, is_h, part_stride, eps,
        SIZE, PARTS, MULTIPLIER, hidden.dtype.element_ty,
    )  # fmt: skip
    if PARTS:
        tl.store(total + i_t * SIZE + o_h, b_x, mask=is_h)
    if normed is not None:
        tl.store(normed + i_t * SIZE + o_h, b_o, mask=is_h)
    if values is not None:
        b_x = tl.reshape(b_o.to(tl.float32), (COLUMNS // DEPTH, DEPTH))
        b_largest = scale_of(b_x, 1)
        b_q = tl.reshape(encode(b_x / b_largest[:, None], NATIVE), (COLUMNS,))
        tl.store(values + i_t * SIZE + o_h, b_q, mask=is_h)
        o_d = tl.arange(0, COLUMNS // DEPTH)
        tl.store(scales + o_d * scales_stride + i_t, b_largest, mask=o_d * DEPTH < SIZE)


@triton.jit
def sum_and_norm(
    p_hidden,
    p_delta,
    b_scale,
    b_delta_scale,
    o_h,
    is_h,
    part_stride,
    eps,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    element: tl.constexpr,
):
    """Returns a row plus its delta, which is normed first if `b_delta_scale` is given, and the norm
    of the sum, both rounded as they are stored."""
    b_x = tl.load(p_hidden + o_h, mask=is_h, other=0.0)
    if PARTS:
        b_delta = add_parts(p_delta + o_h, part_stride, is_h, PARTS)
        if b_delta_scale is not None:
            b_delta = b_delta.to(p_delta.dtype.element_ty)
            b_delta = norm_row(b_delta, b_delta_scale, eps, SIZE).to(tl.float32)
        if MULTIPLIER != 1:
            b_delta *= MULTIPLIER
        # The norm is of the sum as the next layer reads it, rounded.
        b_x = (b_x.to(tl.float32) + b_delta).to(element)
    return b_x, norm_row(b_x, b_scale, eps, SIZE)


def add_norm_and_multiply(
    hidden: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    eps: float,
    multiplier: float,
    weight: Tensor,
    output: Tensor,
) -> tuple[Tensor, Tensor]:
    """Does `add_norm` of `hidden` [1, H], and writes the norm times `weight` [O, H] to `output` [1,
    O]. Each program norms the row again, which costs less than another launch."""
    check_rows(hidden=hidden, delta=delta, scale=scale)
    check_contiguous(weight=weight)
    size, num_outputs = hidden.shape[1], len(weight)
    normed = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    total = hidden if delta is None else torch.empty_like(normed)
    num_parts, _, part_stride = parts_of(delta)
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
        part_stride,
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
        hidden, delta, b_scale, None, o_h, is_h, part_stride, eps,
        SIZE, PARTS, MULTIPLIER, normed.dtype.element_ty,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        if PARTS:
            tl.store(total + o_h, b_x, mask=is_h)
        tl.store(normed + o_h, b_o, mask=is_h)
    b_y = tl.sum(b_w.to(tl.float32) * b_o.to(tl.float32)[None, :], 1)
    tl.store(output + o_n, b_y.to(output.dtype.element_ty), mask=o_n < OUTPUTS)
