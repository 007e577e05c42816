"""Triton: index keys, and the blocks that an indexer selects by them (see `attention.indexed`).

A launch scores blocks for tiles of tokens, and makes the blocks' keys on the way, so that those
need no memory. A score's bits and the block's number form one integer, which is largest for the
block that wins; so torch's top k breaks ties as the definition does.

Legend: T tokens, B blocks, I index heads, K entries of an index key, S selected blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.attention.indexed import TILE, IndexedTokens, Selection
from milepost.kernels.attention.pages import PagedKV, rows_per_page
from milepost.kernels.attention.portable.blocks import dot
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import cdiv, check_contiguous, next_power_of_2

_SCORES = 1 << 23
"""Largest number of scores that are made before the best are taken: 64 MiB. With 16,384 blocks that
is enough for 512 tokens, and each launch passes over all tiles of tokens."""
_BLOCKS = 32
"""Blocks of a program that scores."""
LAST = tl.constexpr(0x7FFFFFFF)
"""XOR of a selected block's number and the low half of its integer."""


class IndexSizes(NamedTuple):
    """Sizes of pages and of an indexer; a constant on the device."""

    kv_heads: int
    head_dim: int
    page_size: int
    ratio: int
    heads: int
    """I"""
    key_dim: int
    """K"""
    block_k: int
    half: int
    """Half of the entries that are turned."""


def store(kv: PagedKV, keys: Tensor, kv_rows: Tensor) -> None:
    """Writes index keys [T, K]; `kv_rows` [T] say where a token's key lies, -1 for nowhere."""
    _, _, page_size, num_heads, head_dim = kv.pool.shape
    size = num_heads * head_dim
    _store_kernel[(len(keys),)](
        keys,
        keys.stride(0),
        kv_rows,
        kv.pool,
        KEY_DIM=keys.shape[1],
        SIZE=size,
        BLOCK=next_power_of_2(size),
        PAGE_SIZE=page_size,
        num_warps=1,
        **OVERLAPPED,
    )


@quick
@triton.jit
def _store_kernel(
    keys,
    stride,
    kv_rows,
    pool,
    KEY_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    wait_for_inputs()
    row = tl.load(kv_rows + i_t)
    if row >= 0:
        b_k = tl.load(keys + i_t * stride + o_k, o_k < KEY_DIM, 0.0)
        tl.store(pool + (row + 2 * PAGE_SIZE) * SIZE + o_k, b_k, o_k < SIZE)


def sizes_of(kv: PagedKV, selection: Selection) -> IndexSizes:
    _, _, page_size, kv_heads, head_dim = kv.pool.shape
    _, heads, key_dim = selection.query.shape
    return IndexSizes(
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        ratio=selection.ratio,
        heads=heads,
        key_dim=key_dim,
        block_k=max(16, next_power_of_2(key_dim)),
        half=selection.num_turned // 2,
    )


def select(kv: PagedKV, tokens: IndexedTokens, selection: Selection, sizes: IndexSizes) -> Tensor:
    """Returns [T, S] int64, the best whole blocks of each token first, -1 where there are fewer."""
    assert kv.tables is not None, "tokens name rows of page tables"
    query, device = selection.query.contiguous(), kv.pool.device
    check_contiguous(norm=selection.norm_scale)
    num_blocks = max(kv.tables.shape[1] * sizes.page_size // sizes.ratio, 1)
    starts = torch.arange(num_blocks, device=device) * sizes.ratio
    cosines, sines = (each.contiguous() for each in selection.angles(starts))
    selected, most = [], max(_SCORES // num_blocks, TILE)
    for first in range(0, len(query), most):
        count = min(most, len(query) - first)
        scores = torch.empty(count, num_blocks, dtype=torch.int64, device=device)
        _score_kernel[(len(tokens.tiles), cdiv(num_blocks, _BLOCKS))](
            tokens.tiles,
            query,
            kv.pool,
            kv.tables,
            kv.tables.stride(0),
            rows_per_page(kv.pool),
            selection.norm_scale,
            cosines,
            sines,
            scores,
            first,
            count,
            num_blocks,
            selection.eps,
            TILE=TILE,
            BLOCKS=_BLOCKS,
            SIZES=sizes,
            num_warps=4,
            **OVERLAPPED,
        )
        num_selected = min(max(selection.budget // sizes.ratio, 1), num_blocks)
        selected.append(scores.topk(num_selected, dim=1).values)
    return selected[0] if len(selected) == 1 else torch.cat(selected)


@quick
@triton.jit(do_not_specialize=["table_stride", "page_rows", "first", "count", "num_blocks"])
def _score_kernel(
    tiles,
    query,
    pool,
    tables,
    table_stride,
    page_rows,
    norm_scale,
    cosines,
    sines,
    scores,
    first,
    count,
    num_blocks,
    eps,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Scores BLOCKS blocks for a tile of tokens of one sequence."""
    launch_dependents()
    wait_for_inputs()
    p_tile = tiles + 4 * tl.program_id(0)
    begin, length = tl.load(p_tile), tl.load(p_tile + 1)
    if (length == 0) | (begin >= first + count) | (begin + length <= first):
        return
    table = tables + tl.load(p_tile + 2).to(tl.int64) * table_stride
    position = tl.load(p_tile + 3) + tl.arange(0, TILE)
    o_t = begin + tl.arange(0, TILE)
    is_token = (o_t < begin + length) & (o_t >= first) & (o_t < first + count)
    whole = (position + 1) // SIZES.ratio
    most = (tl.load(p_tile + 3) + length) // SIZES.ratio
    o_b = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    p_score = scores + (o_t - first).to(tl.int64)[:, None] * num_blocks + o_b[None, :]
    held = is_token[:, None] & (o_b < num_blocks)[None, :]
    if tl.program_id(1) * BLOCKS >= most:
        tl.store(p_score, tl.full([TILE, BLOCKS], -1, tl.int64), held)
        return
    is_block = o_b < most
    b_k = _block_keys(
        pool, table, page_rows, norm_scale, cosines, sines, eps, o_b, is_block, BLOCKS, SIZES
    )
    o_k = tl.arange(0, SIZES.block_k)
    acc = tl.zeros([TILE, BLOCKS], tl.float32)
    HEADS: tl.constexpr = SIZES.heads
    for head in range(HEADS):
        at = (o_t.to(tl.int64)[:, None] * HEADS + head) * SIZES.key_dim + o_k[None, :]
        b_q = tl.load(query + at, is_token[:, None] & (o_k < SIZES.key_dim)[None, :], 0.0)
        acc += tl.maximum(dot(b_q, tl.trans(b_k)), 0.0)
    # Scores are not below 0, so their bits are in their order.
    b_key = (acc.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (o_b ^ LAST)[None, :]
    tl.store(p_score, tl.where(o_b[None, :] < whole[:, None], b_key, -1), held)


@triton.jit
def _block_keys(
    pool,
    table,
    page_rows,
    norm_scale,
    cosines,
    sines,
    eps,
    o_b,
    is_block,
    BLOCKS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Returns keys [BLOCKS, K] of whole blocks: means of their tokens', normed and turned."""
    K: tl.constexpr = SIZES.key_dim
    HALF: tl.constexpr = SIZES.half
    dtype: tl.constexpr = pool.dtype.element_ty
    o_k = tl.arange(0, SIZES.block_k)
    other = tl.where(o_k < HALF, o_k + HALF, tl.where(o_k < 2 * HALF, o_k - HALF, o_k))
    inside = is_block[:, None] & (o_k < K)[None, :]
    BLOCK_K: tl.constexpr = SIZES.block_k
    b_x = tl.zeros([BLOCKS, BLOCK_K], tl.float32)
    b_y = b_x
    RATIO: tl.constexpr = SIZES.ratio
    for place in range(RATIO):
        position = o_b * RATIO + place
        page = tl.load(table + position // SIZES.page_size, is_block, 0).to(tl.int64)
        row = page * page_rows + position % SIZES.page_size + 2 * SIZES.page_size
        p_key = pool + row[:, None] * (SIZES.kv_heads * SIZES.head_dim)
        b_x += tl.load(p_key + o_k[None, :], inside, 0.0).to(tl.float32)
        b_y += tl.load(p_key + other[None, :], inside, 0.0).to(tl.float32)
    b_x = (b_x / RATIO).to(dtype).to(tl.float32)
    b_y = (b_y / RATIO).to(dtype).to(tl.float32)
    norm = tl.rsqrt(tl.sum(b_x * b_x, 1) / K + eps)[:, None]
    b_x = (b_x * norm * tl.load(norm_scale + o_k, o_k < K, 0.0)[None, :]).to(dtype)
    b_y = (b_y * norm * tl.load(norm_scale + other, o_k < K, 0.0)[None, :]).to(dtype)
    if HALF:
        turned = is_block[:, None] & (o_k < 2 * HALF)[None, :]
        at = o_b[:, None] * HALF + (o_k % HALF)[None, :]
        cosine = tl.load(cosines + at, turned, 1.0).to(tl.float32)
        sine = tl.load(sines + at, turned, 0.0).to(tl.float32)
        sine = tl.where((o_k < HALF)[None, :], -sine, sine)
        b_x = (b_x.to(tl.float32) * cosine + b_y.to(tl.float32) * sine).to(dtype)
    return b_x
