"""Parts of Hopper's attention over FP8 KV: loading blocks, and adding one to the running
softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from milepost.kernels.platform.gluon import load_box, thread_barrier

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
"""PTX that converts two words of four float8 to pairs of float16."""


class NarrowSizes(NamedTuple):
    """Sizes that the kernel is compiled for; a constant on the device."""

    kv_heads: int
    group: int
    """Query heads of a KV head."""
    head_dim: int
    page_size: int
    rows: int
    block: int
    stages: int


class KVStream(NamedTuple):
    """An item's KV, and its ring in shared memory."""

    key_bytes: Any
    """TMA descriptors."""
    value_words: Any
    ring: Any
    """[stages, BLOCK, head_dim] bytes."""
    word_ring: Any
    """[stages, BLOCK, head_dim / 4] words."""
    bars: Any
    """2 * stages barriers: keys loaded, values loaded."""
    table: Any
    page_rows: Any
    i_h: Any
    begin: Any
    end: Any


class RunningResult(NamedTuple):
    """A running softmax and its sums of values, one for each number of a word."""

    m: Any
    """[ROWS] maximum score."""
    l: Any
    """[BLOCK, ROWS] sums of weights."""
    acc0: Any
    """[head_dim / 4, ROWS]"""
    acc1: Any
    acc2: Any
    acc3: Any


@gluon.jit
def _find(stream, i_b, SIZES: gl.constexpr):
    """Returns the row of a block's first key in each of its pages. Entries of the table past the
    end are not read."""
    BLOCK: gl.constexpr = SIZES.block
    BOX: gl.constexpr = min(SIZES.block, SIZES.page_size)
    rows = ()
    for ahead in gl.static_range(0, BLOCK, BOX):
        i_kv = stream.begin + i_b * BLOCK + ahead
        page = gl.load(stream.table + i_kv // SIZES.page_size, mask=i_kv < stream.end, other=0)
        rows += (page * stream.page_rows + i_kv % SIZES.page_size,)
    return rows


@gluon.jit
def fetch_both(stream, i_b, SIZES: gl.constexpr):
    """Starts loading a block's keys and values."""
    rows = _find(stream, i_b, SIZES)
    _fetch(stream, rows, i_b, False, SIZES)
    _fetch(stream, rows, i_b, True, SIZES)


@gluon.jit
def _fetch(stream, rows, i_b, OF_VALUES: gl.constexpr, SIZES: gl.constexpr):
    """Starts loading a block's keys or values."""
    kv = stream.value_words if OF_VALUES else stream.key_bytes
    ring = stream.word_ring if OF_VALUES else stream.ring
    BLOCK: gl.constexpr = SIZES.block
    BOX: gl.constexpr = min(SIZES.block, SIZES.page_size)
    BOXES: gl.constexpr = BLOCK // BOX
    SIZE: gl.constexpr = ring.shape[2]
    stage = i_b % SIZES.stages
    bar, place = stream.bars.index(OF_VALUES * SIZES.stages + stage), ring.index(stage)
    mbarrier.expect(bar, BLOCK * SIZE * (4 if OF_VALUES else 1))
    for box in gl.static_range(BOXES):
        row = rows[box] + OF_VALUES * SIZES.page_size
        load_box(kv, [row, stream.i_h * SIZE], bar, place.slice(box * BOX, BOX))


@gluon.jit
def take(state, b_q, i_b, stream, scale, last_seen, MASKED: gl.constexpr, SIZES: gl.constexpr):
    """Adds a block to the running softmax, and starts loading another into its place."""
    m, l, acc0, acc1, acc2, acc3 = state
    BLOCK: gl.constexpr = SIZES.block
    ROWS: gl.constexpr = SIZES.rows
    STAGES: gl.constexpr = SIZES.stages
    TILES: gl.constexpr = l.type.layout
    KEYS: gl.constexpr = gl.DotOperandLayout(0, TILES, 16)
    VALUES: gl.constexpr = gl.DotOperandLayout(0, TILES, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(1, TILES, 2)
    begin, end, bars = stream.begin, stream.end, stream.bars
    stage, phase = i_b % STAGES, i_b // STAGES & 1
    is_next = begin + (i_b + STAGES) * BLOCK < end
    rows = _find(stream, i_b + STAGES, SIZES)
    mbarrier.wait(bars.index(stage), phase)
    b_k = stream.ring.index(stage).load(KEYS).to(gl.float8e4nv, bitcast=True).to(gl.float16)
    b_s = mma_v2(b_k, b_q, gl.zeros([BLOCK, ROWS], gl.float32, TILES)) * scale
    if MASKED:
        o_kv = begin + i_b * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, TILES))
        b_s = gl.where(o_kv[:, None] <= last_seen[None, :], b_s, float("-inf"))
    m_new = gl.maximum(m, gl.max(b_s, 0))
    thread_barrier()
    if is_next:
        _fetch(stream, rows, i_b + STAGES, False, SIZES)
    base = m_new
    if MASKED:
        # A row without any visible key so far has no maximum to subtract.
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = gl.exp2(b_s - base[None, :])
    shrink = gl.exp2(m - base)[None, :]
    l = l * shrink + b_p
    b_p = gl.convert_layout(b_p.to(gl.float16), WEIGHTS)
    mbarrier.wait(bars.index(STAGES + stage), phase)
    b_w = stream.word_ring.index(stage).permute((1, 0)).load(VALUES)
    if MASKED:
        # Values past the end may be NaN, and a weight of 0 times NaN is NaN.
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
        _fetch(stream, rows, i_b + STAGES, True, SIZES)
    return RunningResult(m_new, l, acc0, acc1, acc2, acc3)
