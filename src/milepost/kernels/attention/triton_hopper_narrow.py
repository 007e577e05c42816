"""Narrow tiles of attention over float8 KV on Hopper, in Gluon: decodes, which wait for memory.

Keys and values come to a ring in shared memory by TMA, and every number of a thread from there as
it is multiplied. A block's tokens are the rows of its scores, which warps divide among them, and a
value's dimensions those of the result; so query rows are columns, of which matrix units take eight
at a time, and none is there for nothing. Four dimensions of a token stand in a word, and each makes
a result of its own; the words of two tokens become pairs of float16, which holds what float8 holds.

Legend: T tokens, H query heads, G KV heads, E head_dim, P partial results.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.attention.pages import MAX_ROWS, as_bytes, as_rows, rows_per_page
from milepost.kernels.platform.gluon import (
    launch_dependents,
    load_box,
    thread_barrier,
    wait_as_padding,
    wait_for_inputs,
)
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.platform.tensors import FP8

_LOG2_E = 1.4426950408889634
_BLOCK, _STAGES, _WARPS = 64, 3, 4
"""So that two programs share an SM."""
_MOST_ROWS = 16
"""More queries than these don't fit the registers."""
_BYTES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_WORDS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
_UNPACK = gl.constexpr("""{
    .reg .b32 low, high;
    .reg .b16 p0, p1, p2, p3;
    prmt.b32 low, $4, $5, 0x5140;
    prmt.b32 high, $4, $5, 0x7362;
    mov.b32 {p0, p1}, low;
    mov.b32 {p2, p3}, high;
    cvt.rn.f16x2.e4m3x2 $0, p0;
    cvt.rn.f16x2.e4m3x2 $1, p1;
    cvt.rn.f16x2.e4m3x2 $2, p2;
    cvt.rn.f16x2.e4m3x2 $3, p3;
}""")
"""Two words of four float8 to pairs of float16."""


def suits(query: Tensor, pool: Tensor, narrow_rows: int) -> bool:
    """Whether the kernel can do this work, where `runs_gluon`."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and pool.dtype == FP8
        and query.shape[2] == 256
        and narrow_rows <= _MOST_ROWS
        and len(as_rows(pool)) < MAX_ROWS
    )


def attend(
    work: Tensor,
    rows: int,
    query: Tensor,
    gate: Tensor | None,
    output: Tensor,
    pool: Tensor,
    kv_scales: Tensor,
    tables: Tensor,
    bases: Tensor,
    partials: Tensor,
    lse: Tensor,
    scale: float,
) -> None:
    """Write the results of `work`, which are narrow items of so many `rows`, to `output`
    [T, H * E], or to `partials` [P, H, E] and `lse` [P, H]. `kv_scales` [2, G] are what keys and
    values are over."""
    _, num_heads, head_dim = query.shape
    _, _, page_size, num_kv_heads, _ = pool.shape
    kv = as_bytes(as_rows(pool).flatten(1))
    box = min(_BLOCK, page_size)
    _attend_kernel[(num_kv_heads, len(work))](
        query,
        gate,
        output,
        TensorDescriptor.from_tensor(kv, [box, head_dim], _BYTES),
        TensorDescriptor.from_tensor(kv.view(torch.int32), [box, head_dim // 4], _WORDS),
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
        0 if gate is None else gate.stride(0),
        tables.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        ROWS=rows,
        BLOCK=_BLOCK,
        STAGES=_STAGES,
        num_warps=_WARPS,
        **OVERLAPPED,
    )


@quick
@gluon.jit(do_not_specialize=["page_rows", "table_stride"])
def _attend_kernel(
    query,
    gate,
    output,
    keys,
    values,
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
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One item and KV head; warps divide tokens of scores, and dimensions of results."""
    TILES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    COLUMN: gl.constexpr = gl.SliceLayout(0, TILES)
    WORDS: gl.constexpr = HEAD_DIM // 4
    i_h = gl.program_id(0)
    item = items + gl.program_id(1) * 8
    ring = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK, HEAD_DIM], keys.layout)
    word_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, WORDS], values.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(2 * STAGES):
        mbarrier.init(bars.index(bar), count=1)
    thread_barrier()
    launch_dependents()
    first = gl.load(item)
    num_tokens = gl.load(item + 1)
    table = tables + gl.load(item + 2).to(gl.int64) * table_stride
    position = gl.load(item + 3)
    begin = gl.load(item + 4)
    end = gl.load(item + 5)
    ordinal = gl.load(item + 6)
    pages = keys, values, ring, word_ring, bars, table, page_rows, i_h, begin, end
    # KV before the item's first token was written in an earlier step, or pass of a head.
    earlier = gl.minimum(position, end)
    for i_b in gl.static_range(STAGES):
        if begin + (i_b + 1) * BLOCK <= earlier:
            _fetch_both(pages, i_b, BLOCK, PAGE_SIZE, STAGES)
    if num_tokens == 0:
        wait_as_padding()
        return
    wait_for_inputs()
    for i_b in gl.static_range(STAGES):
        if (begin + i_b * BLOCK < end) & (begin + (i_b + 1) * BLOCK > earlier):
            _fetch_both(pages, i_b, BLOCK, PAGE_SIZE, STAGES)

    strides = query_stride, head_stride
    b_q = _load_queries(query, strides, first, num_tokens, i_h, TILES, GROUP, ROWS, HEAD_DIM)
    scale *= gl.load(kv_scales + i_h)

    m = gl.full([ROWS], float("-inf"), gl.float32, COLUMN)
    l = gl.zeros([BLOCK, ROWS], gl.float32, TILES)
    acc0 = gl.zeros([WORDS, ROWS], gl.float32, TILES)
    acc1, acc2, acc3 = acc0, acc0, acc0
    ahead = gl.arange(0, ROWS, COLUMN) // GROUP
    last_seen = gl.minimum(position + ahead, end - 1)
    # All rows see all of the blocks before this one.
    num_whole = gl.maximum(gl.minimum(end, position + 1) - begin, 0) // BLOCK
    count = (end - begin + BLOCK - 1) // BLOCK
    state = m, l, acc0, acc1, acc2, acc3
    for i_b in range(num_whole):
        state = _take(state, b_q, i_b, pages, scale, last_seen, False, BLOCK, PAGE_SIZE, STAGES)
    for i_b in range(num_whole, count):
        state = _take(state, b_q, i_b, pages, scale, last_seen, True, BLOCK, PAGE_SIZE, STAGES)
    m, l, acc0, acc1, acc2, acc3 = state

    total = gl.sum(l, 0)
    # A row that has seen nothing has an m of -inf and an acc of 0: no share of the sum.
    total = gl.where(total == 0.0, 1.0, total)
    by = (gl.load(kv_scales + KV_HEADS + i_h) / total)[None, :]
    # The four numbers of a word stand side by side again.
    even = gl.join(acc0 * by, acc2 * by)
    b_o = gl.join(even, gl.join(acc1 * by, acc3 * by))
    targets = gate, gate_stride, output, bases, partials, lse
    place = first, num_tokens, ordinal, i_h
    _store(targets, place, b_o, m + gl.log2(total), KV_HEADS, GROUP)


@gluon.jit
def _load_queries(
    query,
    strides,
    first,
    num_tokens,
    i_h,
    TILES: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """[HEAD_DIM, ROWS] in float16, beyond which bfloat16 reaches."""
    QUERIES: gl.constexpr = gl.DotOperandLayout(1, TILES, 16)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, QUERIES))
    o_e = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, QUERIES))
    token = (first + row // GROUP).to(gl.int64)
    p_q = query + token * strides[0] + (i_h * GROUP + row % GROUP) * strides[1]
    held = (row // GROUP < num_tokens)[None, :] & (o_e >= 0)[:, None]
    b_q = gl.load(p_q[None, :] + o_e[:, None], mask=held, other=0.0).to(gl.float32)
    return gl.minimum(gl.maximum(b_q, -65504.0), 65504.0).to(gl.float16)


@gluon.jit
def _store(targets, place, b_o, b_lse, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Results [WORDS, ROWS, 2, 2] to `output`, times the sigmoid of `gate` if there is one; or to
    `partials`, with their LSE [ROWS]."""
    gate, gate_stride, output, bases, partials, lse = targets
    first, num_tokens, ordinal, i_h = place
    HEADS: gl.constexpr = KV_HEADS * GROUP
    WORDS: gl.constexpr = b_o.type.shape[0]
    ROWS: gl.constexpr = b_o.type.shape[1]
    o_w = gl.arange(0, WORDS, _axis(b_o, 0))[:, None, None, None]
    o_i = gl.arange(0, 2, _axis(b_o, 2))[None, None, :, None]
    o_k = gl.arange(0, 2, _axis(b_o, 3))[None, None, None, :]
    row = gl.arange(0, ROWS, _axis(b_o, 1))
    o_e = 4 * o_w + 2 * o_i + o_k
    inside = (i_h * GROUP + row % GROUP)[None, :, None, None] * (4 * WORDS) + o_e
    is_held = row // GROUP < num_tokens
    held = is_held[None, :, None, None] & (o_e >= 0)
    token = (first + row // GROUP).to(gl.int64)
    WIDTH: gl.constexpr = HEADS * WORDS * 4
    if ordinal >= 0:
        base = gl.load(bases + token, mask=is_held, other=0).to(gl.int64) + ordinal
        gl.store(partials + base[None, :, None, None] * WIDTH + inside, b_o, mask=held)
        p_lse = lse + base * HEADS + i_h * GROUP + row % GROUP
        gl.store(p_lse, gl.convert_layout(b_lse, base.type.layout), mask=is_held)
    else:
        at = token[None, :, None, None]
        if gate is not None:
            b_g = gl.load(gate + at * gate_stride + inside, mask=held, other=0.0)
            b_o = b_o / (1.0 + gl.exp2(b_g.to(gl.float32) * -1.4426950408889634))
        gl.store(output + at * WIDTH + inside, b_o.to(output.dtype.element_ty), mask=held)


@gluon.constexpr_function
def _axis(x, axis):
    """The layout of what goes along one axis of four."""
    layout = x.type.layout
    for other in (3, 2, 1, 0):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _find(pages, i_b, BLOCK: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """The row that a block's keys begin at in each of its pages; past the end the table names pages
    that are not the sequence's, or none."""
    table, page_rows, begin, end = pages[5], pages[6], pages[8], pages[9]
    rows = ()
    for ahead in gl.static_range(0, BLOCK, min(BLOCK, PAGE_SIZE)):
        i_kv = begin + i_b * BLOCK + ahead
        page = gl.load(table + i_kv // PAGE_SIZE, mask=i_kv < end, other=0)
        rows += (page * page_rows + i_kv % PAGE_SIZE,)
    return rows


@gluon.jit
def _fetch_both(pages, i_b, BLOCK: gl.constexpr, PAGE_SIZE: gl.constexpr, STAGES: gl.constexpr):
    """Have a block's keys and values loaded."""
    rows = _find(pages, i_b, BLOCK, PAGE_SIZE)
    _fetch(pages, rows, i_b, 0, BLOCK, PAGE_SIZE, STAGES)
    _fetch(pages, rows, i_b, 1, BLOCK, PAGE_SIZE, STAGES)


@gluon.jit
def _fetch(
    pages,
    rows,
    i_b,
    OF_VALUES: gl.constexpr,
    BLOCK: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Have a block's keys or values loaded."""
    kv, ring, bars, i_h = pages[OF_VALUES], pages[2 + OF_VALUES], pages[4], pages[7]
    BOX: gl.constexpr = min(BLOCK, PAGE_SIZE)
    SIZE: gl.constexpr = ring.shape[2]
    bar, stage = bars.index(OF_VALUES * STAGES + i_b % STAGES), ring.index(i_b % STAGES)
    mbarrier.expect(bar, BLOCK * SIZE * (4 if OF_VALUES else 1))
    for box in gl.static_range(BLOCK // BOX):
        row = rows[box] + OF_VALUES * PAGE_SIZE
        load_box(kv, [row, i_h * SIZE], bar, stage.slice(box * BOX, BOX))


@gluon.jit
def _take(
    state,
    b_q,
    i_b,
    pages,
    scale,
    last_seen,
    MASKED: gl.constexpr,
    BLOCK: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Take a block into the running softmax, and have another loaded in its place."""
    m, l, acc0, acc1, acc2, acc3 = state
    TILES: gl.constexpr = l.type.layout
    ROWS: gl.constexpr = l.type.shape[1]
    KEYS: gl.constexpr = gl.DotOperandLayout(0, TILES, 16)
    VALUES: gl.constexpr = gl.DotOperandLayout(0, TILES, 2)
    SHARES: gl.constexpr = gl.DotOperandLayout(1, TILES, 2)
    ring, word_ring, bars = pages[2], pages[3], pages[4]
    begin, end = pages[8], pages[9]
    stage, phase = i_b % STAGES, i_b // STAGES & 1
    is_next = begin + (i_b + STAGES) * BLOCK < end
    rows = _find(pages, i_b + STAGES, BLOCK, PAGE_SIZE)
    mbarrier.wait(bars.index(stage), phase)
    b_k = ring.index(stage).load(KEYS).to(gl.float8e4nv, bitcast=True).to(gl.float16)
    b_s = mma_v2(b_k, b_q, gl.zeros([BLOCK, ROWS], gl.float32, TILES)) * scale
    if MASKED:
        o_kv = begin + i_b * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, TILES))
        b_s = gl.where(o_kv[:, None] <= last_seen[None, :], b_s, float("-inf"))
    m_new = gl.maximum(m, gl.max(b_s, 0))
    thread_barrier()
    if is_next:
        _fetch(pages, rows, i_b + STAGES, 0, BLOCK, PAGE_SIZE, STAGES)
    base = m_new
    if MASKED:
        # A row that has seen nothing yet has no m to subtract.
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = gl.exp2(b_s - base[None, :])
    shrink = gl.exp2(m - base)[None, :]
    m = m_new
    l = l * shrink + b_p
    b_p = gl.convert_layout(b_p.to(gl.float16), SHARES)
    mbarrier.wait(bars.index(STAGES + stage), phase)
    b_w = word_ring.index(stage).permute((1, 0)).load(VALUES)
    if MASKED:
        # What lies past the end may be NaN, which no share of 0 would silence.
        o_kv = begin + i_b * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, VALUES))
        b_w = gl.where((o_kv < end)[None, :], b_w, 0)
    b_0, b_1, b_2, b_3 = gl.inline_asm_elementwise(
        _UNPACK, "=r,=r,=r,=r,r,r", [b_w], dtype=(gl.float16,) * 4, is_pure=True, pack=2
    )
    acc0 = mma_v2(b_0, b_p, acc0 * shrink)
    acc1 = mma_v2(b_1, b_p, acc1 * shrink)
    acc2 = mma_v2(b_2, b_p, acc2 * shrink)
    acc3 = mma_v2(b_3, b_p, acc3 * shrink)
    thread_barrier()
    if is_next:
        _fetch(pages, rows, i_b + STAGES, 1, BLOCK, PAGE_SIZE, STAGES)
    return m, l, acc0, acc1, acc2, acc3
