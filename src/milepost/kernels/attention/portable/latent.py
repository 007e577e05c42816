"""Latent attention from a step's items on any GPU.

All heads of a token are rows of a tile, since they read the same latents: a block of those comes to
shared memory once, and serves as keys and values.

Legend: T tokens, H heads, R latent_dim, P shared_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.attention import table
from milepost.kernels.attention.arguments import AttentionCall, QueryHeads, WorkItems, make_partials
from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.attention.pages import PagedKV, as_bytes, as_rows
from milepost.kernels.attention.portable.blocks import (
    dot,
    first_masked,
    fit_float16,
    load_item,
    online_softmax,
)
from milepost.kernels.attention.portable.combine import combine
from milepost.kernels.attention.portable.tiles import AttentionTile
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import (
    OVERLAPPED,
    launch_dependents,
    quick,
    wait_as_padding,
    wait_for_inputs,
)
from milepost.kernels.platform.numerics import decode
from milepost.kernels.platform.tensors import check_contiguous, check_rows
from milepost.kernels.platform.tiles import next_power_of_2


class LatentSizes(NamedTuple):
    """How the kernel is compiled; a constant on the device."""

    heads: int
    latent: int
    shared: int
    block_r: int
    block_p: int
    page_size: int
    rows: int
    block: int
    float8: bool
    native: bool
    """Whether the chip has FP8."""


class LatentPages(NamedTuple):
    """A sequence's latents on the device."""

    latents: Any
    table: Any
    page_rows: Any


def attend(
    query: Tensor, shared_query: Tensor, kv: PagedKV, items: AttentionItems, scale: float
) -> Tensor:
    """As `reference.attend_latents`; `query` is contiguous, rows of tokens that are in no item hold
    anything."""
    check_contiguous(query=query)
    check_rows(shared_query=shared_query, tables=kv.tables)
    call = AttentionCall(
        query=query,
        gate=None,
        kv=kv if kv.is_fp8 else kv._replace(scales=None),
        scale=scale,
        bases=items.bases,
        partials=make_partials(query, items),
        output=torch.empty_like(query).flatten(1),
        rounded=None,
    )
    for work, rows in ((items.wide, items.wide_rows), (items.narrow, items.narrow_rows)):
        if len(work):
            _launch(call, shared_query, work, rows)
    if items.num_combined:
        combine(call, items)
    return call.output.view(query.shape)


def _launch(call: AttentionCall, shared_query: Tensor, work: Tensor, rows: int) -> None:
    chip, kv = probe(call.query.device), call.kv
    _, num_heads, latent_dim = call.query.shape
    shared_dim = shared_query.shape[-1]
    tile = AttentionTile(
        rows=rows,
        is_wide=False,
        head_dim=latent_dim + shared_dim,
        dtype=call.query.dtype,
        is_latent=True,
    )
    tiles = table.choose(tile, chip).tiles
    sizes = LatentSizes(
        heads=num_heads,
        latent=latent_dim,
        shared=shared_dim,
        block_r=max(16, next_power_of_2(latent_dim)),
        block_p=max(16, next_power_of_2(shared_dim)),
        page_size=kv.pool.shape[2],
        rows=rows,
        block=tiles.block,
        float8=kv.is_fp8,
        native=kv.is_fp8 and chip.has_fp8,
    )
    _attend_kernel[(len(work),)](
        call.query,
        QueryHeads(shared_query, shared_query.stride(0), shared_query.stride(1)),
        call.output,
        as_bytes(as_rows(kv.pool)),
        kv.scales,
        kv.tables,
        WorkItems(work, call.bases),
        call.partials,
        call.scale_of_2,
        *call.extents[:2],
        SIZES=sizes,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **OVERLAPPED,
    )


@quick
@triton.jit(do_not_specialize=["page_rows", "table_stride"])
def _attend_kernel(
    query,
    shared_query,
    output,
    latents,
    kv_scale,
    tables,
    work,
    partials,
    scale,
    page_rows,
    table_stride,
    SIZES: tl.constexpr,
):
    """One item: rows = tokens * heads query rows."""
    ROWS: tl.constexpr = SIZES.rows
    BLOCK: tl.constexpr = SIZES.block
    BLOCK_R: tl.constexpr = SIZES.block_r
    launch_dependents()
    item = load_item(work.base, tl.program_id(0))
    if item.num_tokens == 0:
        wait_as_padding()
        return
    wait_for_inputs()
    table = tables + item.table_row.to(tl.int64) * table_stride

    row = tl.arange(0, ROWS)
    o_r, o_p = tl.arange(0, BLOCK_R), tl.arange(0, SIZES.block_p)
    ahead = row // SIZES.heads
    token = (item.first + ahead).to(tl.int64)
    head = row % SIZES.heads
    is_held = ahead < item.num_tokens
    held = is_held[:, None] & (o_r < SIZES.latent)[None, :]
    at = (token * SIZES.heads + head)[:, None] * SIZES.latent + o_r[None, :]
    b_q = tl.load(query + at, held, 0.0)
    o_shared = token * shared_query.stride + head * shared_query.head_stride
    p_shared = shared_query.base + o_shared[:, None] + o_p[None, :]
    b_sq = tl.load(p_shared, is_held[:, None] & (o_p < SIZES.shared)[None, :], 0.0)

    value_scale = 1.0
    if kv_scale is not None:
        # Float16 holds what FP8 holds; a chip without FP8 holds it divided by 256.
        value_scale = tl.load(kv_scale) * (1.0 if SIZES.native else 256.0)
        scale *= value_scale
        if query.dtype.element_ty == tl.bfloat16:
            b_q = fit_float16(b_q)
            b_sq = fit_float16(b_sq)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_R], tl.float32)
    pages = LatentPages(latents, table, page_rows)
    masked = first_masked(item, BLOCK)
    for i_kv in tl.range(item.begin, masked, BLOCK):
        m, l, acc = _step(m, l, acc, b_q, b_sq, i_kv, item, ahead, pages, scale, False, SIZES)
    for i_kv in tl.range(masked, item.end, SIZES.block, num_stages=1):
        m, l, acc = _step(m, l, acc, b_q, b_sq, i_kv, item, ahead, pages, scale, True, SIZES)

    # A row that has seen nothing has an m of -inf and an acc of 0: it adds nothing to the sum.
    l = tl.where(l == 0.0, 1.0, l)
    acc = acc / l[:, None] * value_scale
    if item.ordinal < 0:
        tl.store(output + at, acc.to(output.dtype.element_ty), held)
    else:
        base = tl.load(work.bases + token, is_held, 0).to(tl.int64) + item.ordinal
        p_partial = partials.base + (base * SIZES.heads + head)[:, None] * SIZES.latent
        tl.store(p_partial + o_r[None, :], acc, held)
        tl.store(partials.lse + base * SIZES.heads + head, m + tl.log2(l), is_held)


@triton.jit
def _step(
    m,
    l,
    acc,
    b_q,
    b_sq,
    i_kv,
    item,
    ahead,
    pages,
    scale,
    MASKED: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Take the block of latents at i_kv into the running softmax: the maximum score `m`, the sum of
    weights `l`, the sum of latents `acc`. If MASKED, a row sees nothing past its own position."""
    WIDTH: tl.constexpr = SIZES.latent + SIZES.shared
    o_r, o_p = tl.arange(0, SIZES.block_r), tl.arange(0, SIZES.block_p)
    o_kv = i_kv + tl.arange(0, SIZES.block)
    # Past the end the table names pages that are not the sequence's, or none, and rows hold
    # anything, perhaps NaN: they are not read.
    inside = o_kv < item.end
    page = tl.load(pages.table + o_kv // SIZES.page_size, inside, 0).to(tl.int64)
    p_row = pages.latents + ((page * pages.page_rows + o_kv % SIZES.page_size) * WIDTH)[:, None]
    b_c = tl.load(p_row + o_r[None, :], inside[:, None] & (o_r < SIZES.latent)[None, :], 0)
    is_p = (o_p < SIZES.shared)[None, :]
    b_p = tl.load(p_row + SIZES.latent + o_p[None, :], inside[:, None] & is_p, 0)
    if SIZES.float8:
        b_c = decode(b_c, SIZES.native).to(b_q.dtype)
        b_p = decode(b_p, SIZES.native).to(b_q.dtype)
    b_s = dot(b_sq, tl.trans(b_p), dot(b_q, tl.trans(b_c)))
    if MASKED:
        seen = (o_kv[None, :] <= item.position + ahead[:, None]) & inside[None, :]
        b_s = tl.where(seen, b_s, float("-inf"))
    m, l, b_w, shrink = online_softmax(m, l, b_s, scale, MASKED)
    return m, l, dot(b_w.to(b_c.dtype), b_c, acc * shrink[:, None])
