"""Sparse attention: an indexer selects the tokens that others attend to. This is the definition, in
plain torch and on any device; on a GPU `portable.indexed` computes it.

A token attends to the tokens of a few blocks of `ratio` neighbours, those whose mean index key
scores highest for its index queries, and to all tokens after the last whole block (Qwen Sparse
Attention, Qwen3.8-Flash-Next). Of equal scores the earlier block wins.

Index keys lie in pages as they were projected, after keys and values, in the first entries of a
row of their own: a page that is shared brings them back with the rest.

Legend: T tokens, n tokens of a sequence, B whole blocks, H query heads, G KV heads, E head_dim, I
index heads, K entries of an index key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import norm
from milepost.kernels.attention.pages import AttentionRows, PagedKV, as_rows, read_rows, write_rows
from milepost.kernels.attention.reference import gated, turn
from milepost.kernels.layout.batch import Batch, ordinals_of, padded
from milepost.kernels.platform.tensors import accumulation_dtype, cast

TILE = 16
"""Tokens that a program scores blocks for."""
_QUERY_TILE = 512
"""Queries at a time: bounds the memory of masks and scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """An indexer's inputs, which determine the tokens that others attend to."""

    query: Tensor
    """[T, I, K], index queries, normed and turned."""
    norm_scale: Tensor
    """[K]"""
    eps: float
    angles: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Returns cosines and sines [n, 1, O / 2] of positions [n]."""
    num_turned: int
    """O, the first entries of a key that are turned."""
    ratio: int
    """Tokens of a block."""
    budget: int
    """Largest number of tokens that are selected, apart from those after the last whole block."""

    def part(self, rows: slice | Tensor) -> Selection:
        """Returns the selection for some of the tokens."""
        return replace(self, query=self.query[rows])

    def pool(self, keys: Tensor) -> Tensor:
        """Returns index keys [B, K] of whole blocks, made of their tokens' [n, K] as they lie in
        pages: means, normed, and turned by the position of each block's first token."""
        num_blocks = len(keys) // self.ratio
        blocks = keys[: num_blocks * self.ratio].unflatten(0, (num_blocks, self.ratio))
        means = cast(cast(blocks, accumulation_dtype(keys.dtype)).mean(1), keys.dtype)
        starts = torch.arange(num_blocks, device=keys.device) * self.ratio
        normed = norm.norm(means, self.norm_scale, self.eps)
        return turn(normed[:, None], *self.angles(starts))[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedTokens:
    """A step's tokens as the fused kernels take them: int32 arrays, in numpy from `lay_out`, on the
    device for `attend`."""

    rows: Any
    """[T], row of the page tables, -1 for padding."""
    positions: Any
    """[T]"""
    tiles: Any
    """[N, 4]: first token, number of tokens, row of the page tables, position of the first; TILE
    tokens of one sequence at most, none for padding."""


def lay_out(batch: Batch) -> IndexedTokens:
    """Lays out a step for the fused kernels."""
    capacity, lengths = batch.capacity, batch.lengths
    begins = lengths.cumsum() - lengths
    ordinals = ordinals_of(lengths)
    counts = -(-lengths // TILE)
    owners, places = np.arange(len(lengths)).repeat(counts), TILE * ordinals_of(counts)
    tiles = np.zeros((capacity.num_tokens // TILE + capacity.num_sequences, 4), np.int32)
    tiles[: len(owners)] = np.stack(
        (
            begins[owners] + places,
            np.minimum(lengths[owners] - places, TILE),
            batch.rows[owners],
            batch.starts[owners] + places,
        ),
        1,
    )
    return IndexedTokens(
        rows=padded(batch.rows.repeat(lengths), capacity.num_tokens, -1),
        positions=padded(batch.starts.repeat(lengths) + ordinals, capacity.num_tokens, 0),
        tiles=tiles,
    )


def store(kv: PagedKV, keys: Tensor, rows: AttentionRows | IndexedTokens, kv_rows: Tensor) -> None:
    """Writes the index keys [T, K] of the tokens named by `rows` to the pool, at the step's
    `kv_rows` [T]."""
    if isinstance(rows, IndexedTokens):
        from milepost.kernels.attention.portable import scores

        scores.store(kv, keys, kv_rows)
        return
    _, _, page_size, num_heads, head_dim = kv.pool.shape
    stored = F.pad(keys.index_select(0, rows.tokens), (0, num_heads * head_dim - keys.shape[1]))
    places = as_rows(kv.pool)[2 * page_size :]
    write_rows(places, rows.kv_rows, stored.unflatten(1, (num_heads, head_dim)), None)


def attend(
    query: Tensor,
    gate: Tensor | None,
    kv: PagedKV,
    rows: AttentionRows | IndexedTokens,
    scale: float,
    selection: Selection,
) -> Tensor:
    """Attends from `query` [T, H, E] to the selected tokens, otherwise as `reference.attend`;
    returns [T, H * E]."""
    if isinstance(rows, IndexedTokens):
        from milepost.kernels.attention.portable import indexed

        return indexed.attend(query, gate, kv, rows, scale, selection)
    output, first = torch.empty_like(query), 0
    for decodes in rows.decodes:
        longest = decodes.mask.shape[-1]
        for kv_rows, mask in zip(decodes.kv_rows.split(longest), decodes.mask, strict=True):
            tokens = slice(first, first + 1)
            num = int(mask.sum())
            output[tokens] = _attend(
                query[tokens], kv, kv_rows[:num], num - 1, scale, selection.part(tokens)
            )
            first += 1
    for sequence in rows.prefills:
        begin = first + sequence.first
        tokens = slice(begin, begin + sequence.length)
        start, given = sequence.start, (scale, selection.part(tokens))
        output[tokens] = _attend(query[tokens], kv, sequence.kv_rows, start, *given)
    return gated(output, gate)


def _attend(
    query: Tensor, kv: PagedKV, kv_rows: Tensor, start: int, scale: float, selection: Selection
) -> Tensor:
    """Attends from one sequence's tokens from position `start` on to its `kv_rows` [n]."""
    memory, page_size = as_rows(kv.pool), kv.pool.shape[2]
    keys, values, index_keys = (
        read_rows(memory[part * page_size :], kv_rows, query.dtype, None) for part in range(3)
    )
    pooled = selection.pool(index_keys.flatten(1)[:, : selection.query.shape[-1]])
    heads = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    parts = []
    for first in range(0, len(query), _QUERY_TILE):
        tile = slice(first, first + _QUERY_TILE)
        mask = select(selection.part(tile), pooled, start + first, len(kv_rows))
        attended = F.scaled_dot_product_attention(
            query[tile].transpose(0, 1)[None], *heads, attn_mask=mask, scale=scale, enable_gqa=True
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


def select(selection: Selection, pooled: Tensor, start: int, num_tokens: int) -> Tensor:
    """Returns the mask [T, num_tokens] of attention for tokens from position `start` on. `pooled`
    [B, K] are the index keys of the sequence's whole blocks."""
    query, ratio, num_blocks = selection.query, selection.ratio, len(pooled)
    positions = torch.arange(start, start + len(query), device=query.device)[:, None]
    whole = (positions + 1) // ratio
    places = torch.arange(num_tokens, device=query.device)
    mask = (places >= whole * ratio) & (places <= positions)
    if num_blocks:
        wide = accumulation_dtype(query.dtype)
        products = torch.einsum("tik,bk->tib", cast(query, wide), cast(pooled, wide))
        blocks = torch.arange(num_blocks, device=query.device)
        scores = products.relu().sum(1).masked_fill(blocks >= whole, -torch.inf)
        best = scores.sort(dim=1, descending=True, stable=True).indices
        best = best[:, : selection.budget // ratio]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
        chosen &= blocks < whole
        mask[:, : num_blocks * ratio] |= chosen.repeat_interleave(ratio, 1)
    return mask
