"""Paged attention in plain torch: the definition, on any device.

Keys and values are written to the pages first and always read back from there, so a token that
finds its KV in a shared page reads the very bits that another sequence wrote.

Rows that no token was written to are never read: places past the end of a sequence name its first
token's row, and are masked.

Multi-head latent attention (`attend_latents`) derives keys and values of all heads from one latent
per token, which is what pages hold. The matrices that derive them are applied to queries and
outputs instead (DeepSeek-V2, arXiv 2405.04434, section 2.1.2), so all heads attend to the latents
themselves: latents are keys, and their first entries values.

Legend: T tokens, W tokens whose KV is written, D tokens of decoding sequences (the first D of the
batch: one each unless a step verifies), L tokens of the longest of them, H query heads, G KV heads,
R = H / G query heads per KV head, E head_dim, O rotated dimensions of E. A pool is [pages, 2,
page_size, G, E] (see `pages`).
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.attention.pages import as_rows, read_rows, write_rows
from milepost.kernels.attention.rows import AttentionRows, Decodes, Prefill
from milepost.kernels.platform.tensors import cast

_QUERY_TILE = 512
"""Queries at a time if there are earlier tokens: bounds the mask's memory."""


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
    """Returns queries [T, H, E] of `projected` [T, N], whose columns begin with queries, keys and
    values, heads side by side.

    Query and key heads are each normed with `norm_scale` [H + G, E] and rotated by `angles`,
    cosines and sines [T, 1, O / 2]. Keys and values of the tokens that `rows` names are written to
    their rows of `pool`.
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
    """Rotate `heads` [T, H, E] by angles [T, 1, O / 2]; dimension i is paired with i + O / 2."""
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
    """Write KV of `tokens` [W] of `key` and `value` [T, G, E] to `kv_rows` [W] of `pool`, and touch
    no other row. `kv_scales` [2, G] are those of keys' and values' heads in FP8."""
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
    """Rows of keys and of values: a token has the same number in both."""
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
    # Query heads of one KV head take the place of further queries, so no KV is repeated.
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
    """Attend from each sequence's new tokens, in order in `query` [T, H, E], to themselves and what
    precedes them; returns the same shape."""
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


# --- latents: R latent_dim, P entries of a key that all heads share, E = R + P --------------------


def store_latents(
    projected: Tensor,
    norm_weight: Tensor,
    eps: float,
    pool: Tensor,
    rows: AttentionRows,
    kv_scale: Tensor | None = None,
) -> None:
    """Write the latents `projected` [T, E] of the tokens that `rows` names to their rows of `pool`,
    the first R entries normed with `norm_weight` [R]. `kv_scale` [1] is that of latents in FP8."""
    size = len(norm_weight)
    kept = projected.index_select(0, rows.tokens)
    latent = cast(kept[:, :size], norm_weight.dtype)
    normed = F.rms_norm(latent, (size,), norm_weight, eps)
    latents = torch.cat((cast(normed, kept.dtype), kept[:, size:]), -1)
    write_rows(as_rows(pool), rows.kv_rows, latents[:, None], kv_scale)


def attend_latents(
    query: Tensor,
    shared_query: Tensor,
    pool: Tensor,
    rows: AttentionRows,
    scale: float,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """Attend from `query` [T, H, R] and `shared_query` [T, H, P] to the pages of `pool`; returns
    [T, H, R]. `kv_scale` as in `store_latents`."""
    size, whole = query.shape[-1], torch.cat((query, shared_query), -1)
    parts, num_decodes = [], 0
    if rows.decodes is not None:
        num_decodes = len(rows.decodes.mask)
        keys = read_rows(as_rows(pool), rows.decodes.kv_rows, query.dtype, kv_scale)[:, 0]
        parts.append(_decode_latents(whole[:num_decodes], size, keys, rows.decodes, scale))
    for each in rows.prefills:
        first = num_decodes + each.first
        keys = read_rows(as_rows(pool), each.kv_rows, query.dtype, kv_scale)[:, 0]
        parts.append(
            _prefill_latents(whole[first : first + each.length], size, keys, each.start, scale)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode_latents(query: Tensor, size: int, keys: Tensor, rows: Decodes, scale: float) -> Tensor:
    """Attend from `query` [D, H, E] to `keys` [D * L, E]; returns [D, H, R]. Heads serve as
    queries."""
    keys = keys.view(len(query), 1, rows.mask.shape[-1], keys.shape[-1])
    attended = F.scaled_dot_product_attention(
        query[:, None], keys, keys[..., :size], attn_mask=rows.mask, scale=scale
    )
    return attended[:, 0]


def _prefill_latents(query: Tensor, size: int, keys: Tensor, start: int, scale: float) -> Tensor:
    """Attend from one sequence's `query` [length, H, E] to its `keys` [start + length, E]; returns
    [length, H, R]."""
    keys = keys[None, None]
    queries = query.transpose(0, 1)[None]
    output = query.new_empty(*query.shape[:2], size)
    attend_in_tiles(queries, keys, keys[..., :size], start, scale, output.transpose(0, 1)[None])
    return output
