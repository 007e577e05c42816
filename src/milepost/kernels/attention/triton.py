"""Paged attention on a GPU: programs work through the items of a step (see `items`).

A program holds a tile of query rows and passes over its range of KV, block by block, with a running
softmax. Blocks that all rows see whole need no mask; only the last ones do: those on the diagonal,
and that which the sequence ends in, whose rest holds anything.

Legend: T tokens, H query heads, G KV heads, R = H / G, E head_dim, P partial results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from milepost.kernels.attention.items import NARROW_ROWS, AttentionItems
from milepost.kernels.attention.pages import MAX_ROWS, as_bytes, as_rows, rows_per_page
from milepost.kernels.attention.triton_combine import combine
from milepost.kernels.attention.triton_dequantise import dequantise
from milepost.kernels.attention.triton_load import load, load_words
from milepost.kernels.attention.triton_parts import (
    dot,
    fit_float16,
    load_item,
    online_softmax,
    round_heads,
)
from milepost.kernels.attention.triton_tiles import KVTiles, choose_shape
from milepost.kernels.layout.emit import (
    Emit,
    Fp8Rows,
    Inputs,
    as_arguments,
    handed_on,
    keeps_values,
    room_for,
)
from milepost.kernels.platform.device import probe, runs_gluon
from milepost.kernels.platform.launches import (
    OVERLAPPED,
    launch_dependents,
    quick,
    wait_as_padding,
    wait_for_inputs,
)
from milepost.kernels.platform.tensors import BLOCK, FP8, check_rows
from milepost.kernels.platform.tiles import next_power_of_2

_LOG2_E = 1.4426950408889634
_MOST_IN_WORDS = 64
"""Rows from which on matrix units read shared memory, and so what is loaded goes back there."""
_CROWD = 1.25
"""Narrow programs for each SM, from which on they are many."""


def attend(
    query: Tensor,
    gate: Tensor | None,
    pool: Tensor,
    tables: Tensor,
    items: AttentionItems,
    scale: float,
    kv_scales: Tensor | None = None,
    *,
    emit: Emit = Emit.VALUES,
    narrow_shape: KVTiles | None = None,
    wide_shape: KVTiles | None = None,
) -> Inputs:
    """Attend from `query` [T, H, E] to the pages of `pool` [pages, 2, page_size, G, E] that the
    `tables` [rows, pages] int32 name, times the sigmoid of `gate` [T, H * E] if there is one.
    `kv_scales` [2, G] float32 are of keys' and values' heads in float8.

    Returns [T, H * E]; rows of tokens that are in no item hold anything. They are handed on as
    `emit` asks.
    """
    check_rows(query=query, gate=gate, tables=tables)
    num_tokens, num_heads, head_dim = query.shape
    output = query.new_empty(num_tokens, num_heads * head_dim)
    partials = query.new_empty(items.num_partials, num_heads, head_dim, dtype=torch.float32)
    lse = query.new_empty(items.num_partials, num_heads, dtype=torch.float32)
    if pool.dtype != FP8:
        kv_scales = None
    if pool.dtype == FP8 or head_dim not in (BLOCK, 2 * BLOCK):
        emit = Emit.VALUES
    rounded = room_for(*output.shape, output, emit)
    results = items.bases, partials, lse, scale, rounded
    kind, chip = (head_dim, query.dtype), probe(query.device)
    if len(items.wide):
        pages = pool, kv_scales, tables
        if items.num_dequantised:
            kept, kept_tables = dequantise(pool, tables, items, query.dtype)
            pages = kept, kv_scales, kept_tables
        common = (query, gate, output, *pages, *results)
        hopper = None if wide_shape else _hopper_kernel(query, pages[0], items.wide_rows)
        if hopper:
            hopper(items.wide, *common)
        else:
            is_float8 = pages[0].dtype == FP8
            shape = wide_shape or choose_shape(items.wide_rows, *kind, chip, is_float8=is_float8)
            _launch(items.wide, items.wide_rows, shape, *common)
    if len(items.narrow):
        # Decodes are most of them; how many items are padding is not known here.
        num_narrow = num_tokens // items.tokens_each * pool.shape[3]
        are_many = num_narrow > _CROWD * chip.num_sms
        counts = {"are_many": are_many, "is_float8": pool.dtype == FP8}
        common = (query, gate, output, pool, kv_scales, tables, *results)
        hopper = None if narrow_shape else _hopper_narrow_kernel(query, pool, items.narrow_rows)
        if hopper:
            hopper(items.narrow, items.narrow_rows, *common[:-1])
        else:
            rows = max(items.narrow_rows, NARROW_ROWS)
            shape = narrow_shape or choose_shape(rows, *kind, chip, **counts)
            _launch(items.narrow, rows, shape, *common)
    if items.num_combined:
        combine(partials, lse, items, gate, output, rounded)
    return handed_on(output, rounded)


def _in_words(kv: Tensor, block: int, head_dim: int, *, boxed: bool) -> Tensor | TensorDescriptor:
    """Rows of bytes [R, G * E] as rows of words."""
    words = kv.view(torch.int32)
    return TensorDescriptor.from_tensor(words, [block, head_dim // 4]) if boxed else words


def _stride(gate: Tensor | None) -> int:
    return 0 if gate is None else gate.stride(0)


def _hopper_kernel(query: Tensor, pool: Tensor, wide_rows: int) -> Callable[..., None] | None:
    """The kernel of `triton_hopper` where it can do the work."""
    if not runs_gluon(query):
        return None
    from milepost.kernels.attention import triton_hopper

    return triton_hopper.attend if triton_hopper.suits(query, pool, wide_rows) else None


def _hopper_narrow_kernel(
    query: Tensor, pool: Tensor, narrow_rows: int
) -> Callable[..., None] | None:
    """The kernel of `triton_hopper_narrow` where it can do the work."""
    if not runs_gluon(query):
        return None
    from milepost.kernels.attention import triton_hopper_narrow as narrow

    return narrow.attend if narrow.suits(query, pool, narrow_rows) else None


def _launch(
    work: Tensor,
    rows: int,
    shape: KVTiles,
    query: Tensor,
    gate: Tensor | None,
    output: Tensor,
    pool: Tensor,
    kv_scales: Tensor | None,
    tables: Tensor,
    bases: Tensor,
    partials: Tensor,
    lse: Tensor,
    scale: float,
    rounded: Fp8Rows | None,
) -> None:
    _, num_heads, head_dim = query.shape
    _, _, page_size, num_kv_heads, _ = pool.shape
    block_e = max(16, next_power_of_2(head_dim))
    kv = as_bytes(as_rows(pool).flatten(1))
    chip, is_float8 = probe(query.device), pool.dtype == FP8
    # TMA moves boxes: a block must lie in one page, and no wider than the head.
    boxed = chip.has_tma and page_size >= shape.block
    boxed = boxed and block_e == head_dim and len(kv) < MAX_ROWS
    is_native = is_float8 and chip.has_fp8
    in_words = is_native and rows < _MOST_IN_WORDS and block_e == head_dim >= 64
    _attend_kernel[(num_kv_heads, len(work))](
        query,
        gate,
        output,
        *as_arguments(rounded),
        TensorDescriptor.from_tensor(kv, [shape.block, block_e]) if boxed else kv,
        _in_words(kv, shape.block, head_dim, boxed=boxed) if in_words else None,
        kv_scales,
        tables,
        work,
        bases,
        partials,
        lse,
        scale * _LOG2_E,
        rows_per_page(pool),
        query.stride(0),
        query.stride(1),
        _stride(gate),
        tables.stride(0),
        BOXED=boxed,
        FLOAT8=is_float8,
        NATIVE=is_native,
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_E=block_e,
        PAGE_SIZE=page_size,
        ROWS=rows,
        BLOCK=shape.block,
        TAIL_STAGES=shape.tail_stages,
        KEEPS_ROWS=keeps_values(rounded),
        HAS_FP8=chip.has_fp8,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **OVERLAPPED,
    )


# The rows of a page and the length of a table follow from how much memory there is: nothing is
# compiled anew for them.
@quick
@triton.jit(do_not_specialize=["page_rows", "table_stride", "scales_stride"])
def _attend_kernel(
    query,
    gate,
    output,
    rounded,
    row_scales,
    scales_stride,
    kv,
    words,
    kv_scales,
    tables,
    items,
    bases,
    partials,
    lse,
    scale,
    page_rows,
    query_stride,
    head_stride,
    gate_stride,
    table_stride,
    BOXED: tl.constexpr,
    FLOAT8: tl.constexpr,
    NATIVE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    KEEPS_ROWS: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """One item and KV head: ROWS = tokens * GROUP query rows."""
    launch_dependents()
    i_h = tl.program_id(0)
    item = load_item(items, tl.program_id(1))
    first, num_tokens, table_row, position, begin, end, ordinal = item
    if num_tokens == 0:
        wait_as_padding()
        return
    wait_for_inputs()
    table = tables + table_row.to(tl.int64) * table_stride

    row = tl.arange(0, ROWS)
    o_e = tl.arange(0, BLOCK_E)
    ahead = row // GROUP
    token = (first + ahead).to(tl.int64)
    head = i_h * GROUP + row % GROUP
    held = (ahead < num_tokens)[:, None] & (o_e < HEAD_DIM)[None, :]
    p_q = query + token * query_stride + head * head_stride
    b_q = tl.load(p_q[:, None] + o_e[None, :], mask=held, other=0.0)
    value_scale = 1.0
    if kv_scales is not None:
        # Float16 holds what float8 holds; where a chip has no float8, it holds it over 256.
        factor: tl.constexpr = 256.0 if FLOAT8 and not NATIVE else 1.0
        scale *= tl.load(kv_scales + i_h) * factor
        value_scale = tl.load(kv_scales + KV_HEADS + i_h) * factor
        if FLOAT8 and query.dtype.element_ty == tl.bfloat16:
            b_q = fit_float16(b_q)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    sizes: tl.constexpr = (BOXED, KV_HEADS, HEAD_DIM, BLOCK_E, PAGE_SIZE, BLOCK, FLOAT8, NATIVE)
    pages = kv, words, table, end, page_rows, i_h
    # All rows see all of the blocks before this place.
    masked = begin + tl.maximum(tl.minimum(end, position + 1) - begin, 0) // BLOCK * BLOCK
    for i_kv in tl.range(begin, masked, BLOCK):
        m, l, acc = _step(m, l, acc, b_q, i_kv, position, ahead, pages, scale, False, sizes)
    for i_kv in tl.range(masked, end, BLOCK, num_stages=TAIL_STAGES):
        m, l, acc = _step(m, l, acc, b_q, i_kv, position, ahead, pages, scale, True, sizes)

    # A row that has seen nothing has an m of -inf and an acc of 0: no share of the sum.
    l = tl.where(l == 0.0, 1.0, l)
    acc = acc / l[:, None]
    if kv_scales is not None:
        acc *= value_scale
    if words is not None:
        acc = tl.permute(acc.reshape(ROWS, 4, BLOCK_E // 4), (0, 2, 1)).reshape(ROWS, BLOCK_E)
    inside = head[:, None] * HEAD_DIM + o_e[None, :]
    place = token, head, inside, held, ahead < num_tokens
    if ordinal < 0:
        targets = output, rounded, row_scales, scales_stride
        width: tl.constexpr = KV_HEADS * GROUP * HEAD_DIM
        _store(targets, acc, gate, gate_stride, place, width, KEEPS_ROWS, HAS_FP8)
    else:
        _store_partial(partials, lse, bases, acc, m, l, ordinal, place, KV_HEADS * GROUP, HEAD_DIM)


@triton.jit
def _store(
    targets,
    acc,
    gate,
    gate_stride,
    place,
    WIDTH: tl.constexpr,
    KEEPS_ROWS: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Results [ROWS, BLOCK_E] to `output` [T, WIDTH], to float8 or to both, times the sigmoid of
    `gate` if there is one. `place` are rows' tokens and heads, offsets in a token's row, and which
    are held."""
    token, head, inside, held, is_held = place
    output, rounded, row_scales, scales_stride = targets
    if gate is not None:
        b_g = tl.load(gate + token[:, None] * gate_stride + inside, mask=held, other=0.0)
        acc *= tl.sigmoid(b_g.to(tl.float32))
    b_o = acc.to(output.dtype.element_ty)
    if KEEPS_ROWS:
        tl.store(output + token[:, None] * WIDTH + inside, b_o, mask=held)
    if rounded is not None:
        values, scales = round_heads(b_o, HAS_FP8)
        tl.store(rounded + token[:, None] * WIDTH + inside, values, mask=held)
        part = tl.arange(0, scales.shape[1])
        at = (head[:, None] * scales.shape[1] + part[None, :]) * scales_stride + token[:, None]
        tl.store(row_scales + at, scales, mask=is_held[:, None])


@triton.jit
def _store_partial(
    partials, lse, bases, acc, m, l, ordinal, place, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Partial results [ROWS, BLOCK_E] to `partials` [P, HEADS, HEAD_DIM], with their LSE."""
    token, head, inside, held, is_held = place
    base = tl.load(bases + token, mask=is_held, other=0).to(tl.int64) + ordinal
    tl.store(partials + base[:, None] * (HEADS * HEAD_DIM) + inside, acc, mask=held)
    tl.store(lse + base * HEADS + head, m + tl.log2(l), mask=is_held)


@triton.jit
def _step(
    m, l, acc, b_q, i_kv, position, ahead, pages, scale, MASKED: tl.constexpr, SIZES: tl.constexpr
):
    """Take the block of KV at i_kv into the running softmax: the greatest score `m`, the sum of
    shares `l`, the sum of values `acc`. If MASKED, a row sees no KV past its own position."""
    BLOCK: tl.constexpr = SIZES[5]
    end = pages[3]
    o_kv = i_kv + tl.arange(0, BLOCK)
    b_k = load(pages, i_kv, 0, SIZES, b_q.dtype)
    b_s = dot(b_q, tl.trans(b_k))
    if MASKED:
        seen = (o_kv[None, :] <= position + ahead[:, None]) & (o_kv < end)[None, :]
        b_s = tl.where(seen, b_s, float("-inf"))
    PAGE_SIZE: tl.constexpr = SIZES[4]
    if pages[1] is None:
        b_v = load(pages, i_kv, PAGE_SIZE, SIZES, b_q.dtype)
    else:
        b_v = load_words(pages, i_kv, PAGE_SIZE, SIZES)
    if MASKED:
        # What lies past the end may be NaN, which no share of 0 would silence.
        b_v = tl.where((o_kv < end)[:, None], b_v, 0.0)
    m, l, b_p, shrink = online_softmax(m, l, b_s, scale, MASKED)
    acc = dot(b_p.to(b_v.dtype), b_v, acc * shrink[:, None])
    return m, l, acc
