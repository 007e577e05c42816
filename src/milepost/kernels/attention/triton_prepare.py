"""What comes before attention, in one launch: norms of query and key heads and rotary positions,
if a model has them, and KV to its rows.

Legend: T tokens, H query heads, G KV heads, E head_dim, O turned dimensions of E.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.attention.pages import as_bytes
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import encode
from milepost.kernels.platform.tensors import FP8, check_rows
from milepost.kernels.platform.tiles import cdiv, next_power_of_2

_FEW_TOKENS = 256
"""Up to here, tokens are handed out one by one, so that all of the chip takes part."""
_TOKENS_AT_ONCE, _NUM_WARPS = 8, 4


def prepare(
    projected: Tensor,
    norm_scale: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    pool: Tensor,
    kv_rows: Tensor,
    *,
    num_heads: int,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """As `reference.prepare`, with norms of each head or none; `norm_scale` is float32, and
    `kv_rows` [T] int64 say where each token's key goes, -1 for nowhere."""
    check_rows(projected=projected, norm_scale=norm_scale, kv_rows=kv_rows)
    num_tokens = len(projected)
    _, _, page_size, num_kv_heads, head_dim = pool.shape
    cosines, sines = angles or (None, None)
    is_float8 = pool.dtype == FP8
    query = projected.new_empty(num_tokens, num_heads, head_dim)
    tokens = 1 if num_tokens <= _FEW_TOKENS else _TOKENS_AT_ONCE
    grid = (cdiv(num_tokens, tokens), num_heads + 2 * num_kv_heads)
    _prepare_kernel[grid](
        projected,
        norm_scale,
        cosines,
        sines,
        kv_rows,
        as_bytes(pool),
        kv_scales if is_float8 else None,
        query,
        eps,
        num_tokens,
        projected.stride(0),
        0 if cosines is None else cosines.stride(0),
        0 if sines is None else sines.stride(0),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        HALF=0 if cosines is None else cosines.shape[-1],
        BLOCK_E=next_power_of_2(head_dim),
        TOKENS=tokens,
        NATIVE=is_float8 and probe(projected.device).has_fp8,
        num_warps=1 if tokens == 1 else _NUM_WARPS,
        **OVERLAPPED,
    )
    return query


@quick
@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_kernel(
    projected,
    norm_scale,
    cosines,
    sines,
    kv_rows,
    pool,
    kv_scales,
    query,
    eps,
    num_tokens,
    projected_stride,
    cosine_stride,
    sine_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOKENS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One head of TOKENS tokens."""
    launch_dependents()
    wait_for_inputs()
    head = tl.program_id(1)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_E)[None, :]
    inside = (token < num_tokens) & (column < HEAD_DIM)
    heads = projected + token * projected_stride + head * HEAD_DIM
    x = tl.load(heads + column, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        wide = x.to(tl.float32)
        if norm_scale is not None:
            norm = tl.rsqrt(tl.sum(wide * wide, 1)[:, None] / HEAD_DIM + eps)
            scale = norm_scale + head * HEAD_DIM
            wide = wide * norm * tl.load(scale + column, mask=column < HEAD_DIM, other=0.0)
        if HALF:
            # A turned dimension needs the one half a turn away: read again, it is in the cache.
            turned = (column < 2 * HALF) & (token < num_tokens)
            other = tl.where(column < HALF, column + HALF, column - HALF)
            paired = tl.load(heads + other, mask=turned, other=0.0).to(tl.float32)
            if norm_scale is not None:
                paired = paired * norm * tl.load(scale + other, mask=column < 2 * HALF, other=0.0)
            angle = column % HALF
            cosine = tl.load(cosines + token * cosine_stride + angle, mask=turned, other=1.0)
            sine = tl.load(sines + token * sine_stride + angle, mask=turned, other=0.0)
            sine = tl.where(column < HALF, -sine.to(tl.float32), sine.to(tl.float32))
            wide = wide * cosine.to(tl.float32) + paired * sine
        x = wide.to(x.dtype)
    if head < HEADS:
        tl.store(query + (token * HEADS + head) * HEAD_DIM + column, x, mask=inside)
    else:
        row = tl.load(kv_rows + token, mask=token < num_tokens, other=-1)
        kept = inside & (row >= 0)
        kv_head = (head - HEADS) % KV_HEADS
        if head >= HEADS + KV_HEADS:
            row += PAGE_SIZE
        p_kv = pool + (row * KV_HEADS + kv_head) * HEAD_DIM + column
        if kv_scales is None:
            tl.store(p_kv, x, mask=kept)
        else:
            scaled = tl.div_rn(x.to(tl.float32), tl.load(kv_scales + head - HEADS))
            tl.store(p_kv, encode(scaled, NATIVE), mask=kept)
