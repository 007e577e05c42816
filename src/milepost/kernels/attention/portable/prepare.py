"""Launches before attention to heads: `prepare` norms and rotates heads and writes KV to its pages,
`dequantise` copies FP8 pages to a 16-bit type for prefills.

Legend: T tokens, H query heads, G KV heads, E head_dim, O turned dimensions of E, S sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.attention.pages import PagedKV, as_bytes, rows_per_page
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import decode, encode
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import cdiv, check_rows, next_power_of_2

_FEW_TOKENS = 256
"""Up to here a program takes one token, so that all of the chip takes part."""
_TOKENS_AT_ONCE, _NUM_WARPS = 8, 4
_BLOCK = 8192
"""FP8 numbers that a program dequantises."""


def prepare(
    projected: Tensor,
    norm_scale: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    kv: PagedKV,
    kv_rows: Tensor,
    *,
    num_heads: int,
    order: SumOrder = SumOrder.FREE,
) -> Tensor:
    """See `reference.prepare`. `norm_scale` is float32 or None, and `kv_rows` [T] int64 are the
    rows that tokens' keys are written to, -1 for none. The number of threads per head depends on
    the number of tokens only in a FREE `order`."""
    check_rows(projected=projected, norm_scale=norm_scale, kv_rows=kv_rows)
    num_tokens = len(projected)
    _, _, page_size, num_kv_heads, head_dim = kv.pool.shape
    cosines, sines = angles or (None, None)
    query = projected.new_empty(num_tokens, num_heads, head_dim)
    are_few = num_tokens <= _FEW_TOKENS and order is SumOrder.FREE
    tokens = 1 if are_few else _TOKENS_AT_ONCE
    grid = (cdiv(num_tokens, tokens), num_heads + 2 * num_kv_heads)
    _prepare_kernel[grid](
        ProjectedHeads(projected, projected.stride(0)),
        norm_scale,
        Angles(cosines, 0 if cosines is None else cosines.stride(0)),
        Angles(sines, 0 if sines is None else sines.stride(0)),
        kv_rows,
        as_bytes(kv.pool),
        kv.fp8_scales,
        query,
        eps,
        num_tokens,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        HALF=0 if cosines is None else cosines.shape[-1],
        BLOCK_E=next_power_of_2(head_dim),
        TOKENS=tokens,
        NATIVE=kv.is_fp8 and probe(projected.device).has_fp8,
        num_warps=1 if tokens == 1 else _NUM_WARPS,
        **OVERLAPPED,
    )
    return query


class ProjectedHeads(NamedTuple):
    """Heads of queries, keys and values side by side [T, ...]."""

    base: Any
    stride: Any


class Angles(NamedTuple):
    """Cosines or sines [T, 1, O / 2], or None."""

    base: Any
    stride: Any


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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOKENS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Prepares one head of TOKENS tokens."""
    launch_dependents()
    wait_for_inputs()
    head = tl.program_id(1)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_E)[None, :]
    inside = (token < num_tokens) & (column < HEAD_DIM)
    heads = projected.base + token * projected.stride + head * HEAD_DIM
    x = tl.load(heads + column, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        wide = x.to(tl.float32)
        if norm_scale is not None:
            norm = tl.rsqrt(tl.sum(wide * wide, 1)[:, None] / HEAD_DIM + eps)
            scale = norm_scale + head * HEAD_DIM
            wide = wide * norm * tl.load(scale + column, mask=column < HEAD_DIM, other=0.0)
        if HALF:
            # A rotated dimension needs the one half a turn away: read again, from the cache.
            turned = (column < 2 * HALF) & (token < num_tokens)
            other = tl.where(column < HALF, column + HALF, column - HALF)
            paired = tl.load(heads + other, mask=turned, other=0.0).to(tl.float32)
            if norm_scale is not None:
                paired = paired * norm * tl.load(scale + other, mask=column < 2 * HALF, other=0.0)
            angle = column % HALF
            cosine = tl.load(cosines.base + token * cosines.stride + angle, mask=turned, other=1.0)
            sine = tl.load(sines.base + token * sines.stride + angle, mask=turned, other=0.0)
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
        p_scale = None if kv_scales is None else kv_scales + head - HEADS
        store_rounded(p_kv, x, kept, p_scale, NATIVE)


@triton.jit
def store_rounded(target, x, mask, p_scale, NATIVE: tl.constexpr):
    """Stores numbers, divided by a scale and rounded to FP8 if there is one."""
    if p_scale is None:
        tl.store(target, x, mask)
    else:
        scaled = tl.div_rn(x.to(tl.float32), tl.load(p_scale))
        tl.store(target, encode(scaled, NATIVE), mask)


def dequantise(kv: PagedKV, items: AttentionItems, dtype: torch.dtype) -> PagedKV:
    """Returns the pages of `items.dequantised` in `dtype`, one after the other, and the tables by
    which `items.wide` name them. Each tile of a prefill reads all of the KV before it, and would
    unpack it again. Numbers stay divided by their scales, so they are the same."""
    pool, tables = kv.pool, kv.tables
    assert tables is not None, "items name rows of page tables"
    _, _, page_size, num_kv_heads, head_dim = pool.shape
    num_pages = items.room.num_dequantised
    kept = torch.empty(num_pages, *pool.shape[1:], dtype=dtype, device=pool.device)
    kept_tables = tables.new_empty(num_pages, 1)
    numbers = 2 * page_size * num_kv_heads * head_dim
    most = min(num_pages, tables.shape[1])
    _dequantise_kernel[(cdiv(numbers, _BLOCK), most, len(items.dequantised))](
        as_bytes(pool),
        tables,
        items.dequantised,
        kept,
        kept_tables,
        rows_per_page(pool),
        tables.stride(0),
        ROW=num_kv_heads * head_dim,
        NUMBERS=numbers,
        BLOCK=_BLOCK,
        NATIVE=probe(pool.device).has_fp8,
        num_warps=4,
        **OVERLAPPED,
    )
    return PagedKV(kept, kept_tables, kv.scales)


@quick
@triton.jit(do_not_specialize=["page_rows", "table_stride"])
def _dequantise_kernel(
    pool,
    tables,
    sequences,
    kept,
    kept_tables,
    page_rows,
    table_stride,
    ROW: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Dequantises BLOCK numbers of one page of one sequence."""
    launch_dependents()
    part, index = tl.program_id(0), tl.program_id(1)
    sequence = sequences + tl.program_id(2) * 4
    row = tl.load(sequence)
    count = tl.load(sequence + 1)
    place = tl.load(sequence + 2) + index
    wait_for_inputs()
    if index >= count:
        return
    page = tl.load(tables + row.to(tl.int64) * table_stride + index).to(tl.int64)
    if part == 0:
        tl.store(kept_tables + place, place)
    o_n = part * BLOCK + tl.arange(0, BLOCK)
    inside = o_n < NUMBERS
    bits = tl.load(pool + page * page_rows * ROW + o_n, mask=inside, other=0)
    numbers = decode(bits, NATIVE).to(tl.float32)
    if not NATIVE:
        numbers *= 256.0
    target = kept + place.to(tl.int64) * NUMBERS + o_n
    tl.store(target, numbers.to(kept.dtype.element_ty), mask=inside)
