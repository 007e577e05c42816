"""Paged attention in plain torch: the definition, on any device.

Keys and values are written to the pages first and always read back from there, so a token that
finds its KV in a shared page reads the very bits that another sequence wrote.

Rows that no token was written to are never read: places past the end of a sequence name its first
token's row, and are masked.

Multi-head latent attention derives keys and values of all heads from one latent
per token, which is what pages hold. The matrices that derive them are applied to queries and
outputs instead (DeepSeek-V2, arXiv 2405.04434, section 2.1.2), so all heads attend to the latents
themselves: latents are keys, and their first entries values.

Legend: T tokens, W tokens whose KV is written, D tokens of decoding sequences (the first D of the
batch: one each unless a step verifies), L tokens of the longest of them, H query heads, G KV heads,
E head_dim, O rotated dimensions of E; of latents R entries that are values too, P that all heads
share, E = R + P. A pool is [pages, 2, page_size, G, E], of latents [pages, 1, page_size, 1, E] (see
`pages`).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import norm
from milepost.kernels.attention.pages import (
    AttentionRows,
    Decodes,
    PagedKV,
    Prefill,
    as_rows,
    read_rows,
    write_rows,
)
from milepost.kernels.platform.tensors import cast

_QUERY_TILE = 512
"""Queries at a time if there are earlier tokens: bounds the mask's memory."""


def prepare(
    projected: Tensor,
    norm_scale: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    kv: PagedKV,
    rows: AttentionRows,
    *,
    num_heads: int,
) -> Tensor:
    """Returns queries [T, H, E] of `projected` [T, N], whose columns begin with queries, keys and
    values, heads side by side.

    Query and key heads are each normed with `norm_scale` [H + G, E] and rotated by `angles`,
    cosines and sines [T, 1, O / 2]. Keys and values of the tokens that `rows` names are written to
    their rows of the pool.
    """
    _, _, _, num_kv_heads, head_dim = kv.pool.shape
    heads = projected[:, : (num_heads + 2 * num_kv_heads) * head_dim].unflatten(1, (-1, head_dim))
    query_key, value = heads.split((num_heads + num_kv_heads, num_kv_heads), 1)
    if norm_scale is not None:
        query_key = norm.norm(query_key, norm_scale, eps)
    if angles is not None:
        query_key = turn(query_key, *angles)
    query: Tensor
    query, key = query_key.split((num_heads, num_kv_heads), 1)
    store(kv, key, value, rows.tokens, rows.kv_rows)
    return query


def turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns `heads` [T, H, E] rotated by angles [T, 1, O / 2]; dimension i is paired with i + O /
    2."""
    half = cosines.shape[-1]
    first, second, rest = heads.split((half, half, heads.shape[-1] - 2 * half), -1)
    turned = (first * cosines - second * sines, second * cosines + first * sines, rest)
    return torch.cat(turned, -1)


def store(kv: PagedKV, key: Tensor, value: Tensor, tokens: Tensor, kv_rows: Tensor) -> None:
    """Writes `key` and `value` [T, G, E] of `tokens` [W] to `kv_rows` [W] of the pool; no other row
    changes."""
    rows, scales = as_rows(kv.pool), (None, None) if kv.scales is None else kv.scales
    write_rows(rows, kv_rows, key.index_select(0, tokens), scales[0])
    # A page's values have the same order as its keys.
    write_rows(rows[kv.pool.shape[2] :], kv_rows, value.index_select(0, tokens), scales[1])


class TurnedEntries(NamedTuple):
    """Angles for the entries that all heads share, and the queries to be turned by them too."""

    cosines: Tensor
    sines: Tensor
    """[T, 1, P / 2]; entry 2 * i is paired with the next one."""
    query: Tensor
    """[T, H, P], turned in place."""


def store_latents(
    projected: Tensor,
    norm_weight: Tensor,
    eps: float,
    kv: PagedKV,
    rows: AttentionRows,
    turned: TurnedEntries | None = None,
) -> None:
    """Writes latents `projected` [T, E] to the pool, for the tokens and rows that `rows` names. The
    first R entries are normed with `norm_weight` [R]; the others are rotated if they are
    `turned`."""
    size, shared = len(norm_weight), projected[:, None, len(norm_weight) :]
    if turned is not None:
        angles = turned.cosines, turned.sines
        turned.query.copy_(turn_pairs(turned.query, *angles))
        shared = turn_pairs(shared, *angles)
    latent = projected[:, :size].index_select(0, rows.tokens)
    normed = F.rms_norm(cast(latent, norm_weight.dtype), (size,), norm_weight, eps)
    shared = shared.index_select(0, rows.tokens)
    latents = torch.cat((cast(normed, latent.dtype)[:, None], shared), -1)
    write_rows(as_rows(kv.pool), rows.kv_rows, latents, kv.scales)


def turn_pairs(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns `heads` [T, H, P] rotated by angles [T, 1, P / 2]; dimension 2 * i is paired with the
    next one."""
    first, second = heads[..., ::2], heads[..., 1::2]
    turned = first * cosines - second * sines, second * cosines + first * sines
    return torch.stack(turned, -1).flatten(-2)


def attend(
    query: Tensor,
    gate: Tensor | None,
    kv: PagedKV,
    rows: AttentionRows,
    scale: float,
    shared_query: Tensor | None = None,
) -> Tensor:
    """Attends from `query` [T, H, E] to pages, and multiplies by the sigmoid of `gate` [T, H * E]
    or [T, H] if given; returns [T, H * E]. With latents attends from `query` [T, H, R] and
    `shared_query` [T, H, P], and returns [T, H * R]."""
    size = None
    if shared_query is not None:
        size, query = query.shape[-1], torch.cat((query, shared_query), -1)
    parts, num_decodes = [], 0
    for decodes in rows.decodes:
        group = slice(num_decodes, num_decodes + len(decodes.mask))
        parts.append(decode(query[group], kv, decodes, scale, size))
        num_decodes = group.stop
    if rows.prefills:
        parts.append(prefill(query[num_decodes:], kv, rows.prefills, scale, size))
    if not parts:  # a step that only folds accepted tokens
        return query.new_empty(0, query.shape[1] * (size or query.shape[-1]))
    return gated(parts[0] if len(parts) == 1 else torch.cat(parts), gate)


def gated(attended: Tensor, gate: Tensor | None) -> Tensor:
    """Returns [T, H * E] of `attended` [T, H, E], times the sigmoid of `gate`: see `attend`."""
    flat = attended.flatten(1)
    if gate is None:
        return flat
    return flat.mul_(gate.sigmoid().repeat_interleave(flat.shape[1] // gate.shape[1], 1))


def _read(
    kv: PagedKV, kv_rows: Tensor, dtype: torch.dtype, size: int | None
) -> tuple[Tensor, Tensor]:
    """Returns keys and values of these rows. With a `size` they are latents: each is a key, and its
    first `size` entries are its value."""
    rows, page_size = as_rows(kv.pool), kv.pool.shape[2]
    if size is not None:
        keys = read_rows(rows, kv_rows, dtype, kv.scales)
        return keys, keys[..., :size]
    scales = (None, None) if kv.scales is None else kv.scales
    keys = read_rows(rows, kv_rows, dtype, scales[0])
    return keys, read_rows(rows[page_size:], kv_rows, dtype, scales[1])


def decode(
    query: Tensor, kv: PagedKV, rows: Decodes, scale: float, size: int | None = None
) -> Tensor:
    """Attends from D tokens, each by itself: `query` [D, H, E], returns the same shape, of latents
    [D, H, size]."""
    num_tokens, num_heads, _ = query.shape
    keys, values = (
        each.view(num_tokens, rows.mask.shape[-1], *each.shape[1:]).transpose(1, 2)
        for each in _read(kv, rows.kv_rows, query.dtype, size)
    )
    # Query heads of one KV head take the place of further queries, so no KV is repeated.
    grouped = query.unflatten(1, (kv.pool.shape[3], -1))
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows.mask, scale=scale)
    return output.reshape(num_tokens, num_heads, output.shape[-1])


def prefill(
    query: Tensor, kv: PagedKV, prefills: tuple[Prefill, ...], scale: float, size: int | None = None
) -> Tensor:
    """Attends from each sequence's new tokens, in order in `query` [T, H, E], to themselves and all
    tokens before them. Returns the same shape, or [T, H, size] with latents."""
    output = query.new_empty(*query.shape[:2], size or query.shape[2])
    for sequence in prefills:
        rows = slice(sequence.first, sequence.first + sequence.length)
        keys, values = (
            each.transpose(0, 1)[None] for each in _read(kv, sequence.kv_rows, query.dtype, size)
        )
        queries = query[rows].transpose(0, 1)[None]
        attended = output[rows].transpose(0, 1)[None]
        if sequence.start == 0 and size is None and sequence.window is None:
            attended.copy_(
                F.scaled_dot_product_attention(
                    queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
                )
            )
        else:
            attend_in_tiles(queries, keys, values, sequence, scale, attended)
    return output


def attend_in_tiles(
    queries: Tensor, keys: Tensor, values: Tensor, sequence: Prefill, scale: float, output: Tensor
) -> None:
    """Attends from a sequence's `queries` [1, H, length, E] to the keys that it names; writes
    `output` [1, H, length, E]."""
    start, first, end = sequence.start, sequence.begin, sequence.start + sequence.length
    edges = [start, *range((start // _QUERY_TILE + 1) * _QUERY_TILE, end, _QUERY_TILE), end]
    places = torch.arange(end, device=queries.device)
    for begin, stop in itertools.pairwise(edges):
        rows = slice(begin - start, stop - start)
        seen = places[:stop] <= places[begin:stop, None]
        least = 0
        if sequence.window is not None:
            seen &= places[:stop] > places[begin:stop, None] - sequence.window
            least = max(begin + 1 - sequence.window, 0)
        keys_seen = slice(least - first, stop - first)
        output[:, :, rows] = F.scaled_dot_product_attention(
            queries[:, :, rows],
            keys[:, :, keys_seen],
            values[:, :, keys_seen],
            attn_mask=seen[:, least:],
            scale=scale,
            enable_gqa=True,
        )
