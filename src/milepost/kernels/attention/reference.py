"""Paged attention in plain torch: the definition, on any device.

Keys and values are written to the pages first and always read back from there, so a token that
finds its KV in a shared page reads the very bits that another sequence wrote.

Legend: T tokens, W tokens whose KV is written, D decoding sequences, L tokens of the longest of
them, H query heads, G KV heads, R = H / G query heads for each KV head, E head_dim. A pool is
[pages, 2, page_size, G, E] (see `pages`).
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.attention.pages import DecodePages, PrefillPages, as_rows

_QUERY_TILE = 512
"""Queries at a time where earlier tokens are attended to: bounds the mask to a tile of rows."""


def store(pool: Tensor, key: Tensor, value: Tensor, tokens: Tensor, kv_rows: Tensor) -> None:
    """Write KV of `tokens` [W] of `key` and `value` [T, G, E] to `kv_rows` [W] of `pool`; no other
    is touched."""
    keys, values = _keys_and_values(pool)
    keys.index_copy_(0, kv_rows, key.index_select(0, tokens))
    values.index_copy_(0, kv_rows, value.index_select(0, tokens))


def _keys_and_values(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, counted so that a token's key and value have one number."""
    rows = as_rows(pool)
    return rows, rows[pool.shape[2] :]


def decode(query: Tensor, pool: Tensor, pages: DecodePages, scale: float) -> Tensor:
    """Attend from the last token of each of D sequences: `query` [D, H, E], returns the same
    shape."""
    num_sequences, num_heads, head_dim = query.shape
    num_kv_heads = pool.shape[3]
    keys, values = (
        part.index_select(0, pages.kv_rows)
        .view(num_sequences, -1, num_kv_heads, head_dim)
        .transpose(1, 2)
        for part in _keys_and_values(pool)
    )
    # Query heads of one KV head stand where more queries would: no KV is repeated.
    grouped = query.reshape(num_sequences, num_kv_heads, -1, head_dim)
    output = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=pages.mask, scale=scale
    )
    return output.reshape(num_sequences, num_heads, head_dim)


def prefill(query: Tensor, pool: Tensor, pages: tuple[PrefillPages, ...], scale: float) -> Tensor:
    """Attend from all new tokens of each sequence to itself and what precedes it.

    `query` [T, H, E], returns the same shape.
    """
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for sequence in pages:
        rows = slice(sequence.first, sequence.first + sequence.length)
        keys, values = (
            part.index_select(0, sequence.kv_rows).transpose(0, 1)[None]
            for part in _keys_and_values(pool)
        )
        queries = query[rows].transpose(0, 1)[None]
        attended = output[rows].transpose(0, 1)[None]
        if sequence.start == 0:
            attended.copy_(
                F.scaled_dot_product_attention(
                    queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
                )
            )
        else:
            _attend_in_tiles(queries, keys, values, sequence.start, scale, attended)
    return output


def _attend_in_tiles(
    queries: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, output: Tensor
) -> None:
    """Attend from `queries` [1, H, length, E] at positions from `start` on; writes `output` [1, H,
    length, E]."""
    end = start + queries.shape[2]
    edges = [start, *range((start // _QUERY_TILE + 1) * _QUERY_TILE, end, _QUERY_TILE), end]
    places = torch.arange(end, device=queries.device)
    for begin, stop in itertools.pairwise(edges):
        rows = slice(begin - start, stop - start)
        output[:, :, rows] = F.scaled_dot_product_attention(
            queries[:, :, rows],
            keys[:, :, :stop],
            values[:, :, :stop],
            attn_mask=places[:stop] <= places[begin:stop, None],
            scale=scale,
            enable_gqa=True,
        )
