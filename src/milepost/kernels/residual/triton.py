"""Triton: attention over depth and hyper-connections, each definition in one launch. Sums are
float32.

Legend: T tokens, S sources or streams, C hidden size, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import add_parts, norm_row, sigmoid
from milepost.kernels.platform.tensors import cdiv, check_rows, next_power_of_2, parts_of

_BLOCK = 1024
"""Entries of a token per program of hyper-connections."""


def mix(sources: Tensor, delta: Tensor | None, scale: Tensor, query: Tensor, eps: float) -> Tensor:
    """See `residual.mix`. One program per token whatever their number; sums are float32."""
    check_rows(sources=sources, delta=delta, scale=scale, query=query)
    num_tokens, num_sources, size = sources.shape
    mixed = torch.empty(num_tokens, size, dtype=sources.dtype, device=sources.device)
    num_parts, *strides = parts_of(delta)
    columns = next_power_of_2(size)
    _mix_kernel[(num_tokens,)](
        sources,
        delta,
        scale,
        query,
        mixed,
        num_sources,
        *sources.stride()[:2],
        *strides,
        eps,
        SIZE=size,
        COLUMNS=columns,
        PARTS=num_parts,
        num_warps=min(8, max(1, columns // 256)),
        **OVERLAPPED,
    )
    return mixed


@quick
@triton.jit(do_not_specialize=["num_sources"])
def _mix_kernel(
    sources,
    delta,
    scale,
    query,
    mixed,
    num_sources,
    token_stride,
    source_stride,
    delta_stride,
    part_stride,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Mixes one token's sources, the last one first, as a running softmax."""
    launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, COLUMNS)
    is_c = o_c < SIZE
    b_query = tl.load(scale + o_c, mask=is_c, other=0.0).to(tl.float32)
    b_query *= tl.load(query + o_c, mask=is_c, other=0.0).to(tl.float32)
    wait_for_inputs()
    p_token = sources + i_t * token_stride + o_c
    p_last = p_token + (num_sources - 1) * source_stride
    b_x = tl.load(p_last, mask=is_c, other=0.0).to(tl.float32)
    if PARTS:
        for part in tl.static_range(PARTS):
            p_part = delta + i_t * delta_stride + part * part_stride + o_c
            b_x += tl.load(p_part, mask=is_c, other=0.0).to(tl.float32)
        b_x = b_x.to(sources.dtype.element_ty)
        tl.store(p_last, b_x, mask=is_c)
        b_x = b_x.to(tl.float32)
    top = _logit(b_x, b_query, eps, SIZE)
    b_mixed, total = b_x, 1.0
    for i_s in range(num_sources - 1):
        b_x = tl.load(p_token + i_s * source_stride, mask=is_c, other=0.0).to(tl.float32)
        logit = _logit(b_x, b_query, eps, SIZE)
        highest = tl.maximum(top, logit)
        kept, share = tl.exp(top - highest), tl.exp(logit - highest)
        b_mixed = b_mixed * kept + b_x * share
        total = total * kept + share
        top = highest
    b_mixed = (b_mixed / total).to(mixed.dtype.element_ty)
    tl.store(mixed + i_t * SIZE + o_c, b_mixed, mask=is_c)


@triton.jit
def _logit(b_x, b_query, eps, SIZE: tl.constexpr):
    """Returns the query's logit of a source."""
    return tl.sum(b_x * b_query) * tl.rsqrt(tl.sum(b_x * b_x) / SIZE + eps)


def norm_streams(streams: Tensor, scale: Tensor, eps: float) -> Tensor:
    """See `residual.norm_streams`; streams may be one tensor that is expanded."""
    check_rows(scale=scale)
    num_tokens, num_streams, size = streams.shape
    assert streams.stride(2) == 1, "a stream is contiguous"
    columns = next_power_of_2(size)
    normed = torch.empty_like(streams, memory_format=torch.contiguous_format)
    _norm_streams_kernel[(num_tokens, num_streams)](
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
def _norm_streams_kernel(
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


def mix_streams(normed: Tensor, logits: Tensor) -> Tensor:
    """See `residual.mix_streams`."""
    num_tokens, num_streams, size = normed.shape
    check_rows(logits=logits)
    assert normed.is_contiguous(), "what norms return"
    mixed = normed.new_empty(num_tokens, size)
    _mix_streams_kernel[(num_tokens, cdiv(size, _BLOCK))](
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
def _mix_streams_kernel(
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
    """See `residual.inject`; streams may be one tensor that is expanded."""
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
