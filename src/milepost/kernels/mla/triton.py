"""Paged latent attention on a GPU: programs work through the items of a step (see
`attention.items`), as those of `attention.triton` do.

All heads of a token are rows of a tile, for they read the same latents: a block of these comes to
shared memory once, and is keys and values.

Legend: T tokens, H heads, R latent_dim, P shared_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.attention.pages import as_bytes, as_rows, rows_per_page
from milepost.kernels.attention.triton_combine import combine
from milepost.kernels.attention.triton_parts import dot, fit_float16, load_item, online_softmax
from milepost.kernels.platform.device import Chip, probe
from milepost.kernels.platform.launches import (
    OVERLAPPED,
    launch_dependents,
    quick,
    wait_as_padding,
    wait_for_inputs,
)
from milepost.kernels.platform.numerics import decode
from milepost.kernels.platform.tensors import FP8, check_contiguous, check_rows

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """How the kernel is compiled: positions of a block, warps, and stages of the loop."""

    block: int
    num_warps: int
    num_stages: int


_SHAPES = (
    LatentTiles(64, 8, 2),
    LatentTiles(32, 8, 2),
    LatentTiles(16, 8, 2),
    LatentTiles(16, 4, 1),
)


def choose_shape(rows: int, width: int, dtype: torch.dtype, chip: Chip) -> LatentTiles:
    """The first that fits the chip, for latents of `width` entries."""
    if dtype == torch.float32:
        return _SHAPES[-1]
    row_bytes = 2 * width

    def fits(shape: LatentTiles) -> bool:
        held = rows * (row_bytes + 2 * shape.block) + shape.num_stages * shape.block * row_bytes
        return held <= chip.shared_bytes and not (chip.is_amd and shape.num_stages > 1)

    return next(filter(fits, _SHAPES), _SHAPES[-1])


def attend(
    query: Tensor,
    shared_query: Tensor,
    pool: Tensor,
    tables: Tensor,
    items: AttentionItems,
    scale: float,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """As `reference.attend`; `query` is contiguous, rows of tokens that are in no item hold
    anything."""
    check_contiguous(query=query)
    check_rows(shared_query=shared_query, tables=tables)
    _, num_heads, latent_dim = query.shape
    output = torch.empty_like(query)
    partials = query.new_empty(items.num_partials, num_heads, latent_dim, dtype=torch.float32)
    lse = query.new_empty(items.num_partials, num_heads, dtype=torch.float32)
    shared_dim, chip = shared_query.shape[-1], probe(query.device)
    is_float8 = pool.dtype == FP8
    for work, rows in ((items.wide, items.wide_rows), (items.narrow, items.narrow_rows)):
        if not len(work):
            continue
        shape = choose_shape(rows, latent_dim + shared_dim, query.dtype, chip)
        _attend_kernel[(len(work),)](
            query,
            shared_query,
            output,
            as_bytes(as_rows(pool)),
            kv_scale if is_float8 else None,
            tables,
            work,
            items.bases,
            partials,
            lse,
            scale * _LOG2_E,
            rows_per_page(pool),
            shared_query.stride(0),
            shared_query.stride(1),
            tables.stride(0),
            HEADS=num_heads,
            LATENT=latent_dim,
            SHARED=shared_dim,
            BLOCK_R=max(16, triton.next_power_of_2(latent_dim)),
            BLOCK_P=max(16, triton.next_power_of_2(shared_dim)),
            PAGE_SIZE=pool.shape[2],
            ROWS=rows,
            BLOCK=shape.block,
            NATIVE=is_float8 and chip.has_fp8,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            **OVERLAPPED,
        )
    if items.num_combined:
        combine(partials, lse, items, None, output.flatten(1))
    return output


# The rows of a page and the length of a table follow from how much memory there is: nothing is
# compiled anew for them.
@quick
@triton.jit(do_not_specialize=["page_rows", "table_stride"])
def _attend_kernel(
    query,
    shared_query,
    output,
    latents,
    kv_scale,
    tables,
    items,
    bases,
    partials,
    lse,
    scale,
    page_rows,
    shared_stride,
    shared_head_stride,
    table_stride,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One item: ROWS = tokens * HEADS query rows."""
    launch_dependents()
    item = load_item(items, tl.program_id(0))
    first, num_tokens, table_row, position, begin, end, ordinal = item
    if num_tokens == 0:
        wait_as_padding()
        return
    wait_for_inputs()
    table = tables + table_row.to(tl.int64) * table_stride

    row = tl.arange(0, ROWS)
    o_r, o_p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    ahead = row // HEADS
    token = (first + ahead).to(tl.int64)
    head = row % HEADS
    is_held = ahead < num_tokens
    held = is_held[:, None] & (o_r < LATENT)[None, :]
    at = (token * HEADS + head)[:, None] * LATENT + o_r[None, :]
    b_q = tl.load(query + at, held, 0.0)
    p_shared = shared_query + (token * shared_stride + head * shared_head_stride)[:, None]
    b_sq = tl.load(p_shared + o_p[None, :], is_held[:, None] & (o_p < SHARED)[None, :], 0.0)

    value_scale = 1.0
    FLOAT8: tl.constexpr = kv_scale is not None
    if FLOAT8:
        # Float16 holds what float8 holds; where a chip has no float8, it holds it over 256.
        value_scale = tl.load(kv_scale) * (1.0 if NATIVE else 256.0)
        scale *= value_scale
        if query.dtype.element_ty == tl.bfloat16:
            b_q = fit_float16(b_q)
            b_sq = fit_float16(b_sq)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_R], tl.float32)
    sizes: tl.constexpr = (LATENT, SHARED, BLOCK_R, BLOCK_P, PAGE_SIZE, BLOCK, FLOAT8, NATIVE)
    pages = latents, table, end, page_rows
    # All rows see all of the blocks before this place.
    masked = begin + tl.maximum(tl.minimum(end, position + 1) - begin, 0) // BLOCK * BLOCK
    for i_kv in tl.range(begin, masked, BLOCK):
        m, l, acc = _step(m, l, acc, b_q, b_sq, i_kv, position, ahead, pages, scale, False, sizes)
    for i_kv in tl.range(masked, end, BLOCK, num_stages=1):
        m, l, acc = _step(m, l, acc, b_q, b_sq, i_kv, position, ahead, pages, scale, True, sizes)

    # A row that has seen nothing has an m of -inf and an acc of 0: no share of the sum.
    l = tl.where(l == 0.0, 1.0, l)
    acc = acc / l[:, None] * value_scale
    if ordinal < 0:
        tl.store(output + at, acc.to(output.dtype.element_ty), held)
    else:
        base = tl.load(bases + token, is_held, 0).to(tl.int64) + ordinal
        p_partial = partials + (base * HEADS + head)[:, None] * LATENT + o_r[None, :]
        tl.store(p_partial, acc, held)
        tl.store(lse + base * HEADS + head, m + tl.log2(l), is_held)


@triton.jit
def _step(
    m,
    l,
    acc,
    b_q,
    b_sq,
    i_kv,
    position,
    ahead,
    pages,
    scale,
    MASKED: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Take the block of latents at i_kv into the running softmax: the greatest score `m`, the sum
    of shares `l`, the sum of latents `acc`. If MASKED, a row sees nothing past its own position."""
    latents, table, end, page_rows = pages
    LATENT: tl.constexpr = SIZES[0]
    SHARED: tl.constexpr = SIZES[1]
    PAGE_SIZE: tl.constexpr = SIZES[4]
    o_r, o_p = tl.arange(0, SIZES[2]), tl.arange(0, SIZES[3])
    o_kv = i_kv + tl.arange(0, SIZES[5])
    # Past the end the table names pages that are not the sequence's, or none, and rows hold
    # anything, perhaps NaN: they are not read.
    inside = o_kv < end
    page = tl.load(table + o_kv // PAGE_SIZE, inside, 0).to(tl.int64)
    p_row = latents + ((page * page_rows + o_kv % PAGE_SIZE) * (LATENT + SHARED))[:, None]
    b_c = tl.load(p_row + o_r[None, :], inside[:, None] & (o_r < LATENT)[None, :], 0)
    b_p = tl.load(p_row + LATENT + o_p[None, :], inside[:, None] & (o_p < SHARED)[None, :], 0)
    if SIZES[6]:
        b_c = decode(b_c, SIZES[7]).to(b_q.dtype)
        b_p = decode(b_p, SIZES[7]).to(b_q.dtype)
    b_s = dot(b_sq, tl.trans(b_p), dot(b_q, tl.trans(b_c)))
    if MASKED:
        seen = (o_kv[None, :] <= position + ahead[:, None]) & inside[None, :]
        b_s = tl.where(seen, b_s, float("-inf"))
    m, l, b_share, shrink = online_softmax(m, l, b_s, scale, MASKED)
    return m, l, dot(b_share.to(b_c.dtype), b_c, acc * shrink[:, None])
