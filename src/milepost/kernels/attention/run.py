"""One attention on a GPU: the launches of a step's items, by the kernels that the table chooses.

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
from milepost.kernels.attention.portable.tiles import NARROW_ROWS, AttentionTile, KVTiles
from milepost.kernels.layout.emit import Emit, Inputs, handed_on, room_for
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.tensors import BLOCK, check_rows


def attend(
    query: Tensor,
    gate: Tensor | None,
    kv: PagedKV,
    items: AttentionItems,
    scale: float,
    *,
    emit: Emit = Emit.VALUES,
    tiles: Mapping[str, KVTiles] | None = None,
) -> Inputs:
    """Attend from `query` [T, H, E] to pages, times the sigmoid of `gate` [T, H * E] if there is
    one. Returns [T, H * E] as `emit` asks; rows of tokens that are in no item hold anything.

    `tiles` for "wide" or "narrow" items have the portable kernel run, cut like that.
    """
    check_rows(query=query, gate=gate, tables=kv.tables)
    num_tokens, num_heads, head_dim = query.shape
    output = query.new_empty(num_tokens, num_heads * head_dim)
    kv = kv if kv.is_fp8 else kv._replace(scales=None)
    if kv.is_fp8 or head_dim not in (BLOCK, 2 * BLOCK):
        emit = Emit.VALUES
    call = AttentionCall(
        query=query,
        gate=gate,
        kv=kv,
        scale=scale,
        bases=items.bases,
        partials=make_partials(query, items),
        output=output,
        rounded=room_for(*output.shape, output, emit),
    )
    forced = tiles or {}
    if len(items.wide):
        pages = dequantise(kv, items, query.dtype) if items.num_dequantised else kv
        wide = replace(call, kv=pages)
        _run(wide, items.wide, _tile(wide, items.wide_rows, is_wide=True), forced.get("wide"))
    if len(items.narrow):
        # Most of them are decodes; how many items are padding is not known here.
        num_programs = num_tokens // items.tokens_each * kv.pool.shape[3]
        tile = _tile(call, items.narrow_rows, num_programs=num_programs)
        _run(call, items.narrow, tile, forced.get("narrow"))
    if items.num_combined:
        combine(call, items)
    return handed_on(output, call.rounded)


def _tile(
    call: AttentionCall, rows: int, *, is_wide: bool = False, num_programs: int = 0
) -> AttentionTile:
    return AttentionTile(
        rows=rows,
        is_wide=is_wide,
        head_dim=call.query.shape[2],
        dtype=call.query.dtype,
        has_fp8_pages=call.kv.is_fp8,
        page_size=call.kv.pool.shape[2],
        fits_tma=fits_tma(call.kv.pool),
        num_programs=num_programs,
    )


def _run(call: AttentionCall, work: Tensor, tile: AttentionTile, tiles: KVTiles | None) -> None:
    chip = probe(call.query.device)
    if tiles is None:
        choice = table.choose(tile, chip)
        if choice.kernel.is_hopper:
            from milepost.kernels.attention.hopper import narrow, wide

            kernel = wide if tile.is_wide else narrow
            return kernel.attend(call, work, tile.rows)
        tiles = choice.tiles
    return portable.attend(call, work, max(tile.rows, NARROW_ROWS), tiles)
