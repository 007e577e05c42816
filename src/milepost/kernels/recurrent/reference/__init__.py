"""Token mixers in plain torch: the definition, on any device.

rows     a step's tokens, and what is done with them in which order
delta    the delta rule in the chunkwise form; the mixers that follow it, Gated DeltaNet and Kimi
         Delta Attention, are here
mamba2   Mamba2

Legend: T tokens, G key heads, V value heads, K key_dim, W value_dim; of KDA H heads, each of K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.platform.tensors import cast, rows_apart
from milepost.kernels.recurrent.reference import delta, mamba2
from milepost.kernels.recurrent.reference.rows import (
    MixerPieces,
    MixerRows,
    lay_out_pieces,
    lay_out_rows,
    run,
)
from milepost.kernels.recurrent.structures import LayerStates
from milepost.kernels.recurrent.table import (
    GatedDeltaWeights,
    KDAProjected,
    KDAWeights,
    Mamba2Weights,
    MixerProjections,
    Weights,
)

__all__ = ["MixerPieces", "MixerRows", "lay_out_pieces", "lay_out_rows", "mix"]


def mix_gated_delta(
    projected: Tensor, weights: GatedDeltaWeights, states: LayerStates, rows: MixerRows
) -> Tensor:
    """See `recurrent.mix`."""
    _, heads, _, value_dim = states.recurrent.shape
    sizes = len(weights.conv), heads * value_dim, heads, heads
    mixed, gate, *strengths = projected.split(sizes, -1)
    steps = delta.steps_of(partial(_prepare, weights), weights.conv, _split)
    output = run(steps, (mixed, *strengths), states, rows)
    return gated_norm(output, gate.unflatten(-1, (-1, value_dim)), weights).flatten(1)


def _prepare(
    weights: GatedDeltaWeights, mixed: Tensor, beta_inputs: Tensor, decay_inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the convolution's inputs, log decays and betas [T, V]."""
    rate = weights.decay_rate
    wide = rows_apart(rate, 2, len(decay_inputs), len(rate))
    beta = wide[0].copy_(beta_inputs).sigmoid_().mul_(weights.max_beta)
    torch.add(decay_inputs, weights.decay_bias, out=wide[1])
    return mixed, F.softplus(wide[1]).mul_(rate), beta


def _split(inputs: Tensor, recurrent_pool: Tensor) -> tuple[Tensor, Tensor]:
    """Returns queries and keys [T, 2, G, K], values [T, V, W]."""
    _, heads, key_dim, value_dim = recurrent_pool.shape
    query_key, value = inputs.split((inputs.shape[1] - heads * value_dim, heads * value_dim), -1)
    return query_key.unflatten(-1, (2, -1, key_dim)), value.unflatten(-1, (-1, value_dim))


def gated_norm(hidden: Tensor, gate: Tensor, weights: GatedDeltaWeights) -> Tensor:
    """Norms each head of `hidden` [T, V, W] and multiplies it by SiLU of `gate`, or its sigmoid, in
    `hidden`'s type."""
    weight = weights.norm
    normed = F.rms_norm(cast(hidden, weight.dtype), weight.shape, weight, weights.norm_eps)
    wide = cast(gate, weight.dtype)
    opened = wide.sigmoid() if weights.gates_by_sigmoid else F.silu(wide)
    return cast(normed.mul_(opened), hidden.dtype)


def mix_kda(
    projected: KDAProjected, weights: KDAWeights, states: LayerStates, rows: MixerRows
) -> Tensor:
    """See `recurrent.mix`."""
    sizes = len(weights.conv), len(weights.decay_rate)
    inputs = *projected.rows.split(sizes, -1), projected.decays
    steps = delta.steps_of(partial(_prepare_kda, weights), weights.conv, _split_kda)
    output = run(steps, inputs, states, rows)
    return _gated_norm_kda(output, projected.gate, weights).flatten(1)


def _prepare_kda(
    weights: KDAWeights, mixed: Tensor, beta_inputs: Tensor, decay_inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the convolution's inputs, log decays [T, H, K] and betas [T, H]."""
    rate, bias, least = weights.decay_rate, weights.decay_bias, weights.least_decay
    beta = rows_apart(rate, len(beta_inputs), len(rate)).copy_(beta_inputs).sigmoid_()
    wide = torch.add(decay_inputs, bias, out=rows_apart(rate, len(decay_inputs), len(bias)))
    by_head = wide.unflatten(-1, (len(rate), -1))
    if least:
        log_decay = by_head.mul_(-rate[:, None]).sigmoid_().mul_(least)
    else:
        log_decay = F.softplus(by_head).mul_(rate[:, None])
    return mixed, log_decay, beta


def _split_kda(convolved: Tensor, recurrent_pool: Tensor) -> tuple[Tensor, Tensor]:
    """Returns queries and keys [T, 2, H, K], values [T, H, K]."""
    heads = convolved.unflatten(-1, (3, *recurrent_pool.shape[1:3]))
    return heads[:, :2], heads[:, 2]


def _gated_norm_kda(hidden: Tensor, gate: Tensor, weights: KDAWeights) -> Tensor:
    """Norms each head of `hidden` [T, H, K] and multiplies it by the sigmoid of `gate` [T, H * K],
    in `hidden`'s type."""
    weight = weights.norm
    gate = rows_apart(weight, *gate.shape).copy_(gate).sigmoid_()
    normed = F.rms_norm(cast(hidden, weight.dtype), weight.shape, weight, weights.norm_eps)
    return cast(normed.mul_(gate.unflatten(-1, hidden.shape[1:])), hidden.dtype)


_MIXES: dict[type[Weights], Callable[..., Tensor]] = {
    GatedDeltaWeights: mix_gated_delta,
    KDAWeights: mix_kda,
    Mamba2Weights: mamba2.mix,
}


def mix(
    projected: MixerProjections,
    weights: Weights,
    states: LayerStates,
    rows: MixerRows | MixerPieces,
) -> Tensor:
    """See `recurrent.mix`."""
    define = _MIXES[type(weights)]
    if isinstance(rows, MixerRows):
        return define(projected, weights, states, rows)
    parts = [define(_take(projected, at), weights, states, own) for at, own in rows.pieces]
    return torch.cat(parts)


def _take(projected: MixerProjections, tokens: slice) -> MixerProjections:
    if isinstance(projected, Tensor):
        return projected[tokens]
    return KDAProjected(*(each[tokens] for each in projected))
