"""Narrow tiles of attention over FP8 KV on Hopper: decodes, which wait for memory.

Keys and values come to a ring in shared memory by TMA, and each thread loads the numbers that it
multiplies from there. A block's tokens are the rows of its scores, which warps divide among them,
and a value's dimensions those of the result; so query rows are columns: matrix units take eight at
a time, and none is wasted. Four dimensions of a token form a word, and each makes a result
of its own; the words of two tokens become pairs of float16, which holds what FP8 holds.

Legend: T tokens, H query heads, G KV heads, E head_dim, P partial results.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from milepost.kernels.attention.arguments import AttentionCall
from milepost.kernels.attention.hopper.narrow_parts import (
    KVStream,
    NarrowSizes,
    RunningResult,
    fetch_both,
    take,
)
from milepost.kernels.attention.pages import as_bytes, as_rows
from milepost.kernels.attention.portable.blocks import load_gate, load_item
from milepost.kernels.attention.table import HOPPER_BLOCK
from milepost.kernels.platform.gluon import boxes_of, thread_barrier
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs

_STAGES, _WARPS = 3, 4
"""Stages and warps that let two programs share an SM."""


def attend(call: AttentionCall, work: Tensor, rows: int, tiles: None = None) -> None:  # noqa: ARG001
    """Computes the results of `work`, narrow items of `rows` query rows."""
    _, num_heads, head_dim = call.query.shape
    _, _, page_size, num_kv_heads, _ = call.kv.pool.shape
    kv = as_bytes(as_rows(call.kv.pool).flatten(1))
    box = min(HOPPER_BLOCK, page_size)
    _attend_kernel[(num_kv_heads * len(work),)](
        call.arguments(work),
        boxes_of(kv, box, head_dim),
        boxes_of(kv.view(torch.int32), box, head_dim // 4),
        call.scale_of_2,
        *call.extents,
        SIZES=NarrowSizes(
            kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            rows=rows,
            block=HOPPER_BLOCK,
            stages=_STAGES,
        ),
        num_warps=_WARPS,
        **OVERLAPPED,
    )


@quick
@gluon.jit(do_not_specialize=["page_rows", "table_stride"])
def _attend_kernel(call, keys, values, scale, page_rows, table_stride, SIZES: gl.constexpr):
    """Attends from one item to one KV head; warps divide tokens of scores, and dimensions of
    results. The grid has one dimension, as CUDA allows only 65,535 programs in others."""
    ROWS: gl.constexpr = SIZES.rows
    BLOCK: gl.constexpr = SIZES.block
    STAGES: gl.constexpr = SIZES.stages
    TILES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    COLUMN: gl.constexpr = gl.SliceLayout(0, TILES)
    WORDS: gl.constexpr = SIZES.head_dim // 4
    i_h = gl.program_id(0) % SIZES.kv_heads
    ring = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK, SIZES.head_dim], keys.layout)
    word_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK, WORDS], values.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(2 * STAGES):
        mbarrier.init(bars.index(bar), count=1)
    thread_barrier()
    launch_dependents()
    item = load_item(call.work.base, gl.program_id(0) // SIZES.kv_heads)
    begin, end, position = item.begin, item.end, item.position
    table = call.tables + item.table_row.to(gl.int64) * table_stride
    stream = KVStream(keys, values, ring, word_ring, bars, table, page_rows, i_h, begin, end)
    # KV before the item's first token was written in an earlier step, or by an earlier pass of a
    # draft head.
    earlier = gl.minimum(position, end)
    for i_b in gl.static_range(STAGES):
        if begin + (i_b + 1) * BLOCK <= earlier:
            fetch_both(stream, i_b, SIZES)
    wait_for_inputs()
    if item.num_tokens == 0:
        return
    for i_b in gl.static_range(STAGES):
        if (begin + i_b * BLOCK < end) & (begin + (i_b + 1) * BLOCK > earlier):
            fetch_both(stream, i_b, SIZES)

    b_q = _load_queries(call.query, item, i_h, TILES, SIZES)
    scale *= gl.load(call.kv_scales + i_h)

    m = gl.full([ROWS], float("-inf"), gl.float32, COLUMN)
    l = gl.zeros([BLOCK, ROWS], gl.float32, TILES)
    acc = gl.zeros([WORDS, ROWS], gl.float32, TILES)
    ahead = gl.arange(0, ROWS, COLUMN) // SIZES.group
    last_seen = gl.minimum(position + ahead, end - 1)
    # All rows see all of the blocks before this one.
    num_whole = gl.maximum(gl.minimum(end, position + 1) - begin, 0) // BLOCK
    count = (end - begin + BLOCK - 1) // BLOCK
    state = RunningResult(m, l, acc, acc, acc, acc)
    for i_b in range(num_whole):
        state = take(state, b_q, i_b, stream, scale, last_seen, False, SIZES)
    for i_b in range(num_whole, count):
        state = take(state, b_q, i_b, stream, scale, last_seen, True, SIZES)

    total = gl.sum(state.l, 0)
    # A row that has seen nothing has an m of -inf and an acc of 0: it adds nothing to the sum.
    total = gl.where(total == 0.0, 1.0, total)
    by = (gl.load(call.kv_scales + SIZES.kv_heads + i_h) / total)[None, :]
    # The four numbers of a word are adjacent again.
    even = gl.join(state.acc0 * by, state.acc2 * by)
    b_o = gl.join(even, gl.join(state.acc1 * by, state.acc3 * by))
    b_lse = state.m + gl.log2(total)
    _store(call, item, i_h, b_o, b_lse, SIZES)


@gluon.jit
def _load_queries(query, item, i_h, TILES: gl.constexpr, SIZES: gl.constexpr):
    """Loads queries [head_dim, ROWS] in float16, clamped to its range, which bfloat16 exceeds."""
    GROUP: gl.constexpr = SIZES.group
    QUERIES: gl.constexpr = gl.DotOperandLayout(1, TILES, 16)
    row = gl.arange(0, SIZES.rows, gl.SliceLayout(0, QUERIES))
    o_e = gl.arange(0, SIZES.head_dim, gl.SliceLayout(1, QUERIES))
    token = (item.first + row // GROUP).to(gl.int64)
    p_q = query.base + token * query.stride + (i_h * GROUP + row % GROUP) * query.head_stride
    held = (row // GROUP < item.num_tokens)[None, :] & (o_e >= 0)[:, None]
    b_q = gl.load(p_q[None, :] + o_e[:, None], mask=held, other=0.0).to(gl.float32)
    return gl.minimum(gl.maximum(b_q, -65504.0), 65504.0).to(gl.float16)


@gluon.jit
def _store(call, item, i_h, b_o, b_lse, SIZES: gl.constexpr):
    """Writes results [WORDS, ROWS, 2, 2], times the sigmoid of the gates if there are any; or
    partial results with their LSE [ROWS]."""
    gate, output, partials = call.gate, call.output, call.partials
    GROUP: gl.constexpr = SIZES.group
    HEADS: gl.constexpr = SIZES.kv_heads * GROUP
    WORDS: gl.constexpr = b_o.type.shape[0]
    ROWS: gl.constexpr = b_o.type.shape[1]
    o_w = gl.arange(0, WORDS, _axis(b_o, 0))[:, None, None, None]
    o_i = gl.arange(0, 2, _axis(b_o, 2))[None, None, :, None]
    o_k = gl.arange(0, 2, _axis(b_o, 3))[None, None, None, :]
    row = gl.arange(0, ROWS, _axis(b_o, 1))
    o_e = 4 * o_w + 2 * o_i + o_k
    inside = (i_h * GROUP + row % GROUP)[None, :, None, None] * (4 * WORDS) + o_e
    is_held = row // GROUP < item.num_tokens
    held = is_held[None, :, None, None] & (o_e >= 0)
    token = (item.first + row // GROUP).to(gl.int64)
    WIDTH: gl.constexpr = HEADS * WORDS * 4
    if item.ordinal >= 0:
        base = gl.load(call.work.bases + token, mask=is_held, other=0).to(gl.int64) + item.ordinal
        gl.store(partials.base + base[None, :, None, None] * WIDTH + inside, b_o, mask=held)
        p_lse = partials.lse + base * HEADS + i_h * GROUP + row % GROUP
        gl.store(p_lse, gl.convert_layout(b_lse, base.type.layout), mask=is_held)
    else:
        at = token[None, :, None, None]
        if gate.base is not None:
            b_g = load_gate(gate, at, inside, held)
            b_o = b_o / (1.0 + gl.exp2(b_g.to(gl.float32) * -1.4426950408889634))
        gl.store(output + at * WIDTH + inside, b_o.to(output.dtype.element_ty), mask=held)


@gluon.constexpr_function
def _axis(x, axis):
    """Returns the layout of numbers along one of four axes."""
    layout = x.type.layout
    for other in (3, 2, 1, 0):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout
