"""Paged attention on a GPU: programs work through the items of a step (see `items`).

A program holds a tile of query rows and passes over its range of KV, block by block, with a running
softmax. Blocks that all rows see whole need no mask; only the last ones do: those on the diagonal,
and that which the sequence ends in, whose rest holds anything.

Legend: T tokens, H query heads, G KV heads, R = H / G, E head_dim, P partial results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from milepost.kernels.attention.items import NARROW_ROWS, AttentionItems
from milepost.kernels.attention.pages import MAX_ROWS, as_bytes, as_rows, rows_per_page
from milepost.kernels.attention.triton_dequantise import dequantise
from milepost.kernels.device import Chip, probe, runs_gluon
from milepost.kernels.float8 import FP8
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.triton_float8 import decode, has_fp8

_LOG2_E = 1.4426950408889634
_MOST_IN_WORDS = 64
"""Rows from which on matrix units read shared memory, and so what is loaded goes back there."""
_UNPACK = tl.constexpr("""{
    .reg .b16 low0, high0, low1, high1;
    .reg .b32 a0, a1, b0, b1;
    mov.b32 {low0, high0}, $4;
    mov.b32 {low1, high1}, $5;
    cvt.rn.f16x2.e4m3x2 a0, low0;
    cvt.rn.f16x2.e4m3x2 a1, low1;
    cvt.rn.f16x2.e4m3x2 b0, high0;
    cvt.rn.f16x2.e4m3x2 b1, high1;
    prmt.b32 $0, a0, a1, 0x5410;
    prmt.b32 $1, a0, a1, 0x7632;
    prmt.b32 $2, b0, b1, 0x5410;
    prmt.b32 $3, b0, b1, 0x7632;
}""")
"""Two words of four float8 to pairs of float16."""
_COMBINED_AT_ONCE = 32
_CROWD = 1.25
"""Narrow programs for each SM, from which on they are many."""


@dataclass(frozen=True, slots=True)
class KVTiles:
    """How a kernel is compiled: KV positions of a block, warps, and stages of the two loops."""

    block: int
    num_warps: int
    num_stages: int
    tail_stages: int

    def shared_bytes(self, rows: int, head_dim: int) -> int:
        """Shared memory of a program in 16-bit types, no less than it takes: its queries, and
        the blocks of KV that are under way."""
        blocks = max(self.num_stages - 1, self.tail_stages + 1) + 0.5
        return int((rows + blocks * self.block) * head_dim * 2)


_TESTED = KVTiles(16, 4, 1, 1)
"""For float32, whose products are unrolled multiplications, slow to compile."""
_CROWDED = (KVTiles(64, 4, 2, 2), KVTiles(32, 4, 2, 2))
"""Several share an SM, and each other's waits."""
_NARROW_LARGE = (KVTiles(64, 4, 5, 2), KVTiles(32, 4, 4, 2), KVTiles(32, 4, 2, 2))
"""A page is looked up two blocks before its KV is loaded, and that two before it is used."""
_NARROW_FLOAT8 = (KVTiles(64, 4, 5, 2), KVTiles(32, 4, 4, 2), KVTiles(32, 4, 2, 2))
_NARROW = (KVTiles(128, 4, 5, 2), KVTiles(64, 4, 4, 2), KVTiles(64, 4, 2, 2))
_HALF = (KVTiles(64, 4, 3, 2), KVTiles(32, 4, 3, 2), KVTiles(16, 4, 2, 2))
_WIDE_LARGE = (KVTiles(64, 8, 3, 2), KVTiles(32, 8, 3, 2), KVTiles(16, 8, 2, 2))
_WIDE = (KVTiles(128, 8, 3, 2), KVTiles(64, 8, 3, 2), KVTiles(32, 8, 2, 2))


def choose_shape(
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
    chip: Chip,
    *,
    are_many: bool = False,
    is_float8: bool = False,
) -> KVTiles:
    """Of the shapes that fit the chip the first: that measured best on an H200 (see
    bench/kernels/attention.py), then ever smaller ones."""
    if dtype == torch.float32:
        return _TESTED
    large = head_dim > 128
    if rows <= 2 * NARROW_ROWS and is_float8:
        shapes = _NARROW_FLOAT8
    elif rows <= 2 * NARROW_ROWS:
        shapes = _CROWDED if large and are_many else _NARROW_LARGE if large else _NARROW
    elif rows < 128:
        shapes = _HALF
    else:
        shapes = _WIDE_LARGE if large else _WIDE
    block_e = max(16, triton.next_power_of_2(head_dim))
    room = chip.shared_bytes
    fitting = (shape for shape in shapes if shape.shared_bytes(rows, block_e) <= room)
    shape = next(fitting, shapes[-1])
    stages = chip.choose_stages(shape.num_stages, shape.block * block_e * 2)
    return replace(shape, num_stages=stages)


def attend(
    query: Tensor,
    gate: Tensor | None,
    pool: Tensor,
    tables: Tensor,
    items: AttentionItems,
    scale: float,
    kv_scales: Tensor | None = None,
    *,
    narrow_shape: KVTiles | None = None,
    wide_shape: KVTiles | None = None,
) -> Tensor:
    """Attend from `query` [T, H, E] to the pages of `pool` [pages, 2, page_size, G, E] that the
    `tables` [rows, pages] int32 name, times the sigmoid of `gate` [T, H * E] if there is one.
    `kv_scales` [2, G] float32 are of keys' and values' heads in float8.

    Returns [T, H * E]; rows of tokens that are in no item hold anything.
    """
    num_tokens, num_heads, head_dim = query.shape
    output = query.new_empty(num_tokens, num_heads * head_dim)
    partials = query.new_empty(items.num_partials, num_heads, head_dim, dtype=torch.float32)
    lse = query.new_empty(items.num_partials, num_heads, dtype=torch.float32)
    if pool.dtype != FP8:
        kv_scales = None
    results = items.bases, partials, lse, scale
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
            shape = wide_shape or choose_shape(items.wide_rows, *kind, chip)
            _launch(items.wide, items.wide_rows, shape, *common)
    if len(items.narrow):
        # Decodes are most of them; how many items are padding is not known here.
        num_narrow = num_tokens // items.tokens_each * pool.shape[3]
        are_many = num_narrow > _CROWD * chip.num_sms
        counts = {"are_many": are_many, "is_float8": pool.dtype == FP8}
        shape = narrow_shape or choose_shape(items.narrow_rows, *kind, chip, **counts)
        common = (query, gate, output, pool, kv_scales, tables, *results)
        _launch(items.narrow, items.narrow_rows, shape, *common)
    if items.num_combined:
        combine(partials, lse, items, gate, output)
    return output


def combine(
    partials: Tensor, lse: Tensor, items: AttentionItems, gate: Tensor | None, output: Tensor
) -> None:
    """Write rows of `output` [T, H * E] that have `partials` [P, H, E], times the sigmoid of `gate`
    if there is one."""
    _, num_heads, head_dim = partials.shape
    _combine_kernel[(items.num_combined, num_heads)](
        partials,
        lse,
        items.bases,
        gate,
        output,
        _stride(gate),
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_E=triton.next_power_of_2(head_dim),
        STEP=_COMBINED_AT_ONCE,
        num_warps=4,
        **OVERLAPPED,
    )


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
) -> None:
    _, num_heads, head_dim = query.shape
    _, _, page_size, num_kv_heads, _ = pool.shape
    block_e = max(16, triton.next_power_of_2(head_dim))
    kv = as_bytes(as_rows(pool).flatten(1))
    chip, is_float8 = probe(query.device), pool.dtype == FP8
    # TMA moves boxes: a block must lie in one page, and no wider than the head.
    boxed = chip.has_tma and page_size >= shape.block
    boxed = boxed and block_e == head_dim and len(kv) < MAX_ROWS
    is_native = is_float8 and has_fp8(chip)
    in_words = is_native and rows < _MOST_IN_WORDS and block_e == head_dim >= 64
    _attend_kernel[(num_kv_heads, len(work))](
        query,
        gate,
        output,
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
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **OVERLAPPED,
    )


# The rows of a page and the length of a table follow from how much memory there is: nothing is
# compiled anew for them.
@triton.jit(do_not_specialize=["page_rows", "table_stride"])
def _attend_kernel(
    query,
    gate,
    output,
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
):
    """One item and KV head: ROWS = tokens * GROUP query rows."""
    let_next_start()
    i_h = tl.program_id(0)
    p_item = items + tl.program_id(1) * 8
    first = tl.load(p_item)
    num_tokens = tl.load(p_item + 1)
    table_row = tl.load(p_item + 2)
    position = tl.load(p_item + 3)
    begin = tl.load(p_item + 4)
    end = tl.load(p_item + 5)
    ordinal = tl.load(p_item + 6)
    # Padding waits too: a launch that is nothing else must not end before the one before it.
    wait_for_inputs()
    if num_tokens == 0:
        return
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
            b_q = tl.clamp(b_q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)

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
    if ordinal < 0:
        if gate is not None:
            b_g = tl.load(gate + token[:, None] * gate_stride + inside, mask=held, other=0.0)
            acc *= tl.sigmoid(b_g.to(tl.float32))
        p_o = output + token[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + inside
        tl.store(p_o, acc.to(output.dtype.element_ty), mask=held)
    else:
        base = tl.load(bases + token, mask=ahead < num_tokens, other=0).to(tl.int64) + ordinal
        p_partial = partials + base[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + inside
        tl.store(p_partial, acc, mask=held)
        p_lse = lse + base * (KV_HEADS * GROUP) + head
        tl.store(p_lse, m + tl.log2(l), mask=ahead < num_tokens)


@triton.jit
def _step(
    m, l, acc, b_q, i_kv, position, ahead, pages, scale, MASKED: tl.constexpr, SIZES: tl.constexpr
):
    """Take the block of KV at i_kv into the running softmax: the greatest score `m`, the sum of
    shares `l`, the sum of values `acc`. If MASKED, a row sees no KV past its own position."""
    BLOCK: tl.constexpr = SIZES[5]
    end = pages[3]
    o_kv = i_kv + tl.arange(0, BLOCK)
    b_k = _load(pages, i_kv, 0, SIZES, b_q.dtype)
    b_s = _dot(b_q, tl.trans(b_k))
    if MASKED:
        seen = (o_kv[None, :] <= position + ahead[:, None]) & (o_kv < end)[None, :]
        b_s = tl.where(seen, b_s, float("-inf"))
    PAGE_SIZE: tl.constexpr = SIZES[4]
    if pages[1] is None:
        b_v = _load(pages, i_kv, PAGE_SIZE, SIZES, b_q.dtype)
    else:
        b_v = _load_words(pages, i_kv, PAGE_SIZE, SIZES)
    if MASKED:
        # What lies past the end may be NaN, which no share of 0 would silence.
        b_v = tl.where((o_kv < end)[:, None], b_v, 0.0)
    m_new = tl.maximum(m, tl.max(b_s, 1) * scale)
    base = m_new
    if MASKED:
        # A row that has seen nothing yet has no m to subtract.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = tl.exp2(b_s * scale - base[:, None])
    shrink = tl.exp2(m - base)
    l = l * shrink + tl.sum(b_p, 1)
    acc = _dot(b_p.to(b_v.dtype), b_v, acc * shrink[:, None])
    return m_new, l, acc


@triton.jit
def _load(pages, i_kv, FIRST: tl.constexpr, SIZES: tl.constexpr, DTYPE: tl.constexpr):
    """Keys or values [BLOCK, BLOCK_E] of one head from i_kv on, a multiple of BLOCK; they begin
    FIRST rows behind the beginning of a page. Float8 becomes DTYPE."""
    kv, _words, table, end, page_rows, i_h = pages
    BOXED: tl.constexpr = SIZES[0]
    KV_HEADS: tl.constexpr = SIZES[1]
    HEAD_DIM: tl.constexpr = SIZES[2]
    BLOCK_E: tl.constexpr = SIZES[3]
    PAGE_SIZE: tl.constexpr = SIZES[4]
    BLOCK: tl.constexpr = SIZES[5]
    if BOXED:
        page = tl.load(table + i_kv // PAGE_SIZE)
        row = page * page_rows + FIRST + i_kv % PAGE_SIZE
        block = kv.load([row, i_h * HEAD_DIM])
    else:
        o_e = tl.arange(0, BLOCK_E)
        o_kv = i_kv + tl.arange(0, BLOCK)
        # Past the end the table names pages that are not the sequence's, or none.
        inside = o_kv < end
        page = tl.load(table + o_kv // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        row = page * page_rows + FIRST + o_kv % PAGE_SIZE
        at = (row * KV_HEADS + i_h)[:, None] * HEAD_DIM + o_e[None, :]
        held = inside[:, None] & (o_e < HEAD_DIM)[None, :]
        block = tl.load(kv + at, mask=held, other=0)
    if SIZES[6]:
        block = decode(block, SIZES[7]).to(DTYPE)
    return block


@triton.jit
def _load_words(pages, i_kv, FIRST: tl.constexpr, SIZES: tl.constexpr):
    """As `_load` of float8, with columns in the order of `_in_order`: four of a token stand in a
    word. Matrix units want two tokens of a column side by side; from words that takes one
    instruction for two numbers, from bytes a load for each."""
    _kv, words, table, end, page_rows, i_h = pages
    BOXED: tl.constexpr = SIZES[0]
    KV_HEADS: tl.constexpr = SIZES[1]
    PAGE_SIZE: tl.constexpr = SIZES[4]
    BLOCK: tl.constexpr = SIZES[5]
    WORDS: tl.constexpr = SIZES[2] // 4
    if BOXED:
        page = tl.load(table + i_kv // PAGE_SIZE)
        row = page * page_rows + FIRST + i_kv % PAGE_SIZE
        block = words.load([row, i_h * WORDS])
    else:
        o_kv = i_kv + tl.arange(0, BLOCK)
        inside = o_kv < end
        page = tl.load(table + o_kv // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        row = page * page_rows + FIRST + o_kv % PAGE_SIZE
        at = (row * KV_HEADS + i_h)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        block = tl.load(words + at, mask=inside[:, None], other=0)
    first, second, third, fourth = tl.inline_asm_elementwise(
        _UNPACK, "=r,=r,=r,=r,r,r", [block], (tl.float16,) * 4, is_pure=True, pack=2
    )
    # Numbers 0 to 3 of every word become the quarters of a row.
    halves = tl.join(tl.join(first, second), tl.join(third, fourth))
    return tl.permute(halves, (0, 3, 2, 1)).reshape(BLOCK, SIZES[2])


@triton.jit
def _dot(left, right, start=None):
    """Float32 stays float32: the matrix units would round it to 10 bits."""
    return tl.dot(left, right, start, input_precision="ieee")


@triton.jit
def _combine_kernel(
    partials,
    lse,
    bases,
    gate,
    output,
    gate_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STEP: tl.constexpr,
):
    """The result of one token and head: its partial results, each by its share by the LSE."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    base = tl.load(bases + token)
    count = tl.load(bases + token + 1) - base
    wait_for_inputs()
    if count == 0:
        return
    o_e = tl.arange(0, BLOCK_E)
    inside = o_e < HEAD_DIM
    step = tl.arange(0, STEP)
    if gate is not None:
        b_g = tl.load(gate + token * gate_stride + head * HEAD_DIM + o_e, mask=inside, other=0.0)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([BLOCK_E], tl.float32)
    # Every token sees the beginning of its KV, so the first LSE is finite.
    for done in tl.range(0, count, STEP):
        at = (base + done + step).to(tl.int64) * HEADS + head
        valid = done + step < count
        b_lse = tl.load(lse + at, mask=valid, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(b_lse, 0))
        b_p = tl.exp2(b_lse - m_new)
        shrink = tl.exp2(m - m_new)
        mask = valid[:, None] & inside[None, :]
        b_o = tl.load(partials + at[:, None] * HEAD_DIM + o_e[None, :], mask=mask, other=0.0)
        acc = acc * shrink + tl.sum(b_o * b_p[:, None], 0)
        l = l * shrink + tl.sum(b_p, 0)
        m = m_new
    acc = acc / l
    if gate is not None:
        acc *= tl.sigmoid(b_g.to(tl.float32))
    at = (token * HEADS + head) * HEAD_DIM + o_e
    tl.store(output + at, acc.to(output.dtype.element_ty), mask=inside)
