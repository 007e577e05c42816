"""Wide tiles of attention on Hopper, in Gluon: Triton's language for programs that place data and
divide work among warps themselves.

One warp loads KV with the copy engine; two groups of four warps take half of a tile's rows each and
go through the same blocks. They don't wait for each other, so one group's matrix products run while
the other's exponentials do. Everything else is as in `triton`, whose kernel does the same work on
any chip.

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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = 128
_LOG2_E = 1.4426950408889634
_BLOCK = 64
_STAGES = 2
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24


def suits(query: Tensor, pool: Tensor, wide_rows: int) -> bool:
    """Whether the kernel can do this work."""
    return (
        torch.cuda.get_device_capability(query.device) == (9, 0)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] in (128, 256)
        and pool.shape[2] >= _BLOCK
        and wide_rows == ROWS
    )


def attend(
    work: Tensor,
    query: Tensor,
    gate: Tensor,
    output: Tensor,
    pool: Tensor,
    tables: Tensor,
    bases: Tensor,
    partials: Tensor,
    sums: Tensor,
    scale: float,
) -> None:
    """Write the results of `work`, which are wide items, to `output` [T, H * E], or to `partials`
    [P, H, E] and `sums` [P, H]."""
    _, num_heads, head_dim = query.shape
    _, num_pages, page_size, num_kv_heads, _ = pool.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    kv = pool.view(-1, num_kv_heads * head_dim)
    _attend_kernel[(num_kv_heads, len(work))](
        query,
        gate,
        output,
        TensorDescriptor.from_tensor(kv, [_BLOCK, head_dim], layout),
        tables,
        work,
        bases,
        partials,
        sums,
        scale * _LOG2_E,
        num_pages * page_size,
        query.stride(0),
        query.stride(1),
        gate.stride(0),
        tables.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        STAGES=_STAGES,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
    )


@gluon.jit
def _attend_kernel(
    query,
    gate,
    output,
    kv,
    tables,
    items,
    bases,
    partials,
    sums,
    scale,
    first_value,
    query_stride,
    head_stride,
    gate_stride,
    table_stride,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """One item and KV head. Padding has no KV and no rows, so nothing is read or written for it."""
    kv_head = gl.program_id(0)
    item = items + gl.program_id(1) * 8
    num_tokens = gl.load(item + 1)
    if num_tokens == 0:
        return
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
    consumed = (query, gate, output, item, bases, partials, sums, scale, kv_head)
    consumed += (query_stride, head_stride, gate_stride, queries, keys, values, bars)
    produced = (kv, table, begin, end, first_value, kv_head, keys, values, bars)
    gl.warp_specialize(
        [
            (_consume, (consumed, 0, KV_HEADS, GROUP, HEAD_DIM, BLOCK, STAGES)),
            (_consume, (consumed, 1, KV_HEADS, GROUP, HEAD_DIM, BLOCK, STAGES)),
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
    kv, table, begin, end, first_value, kv_head, keys, values, bars = produced
    size: gl.constexpr = BLOCK * HEAD_DIM * 2
    column = kv_head * HEAD_DIM
    for block in range(gl.cdiv(end - begin, BLOCK)):
        place = begin + block * BLOCK
        slot = gl.load(table + place // PAGE_SIZE) * PAGE_SIZE + place % PAGE_SIZE
        stage = block % STAGES
        # A barrier's phase before its first is over.
        phase = (block // STAGES & 1) ^ 1
        mbarrier.wait(bars.index(STAGES + stage), phase)
        loaded = bars.index(stage)
        mbarrier.expect(loaded, size)
        tma.async_copy_global_to_shared(kv, [slot, column], loaded, keys.index(stage))
        mbarrier.wait(bars.index(3 * STAGES + stage), phase)
        loaded = bars.index(2 * STAGES + stage)
        mbarrier.expect(loaded, size)
        slot += first_value
        tma.async_copy_global_to_shared(kv, [slot, column], loaded, values.index(stage))


@gluon.jit
def _consume(
    consumed,
    half: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Half of the tile's rows: 64 of them in four warps."""
    query, gate, output, item, bases, partials, sums, scale, kv_head = consumed[:9]
    query_stride, head_stride, gate_stride, queries, keys, values, bars = consumed[9:]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    first = gl.load(item)
    num_tokens = gl.load(item + 1)
    position = gl.load(item + 3)
    begin = gl.load(item + 4)
    end = gl.load(item + 5)
    ordinal = gl.load(item + 6)

    queries = queries.index(half)
    row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOADED))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOADED))
    token = (first + row // GROUP).to(gl.int64)
    rows = query + token * query_stride + (kv_head * GROUP + row % GROUP) * head_stride
    held = (row // GROUP < num_tokens)[:, None] & (column >= 0)[None, :]
    queries.store(gl.load(rows[:, None] + column[None, :], mask=held, other=0.0))
    fence_async_shared()

    row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    last_seen = position + row // GROUP
    top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
    result = gl.zeros([64, HEAD_DIM], gl.float32, layout=RESULT)
    # All rows see all of the first `num_seen` blocks; `num_whole` hold nothing but tokens.
    num_seen = gl.maximum(gl.minimum(end, position + 1) - begin, 0) // BLOCK
    num_whole = (end - begin) // BLOCK
    if num_seen > 0:
        scores = _score(queries, keys, bars, 0, SCORES, BLOCK, STAGES)
        top, total, shrink, shares = _soften(top, total, scores, scale, False)
        left = _as_left(shares, values.dtype, RESULT)
        # A block's scores are computed, and softened, while the last one's values are added.
        for block in range(1, num_seen):
            scores = _begin_score(queries, keys, bars, block, SCORES, BLOCK, STAGES)
            result = _begin_weigh(result, left, values, bars, block - 1, STAGES)
            scores, result = warpgroup_mma_wait(1, deps=[scores, result])
            mbarrier.arrive(bars.index(STAGES + block % STAGES), count=1)
            top, total, shrink, shares = _soften(top, total, scores, scale, False)
            result, left = warpgroup_mma_wait(0, deps=[result, left])
            mbarrier.arrive(bars.index(3 * STAGES + (block - 1) % STAGES), count=1)
            result = _shrink(result, shrink, RESULT)
            left = _as_left(shares, values.dtype, RESULT)
        result = _weigh(result, left, values, bars, num_seen - 1, STAGES)
    for block in range(num_seen, num_whole):
        scores = _score(queries, keys, bars, block, SCORES, BLOCK, STAGES)
        place = begin + block * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES))
        seen = place[None, :] <= last_seen[:, None]
        scores = gl.where(seen, scores, float("-inf"))
        top, total, shrink, shares = _soften(top, total, scores, scale, True)
        result = _shrink(result, shrink, RESULT)
        left = _as_left(shares, values.dtype, RESULT)
        result = _weigh(result, left, values, bars, block, STAGES)
    if begin + num_whole * BLOCK < end:
        scores = _score(queries, keys, bars, num_whole, SCORES, BLOCK, STAGES)
        place = begin + num_whole * BLOCK
        num_valid = end - place
        place += gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES))
        seen = (place[None, :] <= last_seen[:, None]) & (place < end)[None, :]
        scores = gl.where(seen, scores, float("-inf"))
        top, total, shrink, shares = _soften(top, total, scores, scale, True)
        result = _shrink(result, shrink, RESULT)
        # What lies past the end may be NaN, which no share of 0 would silence. The clean values
        # take the queries' place, which is this group's own and needed no more.
        stage = num_whole % STAGES
        mbarrier.wait(bars.index(2 * STAGES + stage), num_whole // STAGES & 1)
        _clean(values.index(stage), queries, num_valid, BLOCK, LOADED)
        result = warpgroup_mma(_as_left(shares, values.dtype, RESULT), queries, result)

    # A row that has seen nothing has a top of -inf and a result of 0: no share of the sum.
    total = gl.where(total == 0.0, 1.0, total)
    result = result / gl.convert_layout(total, gl.SliceLayout(1, RESULT))[:, None]
    wide_row = half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, RESULT))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, RESULT))
    token = (first + wide_row // GROUP).to(gl.int64)
    inside = (kv_head * GROUP + wide_row % GROUP)[:, None] * HEAD_DIM + column[None, :]
    has_token = wide_row // GROUP < num_tokens
    held = has_token[:, None] & (column >= 0)[None, :]
    if ordinal < 0:
        gates = gl.load(gate + token[:, None] * gate_stride + inside, mask=held, other=0.0)
        result = result / (1.0 + gl.exp2(gates.to(gl.float32) * -1.4426950408889634))
        whole_at = output + token[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + inside
        gl.store(whole_at, result.to(output.dtype.element_ty), mask=held)
    else:
        base = gl.load(bases + token, mask=has_token, other=0).to(gl.int64) + ordinal
        part_at = partials + base[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + inside
        gl.store(part_at, result, mask=held)
        sum_at = sums + base * (KV_HEADS * GROUP) + kv_head * GROUP + wide_row % GROUP
        share = gl.convert_layout(top + gl.log2(total), gl.SliceLayout(1, RESULT))
        gl.store(sum_at, share, mask=has_token)


@gluon.jit
def _begin_score(
    queries,
    keys,
    bars,
    block,
    SCORES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Products of queries with a block's keys, which run on."""
    stage = block % STAGES
    mbarrier.wait(bars.index(stage), block // STAGES & 1)
    nothing = gl.zeros([64, BLOCK], gl.float32, layout=SCORES)
    right = keys.index(stage).permute((1, 0))
    return warpgroup_mma(queries, right, nothing, use_acc=False, is_async=True)


@gluon.jit
def _score(
    queries,
    keys,
    bars,
    block,
    SCORES: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The same to the end; the keys' place is free afterwards."""
    scores = _begin_score(queries, keys, bars, block, SCORES, BLOCK, STAGES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(bars.index(STAGES + block % STAGES), count=1)
    return scores


@gluon.jit
def _begin_weigh(result, left, values, bars, block, STAGES: gl.constexpr):
    """Add a block's values by their shares, which runs on."""
    stage = block % STAGES
    mbarrier.wait(bars.index(2 * STAGES + stage), block // STAGES & 1)
    return warpgroup_mma(left, values.index(stage), result, is_async=True)


@gluon.jit
def _weigh(result, left, values, bars, block, STAGES: gl.constexpr):
    """The same to the end; the values' place is free afterwards."""
    result = _begin_weigh(result, left, values, bars, block, STAGES)
    result, left = warpgroup_mma_wait(0, deps=[result, left])
    mbarrier.arrive(bars.index(3 * STAGES + block % STAGES), count=1)
    return result


@gluon.jit
def _soften(top, total, scores, scale, MASKED: gl.constexpr):
    """Take a block's scores into the running softmax: how much earlier results shrink, and the
    block's shares."""
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    base = new_top
    if MASKED:
        # A row that has seen nothing yet has no top to subtract.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    shares = gl.exp2(scores * scale - base[:, None])
    shrink = gl.exp2(top - base)
    return new_top, total * shrink + gl.sum(shares, 1), shrink, shares


@gluon.jit
def _shrink(result, shrink, RESULT: gl.constexpr):
    return result * gl.convert_layout(shrink, gl.SliceLayout(1, RESULT))[:, None]


@gluon.jit
def _as_left(shares, dtype: gl.constexpr, RESULT: gl.constexpr):
    """Shares as the left side of a product; they stay in the registers that they are in."""
    return gl.convert_layout(shares.to(dtype), gl.DotOperandLayout(0, RESULT, 2))


@gluon.jit
def _clean(source, target, num_valid, BLOCK: gl.constexpr, LOADED: gl.constexpr):
    """Copy a block's values but for those past the end, which become 0; in parts, which need few
    registers."""
    PART: gl.constexpr = BLOCK // 4
    for first in gl.static_range(0, BLOCK, PART):
        place = first + gl.arange(0, PART, layout=gl.SliceLayout(1, LOADED))
        part = source.slice(first, PART).load(LOADED)
        target.slice(first, PART).store(gl.where((place < num_valid)[:, None], part, 0.0))
    fence_async_shared()
