"""Kimi Delta Attention in plain torch: the definition, on any device.

The gated delta rule with a decay for every channel of a key. For each head, with state S [head_dim,
head_dim] (Kimi Linear, arXiv 2510.26692, section 3):

    S_t = D_t S_{t-1} + k_t (beta_t (v_t - (D_t S_{t-1})^T k_t))^T        out_t = S_t^T q_t

where D_t is diagonal. Keys and queries are L2-normalised here, and queries scaled by head_dim **
-0.5. One token at a time it is `reference.gated_delta.decode`.

Legend: T tokens, S sequences, N chunks, C tokens in a chunk, H heads, K head_dim.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.layout.chunks import ChunkRows
from milepost.kernels.platform.tensors import cast, rows_apart
from milepost.kernels.recurrent.reference.gated_delta import (
    ReferenceChunks,
    chunk_fwd,
    chunked,
    normalise,
    steps_of,
)
from milepost.kernels.recurrent.reference.rows import MixerRows, run
from milepost.kernels.recurrent.structures import LayerStates
from milepost.kernels.recurrent.weights import KDAProjected, KDAWeights


def mix(
    projected: KDAProjected, weights: KDAWeights, states: LayerStates, rows: MixerRows
) -> Tensor:
    """See `recurrent.mix`."""
    sizes = len(weights.conv), len(weights.decay_rate)
    inputs = *projected.rows.split(sizes, -1), projected.decays
    steps = steps_of(partial(_prepare, weights), weights.conv, _heads, prefill)
    output = run(steps, inputs, states, rows)
    return gated_norm(output, projected.gate, weights).flatten(1)


def _prepare(
    weights: KDAWeights, mixed: Tensor, beta_inputs: Tensor, decay_inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution's inputs, log decays [T, H, K] and betas [T, H]."""
    rate, bias = weights.decay_rate, weights.decay_bias
    beta = rows_apart(rate, len(beta_inputs), len(rate)).copy_(beta_inputs).sigmoid_()
    wide = torch.add(decay_inputs, bias, out=rows_apart(rate, len(decay_inputs), len(bias)))
    log_decay = F.softplus(wide).unflatten(-1, (len(rate), -1)).mul_(rate[:, None])
    return mixed, log_decay, beta


def _heads(convolved: Tensor, recurrent_pool: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, 2, H, K], values [T, H, K]."""
    heads = convolved.unflatten(-1, (3, *recurrent_pool.shape[1:3]))
    return heads[:, :2], heads[:, 2]


def gated_norm(hidden: Tensor, gate: Tensor, weights: KDAWeights) -> Tensor:
    """Norm of each head of `hidden` [T, H, K], times the sigmoid of `gate` [T, H * K], in
    `hidden`'s type."""
    weight = weights.norm
    gate = rows_apart(weight, *gate.shape).copy_(gate).sigmoid_()
    normed = F.rms_norm(cast(hidden, weight.dtype), weight.shape, weight, weights.norm_eps)
    return cast(normed.mul_(gate.unflatten(-1, hidden.shape[1:])), hidden.dtype)


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
) -> ReferenceChunks:
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
    return ReferenceChunks(
        queries=(query * from_begin).flatten(0, 1),
        keys=(key * (total - decay_sums).exp()).flatten(0, 1),
        w=w,
        u=u.contiguous(),
        scores=scores.flatten(0, 1),
        decay=total.exp().flatten(0, 1).mT,
    )
