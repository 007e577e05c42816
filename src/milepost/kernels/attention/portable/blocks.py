"""Parts of the portable attention kernels: an item, and blocks of KV from pages.

Legend: ROWS query rows of an item, BLOCK KV positions, G KV heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from milepost.kernels.attention.arguments import WorkItem
from milepost.kernels.attention.tiles import ITEM_SIZE
from milepost.kernels.platform.numerics import decode

_ITEM_SIZE = tl.constexpr(ITEM_SIZE)
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
"""Converts two words of four FP8 numbers to pairs of float16."""


class BlockSizes(NamedTuple):
    """Sizes that the kernel is compiled for; a constant on the device."""

    boxed: bool
    """Whether TMA loads KV."""
    float8: bool
    native: bool
    """Whether the chip has FP8."""
    kv_heads: int
    group: int
    """Query heads of a KV head."""
    head_dim: int
    block_e: int
    latents: bool
    shared: int
    """Entries of a latent that are not part of its value."""
    block_p: int
    page_size: int
    rows: int
    block: int
    window: int = 0
    """Number of tokens that a token attends to; 0 for all."""


class QueryRows(NamedTuple):
    """The tokens and heads of an item's rows [ROWS]."""

    o_e: Any
    """Entries of a head [block_e]."""
    ahead: Any
    """Token of each row, counted from the item's first."""
    token: Any
    head: Any
    are_held: Any
    """False for rows past the item's tokens."""


class KVPointers(NamedTuple):
    """A sequence's KV on the device."""

    kv: Any
    """Pool as rows of numbers: a pointer or a TMA descriptor."""
    words: Any
    """FP8 pool as rows of words, likewise; or None."""
    table: Any
    first: Any
    """First position that some token attends to."""
    end: Any
    """Number of KV positions."""
    page_rows: Any
    i_h: Any
    """KV head."""


@triton.jit
def load_item(items, i_item):
    """Loads an item of work."""
    p_item = items + i_item * _ITEM_SIZE
    first = tl.load(p_item)
    num_tokens = tl.load(p_item + 1)
    table_row = tl.load(p_item + 2)
    position = tl.load(p_item + 3)
    begin = tl.load(p_item + 4)
    end = tl.load(p_item + 5)
    ordinal = tl.load(p_item + 6)
    return WorkItem(first, num_tokens, table_row, position, begin, end, ordinal)


@triton.jit
def find_rows(item, i_h, SIZES: tl.constexpr):
    """Returns the tokens and heads of an item's rows."""
    row = tl.arange(0, SIZES.rows)
    o_e = tl.arange(0, SIZES.block_e)
    ahead = row // SIZES.group
    token = (item.first + ahead).to(tl.int64)
    head = i_h * SIZES.group + row % SIZES.group
    return QueryRows(o_e, ahead, token, head, ahead < item.num_tokens)


@triton.jit
def load_queries(query, rows, o_e, SIZE: tl.constexpr):
    """Loads the first SIZE entries of queries."""
    held = rows.are_held[:, None] & (o_e < SIZE)[None, :]
    p_q = query.base + rows.token * query.stride + rows.head * query.head_stride
    return tl.load(p_q[:, None] + o_e[None, :], mask=held, other=0.0)


@triton.jit
def load_gate(gate, token, column, mask):
    """Loads the gates of entries `column` of tokens' outputs."""
    column = column if gate.each is None else column // gate.each
    return tl.load(gate.base + token * gate.stride + column, mask=mask, other=0.0)


@triton.jit
def load(pages, i_kv, FIRST: tl.constexpr, SIZES: tl.constexpr, DTYPE: tl.constexpr):
    """Loads keys or values [BLOCK, block_e] of one head from i_kv on, a multiple of BLOCK; they
    start FIRST rows into a page. FP8 becomes DTYPE."""
    if SIZES.boxed:
        page = tl.load(pages.table + i_kv // SIZES.page_size)
        row = page * pages.page_rows + FIRST + i_kv % SIZES.page_size
        block = pages.kv.load([row, pages.i_h * SIZES.head_dim])
    else:
        o_e = tl.arange(0, SIZES.block_e)
        o_kv = i_kv + tl.arange(0, SIZES.block)
        inside = is_read(pages, o_kv, SIZES)
        page = tl.load(pages.table + o_kv // SIZES.page_size, mask=inside, other=0).to(tl.int64)
        row = page * pages.page_rows + FIRST + o_kv % SIZES.page_size
        at = (row * SIZES.kv_heads + pages.i_h)[:, None] * SIZES.head_dim + o_e[None, :]
        held = inside[:, None] & (o_e < SIZES.head_dim)[None, :]
        block = tl.load(pages.kv + at, mask=held, other=0)
    if SIZES.float8:
        block = decode(block, SIZES.native).to(DTYPE)
    return block


@triton.jit
def load_words(pages, i_kv, FIRST: tl.constexpr, SIZES: tl.constexpr):
    """Loads FP8 as `load` does, but number i of word w becomes column i * words + w. Matrix units
    need two tokens of a column side by side: from words one instruction makes two such numbers,
    from bytes each takes a load."""
    BLOCK: tl.constexpr = SIZES.block
    HEAD_DIM: tl.constexpr = SIZES.head_dim
    WORDS: tl.constexpr = HEAD_DIM // 4
    if SIZES.boxed:
        page = tl.load(pages.table + i_kv // SIZES.page_size)
        row = page * pages.page_rows + FIRST + i_kv % SIZES.page_size
        block = pages.words.load([row, pages.i_h * WORDS])
    else:
        o_kv = i_kv + tl.arange(0, SIZES.block)
        inside = is_read(pages, o_kv, SIZES)
        page = tl.load(pages.table + o_kv // SIZES.page_size, mask=inside, other=0).to(tl.int64)
        row = page * pages.page_rows + FIRST + o_kv % SIZES.page_size
        at = (row * SIZES.kv_heads + pages.i_h)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        block = tl.load(pages.words + at, mask=inside[:, None], other=0)
    first, second, third, fourth = tl.inline_asm_elementwise(
        _UNPACK, "=r,=r,=r,=r,r,r", [block], (tl.float16,) * 4, is_pure=True, pack=2
    )
    halves = tl.join(tl.join(first, second), tl.join(third, fourth))
    return tl.permute(halves, (0, 3, 2, 1)).reshape(BLOCK, HEAD_DIM)


@triton.jit
def load_latents(pages, i_kv, SIZES: tl.constexpr, DTYPE: tl.constexpr):
    """Loads latents from i_kv on: the entries that are values too [BLOCK, block_e], and those that
    all heads share [BLOCK, block_p]. Rows past the end are not read."""
    WIDTH: tl.constexpr = SIZES.head_dim + SIZES.shared
    o_e, o_p = tl.arange(0, SIZES.block_e)[None, :], tl.arange(0, SIZES.block_p)[None, :]
    o_kv = i_kv + tl.arange(0, SIZES.block)
    inside = o_kv < pages.end
    page = tl.load(pages.table + o_kv // SIZES.page_size, inside, 0).to(tl.int64)
    p_row = pages.kv + ((page * pages.page_rows + o_kv % SIZES.page_size) * WIDTH)[:, None]
    b_c = tl.load(p_row + o_e, inside[:, None] & (o_e < SIZES.head_dim), 0)
    b_p = tl.load(p_row + SIZES.head_dim + o_p, inside[:, None] & (o_p < SIZES.shared), 0)
    if SIZES.float8:
        b_c = decode(b_c, SIZES.native).to(DTYPE)
        b_p = decode(b_p, SIZES.native).to(DTYPE)
    return b_c, b_p


@triton.jit
def fit_float16(b_q):
    """Rounds queries to float16, clamped to its range. It represents all FP8 numbers."""
    return tl.clamp(b_q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)


@triton.jit
def first_seen(item, SIZES: tl.constexpr):
    """Returns the position of the first KV that some row of an item sees."""
    first = 0
    if SIZES.window != 0:
        first = tl.maximum(item.position + 1 - SIZES.window, 0)
    return first


@triton.jit
def is_read(pages, o_kv, SIZES: tl.constexpr):
    """Whether rows of KV may be read. Entries of a page table before the window and past the end
    are stale."""
    inside = o_kv < pages.end
    if SIZES.window != 0:
        inside = inside & (o_kv >= pages.first)
    return inside


@triton.jit
def first_block(item, first, SIZES: tl.constexpr):
    """Returns the position of the first block that some row of an item sees. Earlier blocks may lie
    in pages of other sequences."""
    begin = item.begin
    if SIZES.window != 0:
        begin = tl.maximum(begin, first // SIZES.block * SIZES.block)
    return begin


@triton.jit
def first_masked(item, begin, SIZES: tl.constexpr):
    """Returns the position up to which all rows of an item see whole blocks."""
    masked = begin
    if SIZES.window == 0:
        seen = tl.maximum(tl.minimum(item.end, item.position + 1) - begin, 0)
        masked = begin + seen // SIZES.block * SIZES.block
    return masked


@triton.jit
def dot(left, right, start=None):
    """Returns the matrix product without rounding float32 to tf32's 10 bits."""
    return tl.dot(left, right, start, input_precision="ieee")
