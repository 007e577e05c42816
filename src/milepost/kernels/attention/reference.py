"""Paged attention in plain torch: the definition, on any device.

Keys and values are written to the pages first and always read back from there, so a token that
finds its KV in a shared page reads the very bits that another sequence wrote.

Rows that no token was written to are never read: places past the end of a sequence name its first
token's row, and are masked.

Legend: T tokens, W tokens whose KV is written, D tokens of decoding sequences (the first D of the
batch: one each but where a step verifies), L tokens of the longest of them, H query heads, G KV
heads, R = H / G query heads for each KV head, E head_dim, O turned dimensions of E. A pool is
[pages, 2, page_size, G, E] (see `pages`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.attention.pages import as_rows, read_rows, write_rows
from milepost.kernels.layout.batch import Batch, Ints, ordinals_of
from milepost.kernels.platform.tensors import cast

_QUERY_TILE = 512
"""Queries at a time where earlier tokens are attended to: bounds the mask to a tile of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decodes:
    """KV up to each of D tokens of decoding sequences, padded to the longest."""

    kv_rows: Tensor
    """[D * L] int64, rows of the keys."""
    mask: Tensor
    """[D, 1, 1, L] bool, true where a token is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """KV of one sequence, and where its new tokens stand in the batch."""

    kv_rows: Tensor
    """[start + length] int64, rows of the keys."""
    first: int
    """Index among the prefill tokens of the sequence's first new token."""
    start: int
    """Position of that token."""
    length: int
    """New tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRows:
    """The work of a step: rows of the memory that are written and read."""

    tokens: Tensor
    """[W] int64, the batch's tokens whose KV is written."""
    kv_rows: Tensor
    """[W] int64, row to which each of their keys is written."""
    decodes: Decodes | None
    prefills: tuple[Prefill, ...]


def lay_out(batch: Batch, first_row: int = 0) -> AttentionRows:
    """What `prepare` and `attend` read. Decodes may leave out KV before `first_row`, behind which
    they stand."""
    assert not first_row or batch.num_decodes == len(batch.starts), "rows are left out of decodes"
    tokens = np.flatnonzero(batch.kv_rows >= 0)
    return AttentionRows(
        tokens=torch.from_numpy(tokens).to(batch.device),
        kv_rows=torch.from_numpy(batch.kv_rows[tokens]).to(batch.device),
        decodes=_lay_out_decodes(batch, first_row) if batch.num_decodes else None,
        prefills=tuple(_lay_out_prefills(batch)),
    )


def _lay_out_decodes(batch: Batch, first_row: int) -> Decodes:
    lengths = batch.lengths[: batch.num_decodes]
    owners = np.arange(batch.num_decodes).repeat(lengths)
    ends = batch.starts[owners] + ordinals_of(lengths) + 1
    longest = int(ends.max(initial=0))
    kv_rows = _rows_of(batch, batch.rows[owners], longest)
    mask = np.arange(longest) < ends[:, None]
    kv_rows = np.where(mask, kv_rows, kv_rows[:, :1])
    mask[:, :first_row] = False
    return Decodes(
        kv_rows=torch.from_numpy(kv_rows.reshape(-1)).to(batch.device),
        mask=torch.from_numpy(mask).to(batch.device)[:, None, None],
    )


def _lay_out_prefills(batch: Batch) -> Iterator[Prefill]:
    first = 0
    for sequence in range(batch.num_decodes, len(batch.starts)):
        start, length = int(batch.starts[sequence]), int(batch.lengths[sequence])
        kv_rows = torch.from_numpy(_rows_of(batch, batch.rows[sequence], start + length))
        yield Prefill(kv_rows=kv_rows.to(batch.device), first=first, start=start, length=length)
        first += length


def _rows_of(batch: Batch, tables: Any, num_tokens: int) -> Ints:
    """Rows [..., num_tokens] of the keys of each table's first tokens."""
    pages = batch.tables[tables, : -(-num_tokens // batch.page_size)].astype(np.int64)
    rows = pages[..., None] * batch.page_rows + np.arange(batch.page_size)
    return rows.reshape(*pages.shape[:-1], math.prod(rows.shape[-2:]))[..., :num_tokens]


def prepare(
    projected: Tensor,
    norm_scale: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    pool: Tensor,
    rows: AttentionRows,
    *,
    num_heads: int,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Queries [T, H, E] from `projected` [T, N], whose columns begin with queries, keys and values,
    heads side by side.

    Query and key heads are each normed with `norm_scale` [H + G, E] and turned by `angles`, cosines
    and sines [T, 1, O / 2]. Keys and values of the tokens that `rows` names go to their rows of
    `pool`.
    """
    _, _, _, num_kv_heads, head_dim = pool.shape
    heads = projected[:, : (num_heads + 2 * num_kv_heads) * head_dim].unflatten(1, (-1, head_dim))
    query_key, value = heads.split((num_heads + num_kv_heads, num_kv_heads), 1)
    if norm_scale is not None:
        wide = cast(query_key, norm_scale.dtype)
        normed = F.rms_norm(wide, wide.shape[-1:], eps=eps).mul_(norm_scale)
        query_key = cast(normed, query_key.dtype)
    if angles is not None:
        query_key = turn(query_key, *angles)
    query, key = query_key.split((num_heads, num_kv_heads), 1)
    store(pool, key, value, rows.tokens, rows.kv_rows, kv_scales)
    return query


def turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn `heads` [T, H, E] by the angles [T, 1, O / 2]; dimension i is paired with i + O / 2."""
    half = cosines.shape[-1]
    first, second, rest = heads.split((half, half, heads.shape[-1] - 2 * half), -1)
    turned = (first * cosines - second * sines, second * cosines + first * sines, rest)
    return torch.cat(turned, -1)


def store(
    pool: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: Tensor,
    kv_rows: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Write KV of `tokens` [W] of `key` and `value` [T, G, E] to `kv_rows` [W] of `pool`; no other
    is touched. `kv_scales` [2, G] are of keys' and values' heads in float8."""
    for part, new, scale in zip(
        _keys_and_values(pool), (key, value), _each(kv_scales), strict=True
    ):
        write_rows(part, kv_rows, new.index_select(0, tokens), scale)


def attend(
    query: Tensor,
    gate: Tensor | None,
    pool: Tensor,
    rows: AttentionRows,
    scale: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attend from `query` [T, H, E] to the pages of `pool`, times the sigmoid of `gate` [T, H * E]
    if there is one; returns [T, H * E]. `kv_scales` as in `store`."""
    parts, num_decodes = [], 0
    if rows.decodes is not None:
        num_decodes = len(rows.decodes.mask)
        parts.append(decode(query[:num_decodes], pool, rows.decodes, scale, kv_scales))
    if rows.prefills:
        parts.append(prefill(query[num_decodes:], pool, rows.prefills, scale, kv_scales))
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    flat = attended.flatten(1)
    return flat if gate is None else flat.mul_(gate.sigmoid())


def _keys_and_values(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, counted so that a token's key and value have one number."""
    rows = as_rows(pool)
    return rows, rows[pool.shape[2] :]


def _each(kv_scales: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if kv_scales is None else (kv_scales[0], kv_scales[1])


def decode(
    query: Tensor, pool: Tensor, rows: Decodes, scale: float, kv_scales: Tensor | None = None
) -> Tensor:
    """Attend from D tokens, each by itself: `query` [D, H, E], returns the same shape."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = pool.shape[3]
    keys, values = (
        read_rows(part, rows.kv_rows, query.dtype, each)
        .view(num_tokens, rows.mask.shape[-1], num_kv_heads, head_dim)
        .transpose(1, 2)
        for part, each in zip(_keys_and_values(pool), _each(kv_scales), strict=True)
    )
    # Query heads of one KV head stand where more queries would: no KV is repeated.
    grouped = query.unflatten(1, (num_kv_heads, -1))
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows.mask, scale=scale)
    return output.reshape(num_tokens, num_heads, head_dim)


def prefill(
    query: Tensor,
    pool: Tensor,
    prefills: tuple[Prefill, ...],
    scale: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attend from all new tokens of each sequence, which stand one behind the other in `query`
    [T, H, E], to itself and what precedes it; returns the same shape."""
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for sequence in prefills:
        rows = slice(sequence.first, sequence.first + sequence.length)
        keys, values = (
            read_rows(part, sequence.kv_rows, query.dtype, each).transpose(0, 1)[None]
            for part, each in zip(_keys_and_values(pool), _each(kv_scales), strict=True)
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
            attend_in_tiles(queries, keys, values, sequence.start, scale, attended)
    return output


def attend_in_tiles(
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
