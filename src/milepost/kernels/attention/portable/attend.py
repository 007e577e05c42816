"""Attention from a launch's tiles on any GPU: to heads, or to latents.

A program holds a tile of query rows and passes over its range of KV, block by block, with a running
softmax. Only the last blocks need a mask: those on the diagonal, and the one in which the sequence
ends, where the rest of the block holds anything. With a sliding window, all blocks have one.

All heads of a token read the same latents, and stand in one tile: a block of latents comes to
shared memory once, and serves as keys and values.

Legend: T tokens, H query heads, G KV heads, R = H / G, E head_dim, P partial results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from milepost.kernels.attention.arguments import AttentionCall
from milepost.kernels.attention.pages import as_bytes, as_rows, fits_tma
from milepost.kernels.attention.portable.blocks import (
    BlockSizes,
    KVPointers,
    dot,
    find_rows,
    first_block,
    first_masked,
    first_seen,
    fit_float16,
    is_read,
    load,
    load_gate,
    load_item,
    load_latents,
    load_queries,
    load_words,
)
from milepost.kernels.attention.portable.tiles import KVTiles
from milepost.kernels.attention.tiles import NARROW_ROWS
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import online_softmax
from milepost.kernels.platform.tensors import next_power_of_2

_MOST_IN_WORDS = 64
"""From this many rows on matrix units read operands from shared memory, so unpacked words would
have to be written back."""


def attend(call: AttentionCall, work: Tensor, rows: int, tiles: KVTiles) -> None:
    """Computes the results of items `work` of `rows` query rows."""
    _, num_heads, head_dim = call.query.shape
    _, _, page_size, num_kv_heads, width = call.kv.pool.shape
    chip, is_fp8 = probe(call.query.device), call.kv.is_fp8
    rows, block_e = max(rows, NARROW_ROWS), max(16, next_power_of_2(head_dim))
    kv, words = _find_pages(call, tiles.block, rows)
    _attend_kernel[(num_kv_heads * len(work),)](
        call.arguments(work),
        kv,
        words,
        call.scale_of_2,
        *call.extents,
        SIZES=BlockSizes(
            boxed=isinstance(kv, TensorDescriptor),
            float8=is_fp8,
            native=is_fp8 and chip.has_fp8,
            kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            head_dim=head_dim,
            block_e=block_e,
            latents=call.shared_query is not None,
            shared=width - head_dim,
            block_p=max(16, next_power_of_2(max(1, width - head_dim))),
            page_size=page_size,
            rows=rows,
            block=tiles.block,
            window=call.window,
        ),
        TAIL_STAGES=tiles.tail_stages,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **OVERLAPPED,
    )


def _find_pages(call: AttentionCall, block: int, rows: int) -> tuple[Any, Any]:
    """Returns the pool as rows of numbers and of words (see `KVPointers`), each a tensor or a
    descriptor."""
    pool, head_dim = call.kv.pool, call.query.shape[2]
    kv, chip = as_bytes(as_rows(pool).flatten(1)), probe(call.query.device)
    is_whole = call.shared_query is None and head_dim == max(16, next_power_of_2(head_dim))
    in_words = call.kv.is_fp8 and chip.has_fp8 and is_whole
    in_words = in_words and rows < _MOST_IN_WORDS and head_dim >= 64
    words = kv.view(torch.int32) if in_words else None
    # TMA moves boxes: a block must lie in one page, and no wider than the head.
    if not (chip.has_tma and pool.shape[2] >= block and is_whole and fits_tma(pool)):
        return kv, words
    if words is not None:
        words = TensorDescriptor.from_tensor(words, [block, head_dim // 4])
    return TensorDescriptor.from_tensor(kv, [block, head_dim]), words


@quick
@triton.jit(do_not_specialize=["page_rows", "table_stride"])
def _attend_kernel(
    call, kv, words, scale, page_rows, table_stride, SIZES: tl.constexpr, TAIL_STAGES: tl.constexpr
):
    """Attends from one item, tokens * group query rows, to one KV head. The grid has one dimension,
    as CUDA allows only 65,535 programs in others."""
    launch_dependents()
    i_h = tl.program_id(0) % SIZES.kv_heads
    item = load_item(call.work.base, tl.program_id(0) // SIZES.kv_heads)
    wait_for_inputs()
    if item.num_tokens == 0:
        return
    table = call.tables + item.table_row.to(tl.int64) * table_stride
    rows = find_rows(item, i_h, SIZES)
    b_q = load_queries(call.query, rows, rows.o_e, SIZES.head_dim)
    b_sq = None
    if SIZES.latents:
        b_sq = load_queries(call.shared_query, rows, tl.arange(0, SIZES.block_p), SIZES.shared)
    value_scale = 1.0
    if call.kv_scales is not None:
        # Float16 holds what FP8 holds; a chip without FP8 holds it divided by 256.
        factor: tl.constexpr = 256.0 if SIZES.float8 and not SIZES.native else 1.0
        scale *= tl.load(call.kv_scales + i_h) * factor
        # A latent is both key and value, with one scale.
        values: tl.constexpr = 0 if SIZES.latents else SIZES.kv_heads
        value_scale = tl.load(call.kv_scales + values + i_h) * factor
        if SIZES.float8 and call.query.base.dtype.element_ty == tl.bfloat16:
            b_q = fit_float16(b_q)
            if SIZES.latents:
                b_sq = fit_float16(b_sq)

    ROWS: tl.constexpr = SIZES.rows
    BLOCK_E: tl.constexpr = SIZES.block_e
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    first = first_seen(item, SIZES)
    pages = KVPointers(kv, words, table, first, item.end, page_rows, i_h)
    begin = first_block(item, first, SIZES)
    masked = first_masked(item, begin, SIZES)
    for i_kv in tl.range(begin, masked, SIZES.block):
        m, l, acc = _step(m, l, acc, b_q, b_sq, i_kv, item, rows, pages, scale, False, SIZES)
    for i_kv in tl.range(masked, item.end, SIZES.block, num_stages=TAIL_STAGES):
        m, l, acc = _step(m, l, acc, b_q, b_sq, i_kv, item, rows, pages, scale, True, SIZES)

    # A row without any visible key has a maximum of -inf and a sum of 0, which adds nothing to
    # partial results.
    l = tl.where(l == 0.0, 1.0, l)
    acc = acc / l[:, None]
    if call.kv_scales is not None:
        acc *= value_scale
    if words is not None:
        acc = tl.permute(acc.reshape(ROWS, 4, BLOCK_E // 4), (0, 2, 1)).reshape(ROWS, BLOCK_E)
    _store(m, l, acc, item, rows, call, SIZES)


@triton.jit
def _step(
    m, l, acc, b_q, b_sq, i_kv, item, rows, pages, scale, MASKED: tl.constexpr, SIZES: tl.constexpr
):
    """Adds the block of KV at i_kv to the running softmax: maximum score `m`, sum of weights `l`,
    sum of values `acc`. If MASKED, rows do not see KV after their own position or before their
    window."""
    o_kv = i_kv + tl.arange(0, SIZES.block)
    if SIZES.latents:
        b_k, b_shared = load_latents(pages, i_kv, SIZES, b_q.dtype)
        b_s = dot(b_sq, tl.trans(b_shared), dot(b_q, tl.trans(b_k)))
    else:
        b_k = load(pages, i_kv, 0, SIZES, b_q.dtype)
        b_s = dot(b_q, tl.trans(b_k))
    if MASKED:
        own = item.position + rows.ahead[:, None]
        seen = o_kv[None, :] <= own
        if SIZES.window != 0:
            seen = seen & (o_kv[None, :] > own - SIZES.window)
        b_s = tl.where(seen & (o_kv < item.end)[None, :], b_s, float("-inf"))
    if SIZES.latents:
        b_v = b_k
    elif pages.words is None:
        b_v = load(pages, i_kv, SIZES.page_size, SIZES, b_q.dtype)
    else:
        b_v = load_words(pages, i_kv, SIZES.page_size, SIZES)
    if MASKED and not SIZES.latents:
        # Values outside may be NaN, and a weight of 0 times NaN is NaN.
        b_v = tl.where(is_read(pages, o_kv, SIZES)[:, None], b_v, 0.0)
    m, l, b_p, shrink = online_softmax(m, l, b_s, scale, MASKED)
    acc = dot(b_p.to(b_v.dtype), b_v, acc * shrink[:, None])
    return m, l, acc


@triton.jit
def _store(m, l, acc, item, rows, call, SIZES: tl.constexpr):
    """Writes results, times the sigmoid of the gates if there are any; or partial results with
    their LSE."""
    HEADS: tl.constexpr = SIZES.kv_heads * SIZES.group
    WIDTH: tl.constexpr = HEADS * SIZES.head_dim
    gate, output, partials = call.gate, call.output, call.partials
    token, head, is_held = rows.token, rows.head, rows.are_held
    held = is_held[:, None] & (rows.o_e < SIZES.head_dim)[None, :]
    inside = head[:, None] * SIZES.head_dim + rows.o_e[None, :]
    if item.ordinal < 0:
        if gate.base is not None:
            b_g = load_gate(gate, token[:, None], inside, held)
            acc *= tl.sigmoid(b_g.to(tl.float32))
        b_o = acc.to(output.dtype.element_ty)
        tl.store(output + token[:, None] * WIDTH + inside, b_o, mask=held)
    else:
        base = tl.load(call.work.bases + token, mask=is_held, other=0).to(tl.int64) + item.ordinal
        tl.store(partials.base + base[:, None] * WIDTH + inside, acc, mask=held)
        tl.store(partials.lse + base * HEADS + head, m + tl.log2(l), mask=is_held)
