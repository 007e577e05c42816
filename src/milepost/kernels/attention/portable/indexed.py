"""Triton: attention to what an indexer selects, as `attention.indexed` defines it, with a program
per token and KV head.

Legend: T tokens, H query heads, G KV heads, E head_dim.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.attention.arguments import OutputGate
from milepost.kernels.attention.indexed import IndexedTokens, Selection
from milepost.kernels.attention.pages import PagedKV, rows_per_page
from milepost.kernels.attention.portable.blocks import dot, load_gate
from milepost.kernels.attention.portable.scores import LAST, select, sizes_of
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import online_softmax
from milepost.kernels.platform.tensors import next_power_of_2


def attend(
    query: Tensor,
    gate: Tensor | None,
    kv: PagedKV,
    tokens: IndexedTokens,
    scale: float,
    selection: Selection,
) -> Tensor:
    """See `attention.indexed.attend`; rows of padding are undefined."""
    assert kv.tables is not None, "tokens name rows of page tables"
    num_tokens, num_heads, head_dim = query.shape
    output = query.new_empty(num_tokens, num_heads * head_dim)
    if not num_tokens:
        return output
    sizes = sizes_of(kv, selection)
    selected = select(kv, tokens, selection, sizes)
    group = num_heads // sizes.kv_heads
    _attend_kernel[(sizes.kv_heads * num_tokens,)](
        query,
        OutputGate.of(gate, output.shape[1]),
        selected,
        tokens.rows,
        tokens.positions,
        kv.pool,
        kv.tables,
        kv.tables.stride(0),
        rows_per_page(kv.pool),
        output,
        scale / math.log(2),
        NUM_SELECTED=selected.shape[1],
        GROUP=group,
        ROWS=max(16, next_power_of_2(group)),
        BLOCK_E=max(16, next_power_of_2(head_dim)),
        BLOCK=64 if query.element_size() == 2 else 32,
        SIZES=sizes,
        num_warps=4,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit(do_not_specialize=["table_stride", "page_rows"])
def _attend_kernel(
    query,
    gate,
    selected,
    rows,
    positions,
    pool,
    tables,
    table_stride,
    page_rows,
    output,
    scale,
    NUM_SELECTED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Attends from a token's query heads of one KV head: first to selected blocks, then to the
    tokens after the last whole block. The grid has one dimension, as CUDA allows only 65,535
    programs in others."""
    launch_dependents()
    wait_for_inputs()
    i_h = tl.program_id(0) % SIZES.kv_heads
    i_t = (tl.program_id(0) // SIZES.kv_heads).to(tl.int64)
    row = tl.load(rows + i_t)
    if row < 0:
        return
    position = tl.load(positions + i_t)
    table = tables + row.to(tl.int64) * table_stride
    E: tl.constexpr = SIZES.head_dim
    o_r, o_e = tl.arange(0, ROWS), tl.arange(0, BLOCK_E)
    held = (o_r < GROUP)[:, None] & (o_e < E)[None, :]
    inside = (i_h * GROUP + o_r)[:, None] * E + o_e[None, :]
    WIDTH: tl.constexpr = SIZES.kv_heads * GROUP * E
    b_q = tl.load(query + i_t * WIDTH + inside, held, 0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    whole = (position + 1) // SIZES.ratio
    o_kv = tl.arange(0, BLOCK)
    num = tl.minimum(whole, NUM_SELECTED) * SIZES.ratio
    for i_kv in range(0, num, BLOCK):
        is_kv = i_kv + o_kv < num
        place = (i_kv + o_kv) // SIZES.ratio
        chosen = tl.load(selected + i_t * NUM_SELECTED + place, is_kv, 0)
        block = (chosen & LAST).to(tl.int32) ^ LAST
        own = tl.where(is_kv, block * SIZES.ratio + (i_kv + o_kv) % SIZES.ratio, 0)
        m, l, acc = _step(
            m, l, acc, b_q, own, is_kv, i_h, pool, table, page_rows, o_e, scale, SIZES
        )
    for i_kv in range(whole * SIZES.ratio, position + 1, BLOCK):
        is_kv = i_kv + o_kv <= position
        own = tl.where(is_kv, i_kv + o_kv, 0)
        m, l, acc = _step(
            m, l, acc, b_q, own, is_kv, i_h, pool, table, page_rows, o_e, scale, SIZES
        )
    acc = acc / l[:, None]
    if gate.base is not None:
        b_g = load_gate(gate, i_t, inside, held)
        acc *= tl.sigmoid(b_g.to(tl.float32))
    tl.store(output + i_t * WIDTH + inside, acc.to(output.dtype.element_ty), held)


@triton.jit
def _step(
    m, l, acc, b_q, position, is_kv, i_h, pool, table, page_rows, o_e, scale, SIZES: tl.constexpr
):
    """Adds the KV at some positions to the running softmax."""
    E: tl.constexpr = SIZES.head_dim
    page = tl.load(table + position // SIZES.page_size).to(tl.int64)
    row = page * page_rows + position % SIZES.page_size
    p_kv = pool + (row * SIZES.kv_heads + i_h)[:, None] * E + o_e[None, :]
    inside = is_kv[:, None] & (o_e < E)[None, :]
    b_k = tl.load(p_kv, inside, 0.0)
    b_s = tl.where(is_kv[None, :], dot(b_q, tl.trans(b_k)), float("-inf"))
    b_v = tl.load(p_kv + SIZES.page_size * SIZES.kv_heads * E, inside, 0.0)
    m, l, b_p, shrink = online_softmax(m, l, b_s, scale, True)
    return m, l, dot(b_p.to(b_v.dtype), b_v, acc * shrink[:, None])
