"""Attention over depth on a GPU: `mix` in one launch.

Legend: T tokens, S sources, C hidden size, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import check_rows, parts_of
from milepost.kernels.platform.tiles import next_power_of_2


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
