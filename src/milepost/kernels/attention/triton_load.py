"""Blocks of KV from pages, as the attention kernel for any chip takes them.

`pages` are (kv, words, table, end, page_rows, i_h): the pool as rows of numbers and, or None, as
rows of words of float8, pointers or TMA descriptors; the sequence's page table; where its KV ends;
rows from a page to the next; the KV head. `SIZES` are (BOXED, KV_HEADS, HEAD_DIM, BLOCK_E,
PAGE_SIZE, BLOCK, FLOAT8, NATIVE).
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.platform.numerics import decode

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


@triton.jit
def load(pages, i_kv, FIRST: tl.constexpr, SIZES: tl.constexpr, DTYPE: tl.constexpr):
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
def load_words(pages, i_kv, FIRST: tl.constexpr, SIZES: tl.constexpr):
    """As `load` of float8, with columns in the order of `_in_order`: four of a token stand in a
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
