"""Kimi Delta Attention in plain torch: the definition, on any device.

The gated delta rule with a decay for every channel of a key. For each head, with state S [head_dim,
head_dim] (Kimi Linear, arXiv 2510.26692, section 3):

    S_t = D_t S_{t-1} + k_t (beta_t (v_t - (D_t S_{t-1})^T k_t))^T        out_t = S_t^T q_t

where D_t is diagonal. Keys and queries are L2-normalised here, and queries scaled by head_dim **
-0.5. One token at a time it is `gated_delta.reference.decode`.

Legend: T tokens, S sequences, N chunks, C tokens in a chunk, H heads, K head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.gated_delta.reference import Chunks, chunk_fwd, chunked, normalise
from milepost.kernels.layout.chunks import ChunkRows


def prefill(
    query_key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: ChunkRows,
) -> Tensor:
    """Advance S sequences by all their tokens; returns [T, H, K] in `value`'s type and writes
    `pool`.

    `query_key` [T, 2, H, K], `value` and `log_decay` [T, H, K], `beta` [T, H], `pool` [slots, H, K,
    K], `slot_in` and `slot_out` [S]. States that `layout` names as exports are written to their
    slots on the way.
    """
    chunks = _wy_fwd(query_key, value, log_decay, beta, layout)
    return chunk_fwd(chunks, pool, slot_in, slot_out, layout).to(value.dtype)


def _wy_fwd(
    query_key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, layout: ChunkRows
) -> Chunks:
    """The part of the chunkwise form that doesn't depend on the state."""
    query, key = chunked(normalise(query_key), layout).unbind(2)  # [N, H, C, K]
    is_token = layout.is_token[:, None, :, None]
    beta = chunked(beta.to(key.dtype), layout)[..., None].where(is_token, 0)
    decay_sums = chunked(log_decay.to(key.dtype), layout)
    decay_sums = decay_sums.where(is_token, 0).cumsum(2)
    total = decay_sums[..., -1:, :]
    system, scores = (key.new_zeros(*key.shape[:3], layout.chunk) for _ in "kq")
    for token in range(layout.chunk):
        # No decay may be divided by: over a chunk it can be too small for a number.
        own, later = slice(token, token + 1), slice(token, None)
        since = (decay_sums[..., later, :] - decay_sums[..., own, :]).exp_() * key[..., own, :]
        system[..., later, token] = (key[..., later, :] * since).sum(-1)
        scores[..., later, token] = (query[..., later, :] * since).sum(-1)

    from_begin = decay_sums.exp()
    values = chunked(value.to(key.dtype), layout)
    sides = torch.cat((values * beta, key * beta * from_begin), -1)
    solution = torch.linalg.solve_triangular(system * beta, sides, upper=False, unitriangular=True)
    u, w = solution.flatten(0, 1).split((value.shape[-1], key.shape[-1]), -1)
    return Chunks(
        queries=(query * from_begin).flatten(0, 1),
        keys=(key * (total - decay_sums).exp()).flatten(0, 1),
        w=w,
        u=u.contiguous(),
        scores=scores.flatten(0, 1),
        decay=total.exp().flatten(0, 1).mT,
    )
