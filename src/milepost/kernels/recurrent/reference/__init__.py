"""Token mixers in plain torch: the definition, on any device.

rows     a step's tokens, and what is done with them in which order
delta    the delta rule in the chunkwise form; the mixers that follow it, Gated DeltaNet and Kimi
         Delta Attention, are here
mamba2   Mamba2

Legend: T tokens, G key heads, V value heads, K key_dim, W value_dim; of KDA H heads, each of K.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.platform.tensors import cast, rows_apart
from milepost.kernels.recurrent.mixer import (
    DeltaWeights,
    KDAProjected,
    MixerProjections,
    MixerSizes,
    Weights,
)
from milepost.kernels.recurrent.reference import delta, mamba2
from milepost.kernels.recurrent.reference.rows import (
    MixerPieces,
    MixerRows,
    lay_out_pieces,
    lay_out_rows,
    run,
)
from milepost.kernels.recurrent.structures import LayerStates

__all__ = ["MixerPieces", "MixerRows", "lay_out_pieces", "lay_out_rows", "mix"]


def mix(
    sizes: MixerSizes,
    projected: MixerProjections,
    weights: Weights,
    states: LayerStates,
    rows: MixerRows | MixerPieces,
) -> Tensor:
    """See `RecurrentOperation.mix`."""
    if isinstance(rows, MixerPieces):
        pieces = [(_take(projected, tokens), own) for tokens, own in rows.pieces]
        return torch.cat([mix(sizes, own, weights, states, piece) for own, piece in pieces])
    if isinstance(weights, DeltaWeights):
        return _mix_delta(sizes, projected, weights, states, rows)
    assert isinstance(projected, Tensor)
    return mamba2.mix(sizes, projected, weights, states, rows)


def _take(projected: MixerProjections, tokens: slice) -> MixerProjections:
    if isinstance(projected, Tensor):
        return projected[tokens]
    return KDAProjected(*(each[tokens] for each in projected))


def _mix_delta(
    sizes: MixerSizes,
    projected: MixerProjections,
    weights: DeltaWeights,
    states: LayerStates,
    rows: MixerRows,
) -> Tensor:
    channels, heads = sizes.channels, sizes.heads
    if isinstance(projected, KDAProjected):
        mixed, beta_inputs = projected.rows.split((channels, heads), -1)
        _, decay_inputs, gate = projected
    else:
        columns = channels, sizes.width, heads, heads
        mixed, gate, beta_inputs, decay_inputs = projected.split(columns, -1)
    steps = delta.steps_of(partial(_prepare, sizes, weights), weights.conv, partial(_split, sizes))
    output = run(steps, (mixed, beta_inputs, decay_inputs), states, rows)
    return gated_norm(sizes, output, gate, weights).flatten(1)


def _prepare(
    sizes: MixerSizes,
    weights: DeltaWeights,
    mixed: Tensor,
    beta_inputs: Tensor,
    decay_inputs: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the convolution's inputs, log decays [T, V], or by channel [T, V, K], and betas [T,
    V]."""
    rate, bias, least = weights.decay_rate, weights.decay_bias, sizes.least_decay
    beta = rows_apart(rate, *beta_inputs.shape).copy_(beta_inputs).sigmoid_()
    if sizes.max_beta != 1:
        beta.mul_(sizes.max_beta)
    wide = torch.add(decay_inputs, bias, out=rows_apart(rate, *decay_inputs.shape))
    if sizes.by_channel:
        wide, rate = wide.unflatten(-1, (sizes.heads, -1)), rate[:, None]
    if least:
        return mixed, wide.mul_(-rate).sigmoid_().mul_(least), beta
    return mixed, F.softplus(wide).mul_(rate), beta


def _split(sizes: MixerSizes, inputs: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """Returns queries and keys [T, 2, G, K], values [T, V, W]."""
    query_key, value = inputs.tensor_split((sizes.first_value,), -1)
    query_key = query_key.unflatten(-1, (2, sizes.units, sizes.shared))
    return query_key, value.unflatten(-1, (sizes.heads, sizes.own))


def gated_norm(sizes: MixerSizes, hidden: Tensor, gate: Tensor, weights: DeltaWeights) -> Tensor:
    """Norms each head of `hidden` [T, V, W] and multiplies it by SiLU of `gate` [T, V * W], or its
    sigmoid, in `hidden`'s type."""
    weight = weights.norm
    normed = F.rms_norm(cast(hidden, weight.dtype), weight.shape, weight, weights.norm_eps)
    wide = rows_apart(weight, *gate.shape).copy_(gate)
    opened = wide.sigmoid_() if sizes.gates_by_sigmoid else F.silu(wide, inplace=True)
    return cast(normed.mul_(opened.unflatten(-1, hidden.shape[1:])), hidden.dtype)
