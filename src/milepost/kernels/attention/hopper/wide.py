"""Wide tiles of attention on Hopper.

One warp loads KV with TMA; two groups of four warps take half of a tile's rows each and go through
the same blocks. They do not wait for each other, and a group has a block's scores and the values of
the block before multiplied while it works on weights, so matrix products run while exponentials do
(as in FlashAttention-3, arXiv 2407.08608). Everything else is as in `portable.attend`, whose kernel
does the same work on any chip.

Legend: T tokens, H query heads, G KV heads, E head_dim, P partial results.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from milepost.kernels.attention.arguments import AttentionCall
from milepost.kernels.attention.hopper.wide_parts import (
    SharedBlocks,
    WideSizes,
    add_values,
    attend_blocks,
    clean,
    store,
)
from milepost.kernels.attention.pages import as_rows
from milepost.kernels.attention.portable.blocks import KVPointers, load_item
from milepost.kernels.attention.table import HOPPER_BLOCK
from milepost.kernels.platform.gluon import boxes_of, load_box, open_bars, wait_free, wait_loaded
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs

_STAGES = 2
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24


def attend(call: AttentionCall, work: Tensor, rows: int, tiles: None = None) -> None:  # noqa: ARG001
    """Computes the results of `work`, wide items of 128 rows."""
    del rows
    _, num_heads, head_dim = call.query.shape
    _, _, page_size, num_kv_heads, _ = call.kv.pool.shape
    kv = as_rows(call.kv.pool).flatten(1)
    _attend_kernel[(num_kv_heads * len(work),)](
        call.arguments(work),
        boxes_of(kv, HOPPER_BLOCK, head_dim),
        call.scale_of_2,
        *call.extents,
        SIZES=WideSizes(
            kv_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            block=HOPPER_BLOCK,
            stages=_STAGES,
        ),
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
        **OVERLAPPED,
    )


@quick
@gluon.jit(do_not_specialize=["page_rows", "table_stride"])
def _attend_kernel(
    call,
    kv,
    scale,
    page_rows,
    table_stride,
    SIZES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Attends from one item to one KV head. Padding has no KV and no rows, so nothing is read or
    written for it. The grid has one dimension, as CUDA allows only 65,535 programs in others."""
    i_h = gl.program_id(0) % SIZES.kv_heads
    launch_dependents()
    item = load_item(call.work.base, gl.program_id(0) // SIZES.kv_heads)
    wait_for_inputs()
    if item.num_tokens == 0:
        return
    table = call.tables + item.table_row.to(gl.int64) * table_stride
    dtype: gl.constexpr = call.query.base.dtype.element_ty
    STAGES: gl.constexpr = SIZES.stages
    queries = gl.allocate_shared_memory(dtype, [2, 64, SIZES.head_dim], kv.layout)
    keys = gl.allocate_shared_memory(dtype, [STAGES, SIZES.block, SIZES.head_dim], kv.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, SIZES.block, SIZES.head_dim], kv.layout)
    blocks = SharedBlocks(queries, keys, values, open_bars(STAGES, 1, 2), open_bars(STAGES, 1, 2))
    pages = KVPointers(kv, None, table, item.begin, item.end, page_rows, i_h)
    gl.warp_specialize(
        [
            (_consume, (call, scale, blocks, 0, SIZES)),
            (_consume, (call, scale, blocks, 1, SIZES)),
            (_produce, (pages, blocks, SIZES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(pages, blocks, SIZES: gl.constexpr):
    """Loads every block of an item as soon as its place is free."""
    SIZE: gl.constexpr = SIZES.block * SIZES.head_dim * 2
    column = pages.i_h * SIZES.head_dim
    i_b = 0
    for i_kv in range(pages.first, pages.end, SIZES.block):
        page = gl.load(pages.table + i_kv // SIZES.page_size)
        row = page * pages.page_rows + i_kv % SIZES.page_size
        stage = wait_free(blocks.key_bars, i_b)
        loaded = blocks.key_bars.index(stage)
        mbarrier.expect(loaded, SIZE)
        load_box(pages.kv, [row, column], loaded, blocks.key_blocks.index(stage))
        wait_free(blocks.value_bars, i_b)
        loaded = blocks.value_bars.index(stage)
        mbarrier.expect(loaded, SIZE)
        load_box(
            pages.kv, [row + SIZES.page_size, column], loaded, blocks.value_blocks.index(stage)
        )
        i_b += 1  # noqa: SIM113


@gluon.jit
def _consume(call, scale, blocks, half: gl.constexpr, SIZES: gl.constexpr):
    """Attends from half of the tile's rows: 64 of them, in four warps."""
    BLOCK: gl.constexpr = SIZES.block
    GROUP: gl.constexpr = SIZES.group
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZES.head_dim, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    query, i_h = call.query, gl.program_id(0) % SIZES.kv_heads
    item = load_item(call.work.base, gl.program_id(0) // SIZES.kv_heads)

    queries = blocks.queries.index(half)
    row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOADED))
    o_e = gl.arange(0, SIZES.head_dim, layout=gl.SliceLayout(0, LOADED))
    token = (item.first + row // GROUP).to(gl.int64)
    p_q = query.base + token * query.stride + (i_h * GROUP + row % GROUP) * query.head_stride
    held = (row // GROUP < item.num_tokens)[:, None] & (o_e >= 0)[None, :]
    queries.store(gl.load(p_q[:, None] + o_e[None, :], mask=held, other=0.0))
    fence_async_shared()

    row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    last_seen = item.position + row // GROUP
    if call.kv_scales is not None:
        scale *= gl.load(call.kv_scales + i_h)
    own = SharedBlocks(queries, *blocks[1:])
    m, l, acc, b_p, i_b = attend_blocks(own, scale, item, last_seen, SCORES, RESULT, SIZES)
    num_left = (item.end - item.begin) % BLOCK
    if num_left == 0:
        acc = add_values(own, acc, b_p, i_b)
    else:
        stage = wait_loaded(blocks.value_bars, i_b)
        # Values past the end may be NaN, and a weight of 0 times NaN is NaN. The cleaned values
        # overwrite the queries of this group, which are no longer needed.
        clean(blocks.value_blocks.index(stage), queries, num_left, BLOCK, LOADED)
        acc = warpgroup_mma(b_p, queries, acc)

    l = gl.where(l == 0.0, 1.0, l)
    acc = acc / gl.convert_layout(l, gl.SliceLayout(1, RESULT))[:, None]
    if call.kv_scales is not None:
        acc *= gl.load(call.kv_scales + SIZES.kv_heads + i_h)
    store(call, item, i_h, row, m, l, acc, half, SIZES)
