"""Gated DeltaNet's token mixer in plain torch: the definition, on any device.

Legend: T tokens, C channels, V value heads, K key_dim, W value_dim, D decoding sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import conv
from milepost.kernels.gated_delta import reference
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.platform.tensors import cast, rows_apart
from milepost.kernels.recurrent.mixer_rows import MixerRows, PrefillRows, Steps, run


def mix(
    projected: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    rows: MixerRows,
    records: Tensor | None = None,
) -> Tensor:
    """See `gated_delta.mix`."""
    _, heads, _, value_dim = recurrent_pool.shape
    sizes = len(weights.conv), heads * value_dim, heads, heads
    mixed, gate, *strengths = projected.split(sizes, -1)
    steps = steps_of(partial(_prepare, weights), weights.conv, _heads, reference.prefill)
    output = run(steps, (mixed, *strengths), (conv_pool, recurrent_pool), rows, records)
    return gated_norm(output, gate.unflatten(-1, (-1, value_dim)), weights).flatten(1)


def _prepare(
    weights: GatedDeltaWeights, mixed: Tensor, beta_inputs: Tensor, decay_inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the convolution takes, log decays and betas [T, V]."""
    rate = weights.decay_rate
    wide = rows_apart(rate, 2, len(decay_inputs), len(rate))
    beta = wide[0].copy_(beta_inputs).sigmoid_().mul_(weights.max_beta)
    torch.add(decay_inputs, weights.decay_bias, out=wide[1])
    return mixed, F.softplus(wide[1]).mul_(rate), beta


def steps_of(
    prepare: Callable[..., Sequence[Tensor]],
    conv_weight: Tensor,
    heads_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    prefill: Callable[..., Tensor],
) -> Steps:
    """A convolution, then the delta rule: decodes return [D, V, W] before the norm, prefills [T, V,
    W]. `heads_of` takes what is convolved and the states' pool."""

    def decode(
        mixed: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        conv_pool: Tensor,
        recurrent_pool: Tensor,
        *slots: Tensor,
    ) -> Tensor:
        mixed = conv.decode(mixed, conv_weight, None, conv_pool, *slots)
        heads = heads_of(mixed, recurrent_pool)
        return reference.decode(*heads, log_decay, beta, recurrent_pool, *slots)

    def prefill_rows(
        mixed: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        conv_pool: Tensor,
        recurrent_pool: Tensor,
        rows: PrefillRows,
    ) -> Tensor:
        slots = rows.slot_in, rows.slot_out
        mixed = conv.prefill(mixed, conv_weight, None, conv_pool, *slots, rows.windows)
        heads = heads_of(mixed, recurrent_pool)
        return prefill(*heads, log_decay, beta, recurrent_pool, *slots, rows.chunks)

    return Steps(prepare=prepare, decode=decode, prefill=prefill_rows)


def _heads(inputs: Tensor, recurrent_pool: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, 2, G, K], values [T, V, W]."""
    _, heads, key_dim, value_dim = recurrent_pool.shape
    query_key, value = inputs.split((inputs.shape[1] - heads * value_dim, heads * value_dim), -1)
    return query_key.unflatten(-1, (2, -1, key_dim)), value.unflatten(-1, (-1, value_dim))


def gated_norm(hidden: Tensor, gate: Tensor, weights: GatedDeltaWeights) -> Tensor:
    """Norm of each head of `hidden` [T, V, W], times SiLU of `gate`, in `hidden`'s type."""
    weight = weights.norm
    normed = F.rms_norm(cast(hidden, weight.dtype), weight.shape, weight, weights.norm_eps)
    return cast(normed.mul_(F.silu(cast(gate, weight.dtype))), hidden.dtype)
