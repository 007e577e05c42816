"""Gated DeltaNet's token mixer in plain torch: the definition, on any device.

Legend: T tokens, C channels, V value heads, K key_dim, W value_dim, D decoding sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import conv
from milepost.kernels.gated_delta import reference
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.mixer_rows import MixerRows
from milepost.kernels.precision import cast


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
    inputs, pools = (mixed, *_gates(*strengths, weights)), (conv_pool, recurrent_pool)
    parts, num_decodes = [], len(rows.slot_in)
    if rows.verifies is not None:
        assert records is not None, "V1: only mixers that keep records verify"
        num_decodes = sum(rows.verifies.lengths)
        own = tuple(part[:num_decodes] for part in (*inputs, *strengths))
        parts.append(_verify(*own, weights, *pools, rows, records))
    elif num_decodes:
        own = tuple(part[:num_decodes] for part in inputs)
        parts.append(_decode(*own, weights, *pools, rows.slot_in, rows.slot_out))
    if rows.prefills is not None:
        (mixed, *gates), many = (part[num_decodes:] for part in inputs), rows.prefills
        slots = many.slot_in, many.slot_out
        mixed = conv.prefill(mixed, weights.conv, None, conv_pool, *slots, many.windows)
        heads_of = _heads(mixed, recurrent_pool)
        parts.append(reference.prefill(*heads_of, *gates, recurrent_pool, *slots, many.chunks))
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return gated_norm(output, gate.unflatten(-1, (-1, value_dim)), weights).flatten(1)


def _gates(
    beta_inputs: Tensor, decay_inputs: Tensor, weights: GatedDeltaWeights
) -> tuple[Tensor, Tensor]:
    """Log decays and betas [T, V]."""
    rate = weights.decay_rate
    # Of rows with something between them torch computes each by itself: an element's bits do not
    # depend on which tokens are beside it.
    wide = rate.new_empty(2, len(decay_inputs), len(rate) + 1)[..., :-1]
    beta = wide[0].copy_(beta_inputs).sigmoid_().mul_(weights.max_beta)
    torch.add(decay_inputs, weights.decay_bias, out=wide[1])
    return F.softplus(wide[1]).mul_(rate), beta


def _decode(
    mixed: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
) -> Tensor:
    """One token a sequence; [D, V, W] before the norm."""
    mixed = conv.decode(mixed, weights.conv, None, conv_pool, slot_in, slot_out)
    heads_of = _heads(mixed, recurrent_pool)
    return reference.decode(*heads_of, log_decay, beta, recurrent_pool, slot_in, slot_out)


def _verify(
    mixed: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    beta_inputs: Tensor,
    decay_inputs: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    rows: MixerRows,
    records: Tensor,
) -> Tensor:
    """Tokens one by one, by the very operations of a decode, in a copy of the states; [T, V, W]
    before the norm."""
    verifies, pools = rows.verifies, (conv_pool, recurrent_pool)
    assert verifies is not None
    own = [pool.index_select(0, rows.slot_in) for pool in pools]
    sizes = mixed.shape[1], beta_inputs.shape[1], decay_inputs.shape[1]
    old, *strengths = records[verifies.folded].split(sizes, -1)
    both = zip((old, *_gates(*strengths, weights)), (mixed, log_decay, beta), strict=True)
    inputs = [torch.cat(parts) for parts in both]
    recorded = [part[verifies.drafts] for part in (mixed, beta_inputs, decay_inputs)]
    records[verifies.recorded] = torch.cat(recorded, 1)
    output = mixed.new_empty(len(inputs[0]), *recurrent_pool.shape[1::2])
    for each in verifies.rounds:
        of_round = (part[each.tokens] for part in inputs)
        output[each.tokens] = _decode(*of_round, weights, *own, each.sequences, each.sequences)
        for pool, states in zip(pools, own, strict=True):
            pool[rows.slot_out[each.stored]] = states[each.stored]
    return output[len(old) :]


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
