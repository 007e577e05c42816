"""Attention on a GPU: launches the kernels that the table chooses for a step's items, and combines
partial results by their LSE where KV is cut.

Legend: T tokens, H query heads, G KV heads, E head_dim, P partial results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.attention import table
from milepost.kernels.attention.arguments import AttentionCall, make_partials
from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.attention.pages import PagedKV, fits_tma
from milepost.kernels.attention.portable import attend as portable
from milepost.kernels.attention.portable.blocks import load_gate
from milepost.kernels.attention.portable.prepare import dequantise
from milepost.kernels.attention.portable.tiles import AttentionTile, KVTiles
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, quick, wait_for_inputs
from milepost.kernels.platform.tensors import check_rows

_PROGRAMS = 256
"""Few tokens' results are divided among as many programs: long sequences have many partial results,
which are then all loaded at once."""
_LEAST_PART, _NUMBERS = 32, 8192
"""Least dimensions of a program, and numbers that it loads at once."""
_FEW = 8
"""Partial results that are added up at a time if the order must not depend on their number:
prefills have no more."""


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
        window=items.tiling.window or 0,
        shared_query=shared_query,
    )
    forced = tiles or {}
    if len(items.wide):
        pages = dequantise(kv, items, query.dtype) if items.room.num_dequantised else kv
        tile = _tile(query, pages, shared_query, items.tiling.shapes.wide_rows)
        tile = tile._replace(is_wide=True, is_windowed=bool(call.window))
        _run(replace(call, kv=pages), items.wide, tile, forced.get("wide"))
    if len(items.narrow):
        # Most narrow items are decodes. How many are padding is not known here.
        num_programs = num_tokens // items.tiling.tokens_each * kv.pool.shape[3]
        tile = _tile(query, kv, shared_query, items.tiling.shapes.narrow_rows)
        tile = tile._replace(num_programs=num_programs, is_windowed=bool(call.window))
        _run(call, items.narrow, tile, forced.get("narrow"))
    if items.room.num_combined:
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


def combine(call: AttentionCall, items: AttentionItems) -> None:
    """Writes output rows with partial results, times the sigmoid of their gate."""
    _, num_heads, head_dim = call.partials.base.shape
    block_e = triton.next_power_of_2(head_dim)
    num_tokens = items.room.num_combined - items.room.first_combined
    part, step = block_e, _FEW
    if not items.tiling.order.is_fixed:
        part = choose_part(num_tokens * num_heads, block_e)
        step = max(32, _NUMBERS // part)
    _combine_kernel[(num_tokens, num_heads, block_e // part)](
        call.partials,
        items.bases,
        call.output_gate,
        call.output,
        items.room.first_combined,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        PART=part,
        STEP=step,
        num_warps=4 if part == block_e else 8,
        **OVERLAPPED,
    )


def choose_part(num_results: int, block_e: int) -> int:
    """Returns the number of dimensions of a program, given the number of tokens times heads."""
    parts = 1
    while 2 * parts * num_results <= _PROGRAMS and block_e // (2 * parts) >= _LEAST_PART:
        parts *= 2
    return block_e // parts


@quick
@triton.jit(do_not_specialize=["first"])
def _combine_kernel(
    partials,
    bases,
    gate,
    output,
    first,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
):
    """Makes PART dimensions of the result of one token and head: the sum of its partial results,
    weighted by their LSE."""
    token = first + tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    base = tl.load(bases + token)
    count = tl.load(bases + token + 1) - base
    wait_for_inputs()
    if count == 0:
        return
    o_e = tl.program_id(2) * PART + tl.arange(0, PART)
    inside = o_e < HEAD_DIM
    step = tl.arange(0, STEP)
    if gate.base is not None:
        b_g = load_gate(gate, token, head * HEAD_DIM + o_e, inside)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([PART], tl.float32)
    # Every token sees the beginning of its KV, so the first LSE is finite.
    for done in tl.range(0, count, STEP):
        at = (base + done + step).to(tl.int64) * HEADS + head
        valid = done + step < count
        b_lse = tl.load(partials.lse + at, mask=valid, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(b_lse, 0))
        b_p = tl.exp2(b_lse - m_new)
        shrink = tl.exp2(m - m_new)
        mask = valid[:, None] & inside[None, :]
        b_o = tl.load(partials.base + at[:, None] * HEAD_DIM + o_e[None, :], mask=mask, other=0.0)
        acc = acc * shrink + tl.sum(b_o * b_p[:, None], 0)
        l = l * shrink + tl.sum(b_p, 0)
        m = m_new
    acc = acc / l
    if gate.base is not None:
        acc *= tl.sigmoid(b_g.to(tl.float32))
    at = (token * HEADS + head) * HEAD_DIM + o_e
    tl.store(output + at, acc.to(output.dtype.element_ty), mask=inside)
