"""Wide tiles of attention on Hopper, in Gluon: Triton's language for programs that place data and
divide work among warps themselves.

One warp loads KV with TMA; two groups of four warps take half of a tile's rows each and go through
the same blocks. They don't wait for each other, and a group has a block's scores and the values of
the block before multiplied while it works on shares, so matrix products run while exponentials do
(as in FlashAttention-3, arXiv 2407.08608). Everything else is as in `triton`, whose kernel does the
same work on any chip.

Legend: T tokens, H query heads, G KV heads, E head_dim, P partial results.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.attention.pages import MAX_ROWS, as_rows, rows_per_page
from milepost.kernels.attention.triton_hopper_parts import (
    add_values,
    attend_blocks,
    clean,
    load_item,
    store,
)
from milepost.kernels.layout.emit import Fp8Rows, keeps_values
from milepost.kernels.platform.gluon import (
    launch_dependents,
    load_box,
    wait_as_padding,
    wait_for_inputs,
)
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.platform.tensors import BLOCK

ROWS = 128
_LOG2_E = 1.4426950408889634
_BLOCK = 64
_STAGES = 2
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24


def suits(query: Tensor, pool: Tensor, wide_rows: int) -> bool:
    """Whether the kernel can do this work, where `runs_gluon`."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and pool.dtype == query.dtype
        and query.shape[2] in (128, 256)
        and pool.shape[2] >= _BLOCK
        and len(as_rows(pool)) < MAX_ROWS
        and wide_rows == ROWS
    )


def attend(
    work: Tensor,
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
    rounded: Fp8Rows | None = None,
) -> None:
    """Write the results of `work`, which are wide items, to `output` [T, H * E], or to `partials`
    [P, H, E] and `lse` [P, H]. `kv_scales` [2, G] are what keys and values are over. Whole results
    are `rounded` too if there is room for that, which may be all there is."""
    _, num_heads, head_dim = query.shape
    _, _, page_size, num_kv_heads, _ = pool.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    kv = as_rows(pool).flatten(1)
    _attend_kernel[(num_kv_heads, len(work))](
        query,
        query if gate is None else gate,
        output,
        output if rounded is None else rounded.values,
        lse if rounded is None else rounded.scales,
        TensorDescriptor.from_tensor(kv, [_BLOCK, head_dim], layout),
        query if kv_scales is None else kv_scales,
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
        0 if rounded is None else rounded.scales.stride(0),
        tables.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        STAGES=_STAGES,
        GATED=gate is not None,
        SCALED=kv_scales is not None,
        DEPTH=0 if rounded is None else BLOCK,
        KEEPS_ROWS=keeps_values(rounded),
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
        **OVERLAPPED,
    )


@quick
@gluon.jit(do_not_specialize=["page_rows", "table_stride", "scales_stride"])
def _attend_kernel(
    query,
    gate,
    output,
    rounded,
    row_scales,
    kv,
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
    scales_stride,
    table_stride,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    SCALED: gl.constexpr,
    DEPTH: gl.constexpr,
    KEEPS_ROWS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """One item and KV head. Padding has no KV and no rows, so nothing is read or written for it."""
    i_h = gl.program_id(0)
    item = items + gl.program_id(1) * 8
    launch_dependents()
    num_tokens = gl.load(item + 1)
    if num_tokens == 0:
        wait_as_padding()
        return
    wait_for_inputs()
    table = tables + gl.load(item + 2).to(gl.int64) * table_stride
    begin = gl.load(item + 4)
    end = gl.load(item + 5)
    dtype: gl.constexpr = query.dtype.element_ty
    queries = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], kv.layout)
    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, HEAD_DIM], kv.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, HEAD_DIM], kv.layout)
    # Blocks of keys loaded and used up, blocks of values loaded and used up.
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
        mbarrier.init(bars.index(STAGES + stage), count=2)
        mbarrier.init(bars.index(2 * STAGES + stage), count=1)
        mbarrier.init(bars.index(3 * STAGES + stage), count=2)
    consumed = (query, gate, output, kv_scales, item, bases, partials, lse, scale, i_h)
    consumed += (query_stride, head_stride, gate_stride, queries, keys, values, bars)
    consumed += ((rounded, row_scales, scales_stride),)
    FORM: gl.constexpr = (DEPTH, KEEPS_ROWS)
    produced = (kv, table, begin, end, page_rows, i_h, keys, values, bars)
    gl.warp_specialize(
        [
            (
                _consume,
                (consumed, 0, KV_HEADS, GROUP, HEAD_DIM, BLOCK, STAGES, GATED, SCALED, FORM),
            ),
            (
                _consume,
                (consumed, 1, KV_HEADS, GROUP, HEAD_DIM, BLOCK, STAGES, GATED, SCALED, FORM),
            ),
            (_produce, (produced, HEAD_DIM, PAGE_SIZE, BLOCK, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(
    produced,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load every block of the range, as soon as its place is free."""
    kv, table, begin, end, page_rows, i_h, keys, values, bars = produced
    size: gl.constexpr = BLOCK * HEAD_DIM * 2
    column = i_h * HEAD_DIM
    i_b = 0
    for i_kv in range(begin, end, BLOCK):
        stage = i_b % STAGES
        # A barrier's phase before its first is over.
        phase = (i_b // STAGES & 1) ^ 1
        row = gl.load(table + i_kv // PAGE_SIZE) * page_rows + i_kv % PAGE_SIZE
        mbarrier.wait(bars.index(STAGES + stage), phase)
        loaded = bars.index(stage)
        mbarrier.expect(loaded, size)
        load_box(kv, [row, column], loaded, keys.index(stage))
        mbarrier.wait(bars.index(3 * STAGES + stage), phase)
        loaded = bars.index(2 * STAGES + stage)
        mbarrier.expect(loaded, size)
        load_box(kv, [row + PAGE_SIZE, column], loaded, values.index(stage))
        i_b += 1  # noqa: SIM113


@gluon.jit
def _consume(
    consumed,
    half: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    SCALED: gl.constexpr,
    FORM: gl.constexpr,
):
    """Half of the tile's rows: 64 of them in four warps."""
    query, gate, output, kv_scales, item, bases, partials, lse, scale, i_h = consumed[:10]
    query_stride, head_stride, gate_stride, queries, keys, values, bars, rounded = consumed[10:]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    first, num_tokens, position, begin, end, ordinal = load_item(item)

    queries = queries.index(half)
    row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOADED))
    o_e = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOADED))
    token = (first + row // GROUP).to(gl.int64)
    p_q = query + token * query_stride + (i_h * GROUP + row % GROUP) * head_stride
    held = (row // GROUP < num_tokens)[:, None] & (o_e >= 0)[None, :]
    queries.store(gl.load(p_q[:, None] + o_e[None, :], mask=held, other=0.0))
    fence_async_shared()

    row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    last_seen = position + row // GROUP
    if SCALED:
        scale *= gl.load(kv_scales + i_h)
    scale += gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
    # All rows see all of the blocks before this place.
    masked = begin + gl.maximum(gl.minimum(end, position + 1) - begin, 0) // BLOCK * BLOCK
    places = queries, keys, values, bars
    m, l, acc, b_p, i_b = attend_blocks(
        places, scale, begin, masked, end, last_seen, SCORES, RESULT, BLOCK, STAGES
    )
    if (end - begin) % BLOCK == 0:
        acc = add_values(places, acc, b_p, i_b, STAGES)
    else:
        mbarrier.wait(bars.index(2 * STAGES + i_b % STAGES), i_b // STAGES & 1)
        # What lies past the end may be NaN, which no share of 0 would silence. The clean values
        # take the queries' place, which is this group's own and needed no more.
        clean(values.index(i_b % STAGES), queries, (end - begin) % BLOCK, BLOCK, LOADED)
        acc = warpgroup_mma(b_p, queries, acc)

    l = gl.where(l == 0.0, 1.0, l)
    acc = acc / gl.convert_layout(l, gl.SliceLayout(1, RESULT))[:, None]
    if SCALED:
        acc *= gl.load(kv_scales + KV_HEADS + i_h)
    targets = gate, gate_stride, output, bases, partials, lse, rounded
    place = row, first, num_tokens, ordinal, i_h
    store(targets, m, l, acc, half, place, KV_HEADS, GROUP, GATED, FORM)
