"""Attention on a GPU: launches the kernels that the table chooses for a step's items.

Legend: T tokens, H query heads, G KV heads, E head_dim, P partial results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from milepost.kernels.attention import table
from milepost.kernels.attention.arguments import AttentionCall, make_partials
from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.attention.pages import PagedKV, fits_tma
from milepost.kernels.attention.portable import attend as portable
from milepost.kernels.attention.portable.combine import combine
from milepost.kernels.attention.portable.prepare import dequantise
from milepost.kernels.attention.portable.tiles import AttentionTile, KVTiles
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.tensors import check_rows


def attend(
    query: Tensor,
    gate: Tensor | None,
    kv: PagedKV,
    items: AttentionItems,
    scale: float,
    *,
    shared_query: Tensor | None = None,
    tiles: Mapping[str, KVTiles] | None = None,
) -> Tensor:
    """Attends from `query` [T, H, E] to pages, times the sigmoid of `gate` [T, H * E], or [T, H],
    if there is one; to latents with `shared_query` [T, H, P]. Returns [T, H * E]; rows of tokens
    that are in no item hold anything.

    `tiles` for "wide" or "narrow" items force the portable kernel with these tiles.
    """
    check_rows(query=query, shared_query=shared_query, gate=gate, tables=kv.tables)
    num_tokens, num_heads, head_dim = query.shape
    output = query.new_empty(num_tokens, num_heads * head_dim)
    kv = kv if kv.is_fp8 else kv._replace(scales=None)
    call = AttentionCall(
        query=query,
        gate=gate,
        kv=kv,
        scale=scale,
        bases=items.bases,
        partials=make_partials(query, items),
        output=output,
        window=items.window or 0,
        shared_query=shared_query,
    )
    forced = tiles or {}
    if len(items.wide):
        pages = dequantise(kv, items, query.dtype) if items.num_dequantised else kv
        tile = _tile(query, pages, shared_query, items.wide_rows)
        tile = tile._replace(is_wide=True, is_windowed=bool(call.window))
        _run(replace(call, kv=pages), items.wide, tile, forced.get("wide"))
    if len(items.narrow):
        # Most narrow items are decodes. How many are padding is not known here.
        num_programs = num_tokens // items.tokens_each * kv.pool.shape[3]
        tile = _tile(query, kv, shared_query, items.narrow_rows)
        tile = tile._replace(num_programs=num_programs, is_windowed=bool(call.window))
        _run(call, items.narrow, tile, forced.get("narrow"))
    if items.num_combined:
        combine(call, items)
    return output


def _tile(query: Tensor, kv: PagedKV, shared_query: Tensor | None, rows: int) -> AttentionTile:
    return AttentionTile(
        rows=rows,
        is_wide=False,
        head_dim=query.shape[2] if shared_query is None else kv.pool.shape[4],
        dtype=query.dtype,
        has_fp8_pages=kv.is_fp8,
        page_size=kv.pool.shape[2],
        fits_tma=fits_tma(kv.pool),
        is_latent=shared_query is not None,
    )


def _run(call: AttentionCall, work: Tensor, tile: AttentionTile, tiles: KVTiles | None) -> None:
    if tiles is not None:
        portable.attend(call, work, tile.rows, tiles)
        return
    choice = table.choose(tile, probe(call.query.device))
    choice.kernel.run(call, work, tile.rows, choice.tiles)
