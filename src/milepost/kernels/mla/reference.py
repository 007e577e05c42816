"""Multi-head latent attention in plain torch: the definition, on any device.

Keys and values of all heads are made of one latent a token, which is what pages hold. The matrices
that make them are taken into the queries and the outputs (DeepSeek-V2, arXiv 2405.04434, section
2.1.2), so all heads attend to the latents themselves: they are keys, and their first entries
values.

Legend: T tokens, H heads, R latent_dim, P entries of a key that all heads share as they are, E = R
+ P. A pool is [pages, 1, page_size, 1, E] (see `attention.pages`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.attention.pages import as_rows, read_rows, write_rows
from milepost.kernels.attention.reference import AttentionRows, Decodes, attend_in_tiles
from milepost.kernels.platform.tensors import cast


def store(
    projected: Tensor,
    norm_weight: Tensor,
    eps: float,
    pool: Tensor,
    rows: AttentionRows,
    kv_scale: Tensor | None = None,
) -> None:
    """Write the latents `projected` [T, E], the first R entries normed with `norm_weight` [R], of
    the tokens that `rows` names to their rows of `pool`. `kv_scale` [1] is of latents in float8."""
    size = len(norm_weight)
    kept = projected.index_select(0, rows.tokens)
    latent = cast(kept[:, :size], norm_weight.dtype)
    normed = F.rms_norm(latent, (size,), norm_weight, eps)
    latents = torch.cat((cast(normed, kept.dtype), kept[:, size:]), -1)
    write_rows(as_rows(pool), rows.kv_rows, latents[:, None], kv_scale)


def attend(
    query: Tensor,
    shared_query: Tensor,
    pool: Tensor,
    rows: AttentionRows,
    scale: float,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """Attend from `query` [T, H, R] and `shared_query` [T, H, P] to the pages of `pool`; returns
    [T, H, R]. `kv_scale` as in `store`."""
    size, whole = query.shape[-1], torch.cat((query, shared_query), -1)
    parts, num_decodes = [], 0
    if rows.decodes is not None:
        num_decodes = len(rows.decodes.mask)
        keys = read_rows(as_rows(pool), rows.decodes.kv_rows, query.dtype, kv_scale)[:, 0]
        parts.append(_decode(whole[:num_decodes], size, keys, rows.decodes, scale))
    for each in rows.prefills:
        first = num_decodes + each.first
        keys = read_rows(as_rows(pool), each.kv_rows, query.dtype, kv_scale)[:, 0]
        parts.append(_prefill(whole[first : first + each.length], size, keys, each.start, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(query: Tensor, size: int, keys: Tensor, rows: Decodes, scale: float) -> Tensor:
    """`query` [D, H, E] and `keys` [D * L, E], returns [D, H, R]: heads stand where more queries
    would."""
    keys = keys.view(len(query), 1, rows.mask.shape[-1], keys.shape[-1])
    attended = F.scaled_dot_product_attention(
        query[:, None], keys, keys[..., :size], attn_mask=rows.mask, scale=scale
    )
    return attended[:, 0]


def _prefill(query: Tensor, size: int, keys: Tensor, start: int, scale: float) -> Tensor:
    """`query` [length, H, E] of one sequence and its `keys` [start + length, E], returns [length,
    H, R]."""
    keys = keys[None, None]
    queries = query.transpose(0, 1)[None]
    output = query.new_empty(*query.shape[:2], size)
    attend_in_tiles(queries, keys, keys[..., :size], start, scale, output.transpose(0, 1)[None])
    return output
