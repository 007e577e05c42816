"""Triton: hyper-connections, each of the definitions in one launch. Sums are float32.

Legend: T tokens, S streams, C hidden size, P split-K partials.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import add_parts, norm_row, sigmoid
from milepost.kernels.platform.tensors import check_rows
from milepost.kernels.platform.tiles import cdiv, next_power_of_2

_BLOCK = 1024


def norm(streams: Tensor, scale: Tensor, eps: float) -> Tensor:
    """See `hyper.norm`; streams may be one tensor that is expanded."""
    check_rows(scale=scale)
    num_tokens, num_streams, size = streams.shape
    assert streams.stride(2) == 1, "a stream is contiguous"
    columns = next_power_of_2(size)
    normed = torch.empty_like(streams, memory_format=torch.contiguous_format)
    _norm_kernel[(num_tokens, num_streams)](
        streams,
        scale,
        normed,
        *streams.stride()[:2],
        eps,
        SIZE=size,
        COLUMNS=columns,
        num_warps=min(16, max(1, columns // 128)),
        **OVERLAPPED,
    )
    return normed


@quick
@triton.jit
def _norm_kernel(
    streams, scale, normed, stride, stream_stride, eps, SIZE: tl.constexpr, COLUMNS: tl.constexpr
):
    launch_dependents()
    i_t, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c = tl.arange(0, COLUMNS)
    is_c = o_c < SIZE
    b_scale = tl.load(scale + i_s * SIZE + o_c, is_c, 0.0).to(tl.float32)
    wait_for_inputs()
    b_x = tl.load(streams + i_t * stride + i_s * stream_stride + o_c, is_c, 0.0)
    at = (i_t * tl.num_programs(1) + i_s) * SIZE + o_c
    tl.store(normed + at, norm_row(b_x, b_scale, eps, SIZE), is_c)


def mix(normed: Tensor, logits: Tensor) -> Tensor:
    """See `hyper.mix`."""
    num_tokens, num_streams, size = normed.shape
    check_rows(logits=logits)
    assert normed.is_contiguous(), "what norms return"
    mixed = normed.new_empty(num_tokens, size)
    _mix_kernel[(num_tokens, cdiv(size, _BLOCK))](
        normed,
        logits,
        mixed,
        logits.stride(0),
        SIZE=size,
        STREAMS=num_streams,
        BLOCK=_BLOCK,
        num_warps=4,
        **OVERLAPPED,
    )
    return mixed


@quick
@triton.jit
def _mix_kernel(
    normed, logits, mixed, stride, SIZE: tl.constexpr, STREAMS: tl.constexpr, BLOCK: tl.constexpr
):
    launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_c = o_c < SIZE
    wait_for_inputs()
    acc = tl.zeros([BLOCK], tl.float32)
    for i_s in tl.static_range(STREAMS):
        b_x = tl.load(normed + (i_t * STREAMS + i_s) * SIZE + o_c, is_c, 0.0).to(tl.float32)
        b_logit = tl.load(logits + i_t * stride + i_s * SIZE + o_c, is_c, 0.0)
        acc += sigmoid(b_logit) * b_x
    tl.store(mixed + i_t * SIZE + o_c, (acc / STREAMS).to(mixed.dtype.element_ty), is_c)


def inject(streams: Tensor, output: Tensor, logits: Tensor) -> Tensor:
    """See `hyper.inject`; streams may be one tensor that is expanded."""
    num_tokens, num_streams, size = streams.shape
    check_rows(output=output, logits=logits)
    assert streams.stride(2) == 1, "a stream is contiguous"
    parts = output[:, None] if output.dim() == 2 else output
    injected = torch.empty_like(streams, memory_format=torch.contiguous_format)
    _inject_kernel[(num_tokens, cdiv(size, _BLOCK))](
        streams,
        parts,
        logits,
        injected,
        *streams.stride()[:2],
        *parts.stride()[:2],
        logits.stride(0),
        SIZE=size,
        STREAMS=num_streams,
        PARTS=parts.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
        **OVERLAPPED,
    )
    return injected


@quick
@triton.jit
def _inject_kernel(
    streams,
    parts,
    logits,
    injected,
    stride,
    stream_stride,
    parts_stride,
    part_stride,
    logits_stride,
    SIZE: tl.constexpr,
    STREAMS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_c = o_c < SIZE
    wait_for_inputs()
    b_o = add_parts(parts + i_t * parts_stride + o_c, part_stride, is_c, PARTS)
    for i_s in tl.static_range(STREAMS):
        share = 2 * sigmoid(tl.load(logits + i_t * logits_stride + i_s))
        b_x = tl.load(streams + i_t * stride + i_s * stream_stride + o_c, is_c, 0.0)
        b_x = (b_x.to(tl.float32) + b_o * share).to(b_x.dtype)
        tl.store(injected + (i_t * STREAMS + i_s) * SIZE + o_c, b_x, is_c)
