"""KDA's token mixer in plain torch: the definition, on any device.

Legend: T tokens, C channels, H heads, K head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import conv
from milepost.kernels.gated_delta.reference import decode
from milepost.kernels.kda.reference import prefill
from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.mixer_rows import MixerRows
from milepost.kernels.precision import cast


def mix(
    projected: Tensor,
    decay_inputs: Tensor,
    gate: Tensor,
    weights: KDAWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    rows: MixerRows,
) -> Tensor:
    """See `kda.mix`."""
    channels, rate = len(weights.conv), weights.decay_rate
    mixed, beta_inputs = projected.split((channels, len(rate)), -1)
    beta = cast(beta_inputs, rate.dtype).sigmoid()
    inputs = cast(decay_inputs, rate.dtype) + weights.decay_bias
    log_decay = F.softplus(inputs).unflatten(-1, (len(rate), -1)).mul_(rate[:, None])
    parts, num_decodes = [], len(rows.slot_in)
    if num_decodes:
        own = slice(num_decodes)
        slots = rows.slot_in, rows.slot_out
        convolved = conv.decode(mixed[own], weights.conv, None, conv_pool, *slots)
        heads = _heads(convolved, recurrent_pool)
        parts.append(decode(*heads, log_decay[own], beta[own], recurrent_pool, *slots))
    if rows.prefills is not None:
        own, many = slice(num_decodes, None), rows.prefills
        slots = many.slot_in, many.slot_out
        convolved = conv.prefill(mixed[own], weights.conv, None, conv_pool, *slots, many.windows)
        heads, gates = _heads(convolved, recurrent_pool), (log_decay[own], beta[own])
        parts.append(prefill(*heads, *gates, recurrent_pool, *slots, many.chunks))
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return gated_norm(output, gate.view(output.shape), weights).flatten(1)


def _heads(convolved: Tensor, recurrent_pool: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, 2, H, K], values [T, H, K]."""
    heads = convolved.unflatten(-1, (3, *recurrent_pool.shape[1:3]))
    return heads[:, :2], heads[:, 2]


def gated_norm(hidden: Tensor, gate: Tensor, weights: KDAWeights) -> Tensor:
    """Norm of each head of `hidden` [T, H, K], times the sigmoid of `gate`, in `hidden`'s type."""
    weight = weights.norm
    normed = F.rms_norm(cast(hidden, weight.dtype), weight.shape, weight, weights.norm_eps)
    return cast(normed.mul_(cast(gate, weight.dtype).sigmoid()), hidden.dtype)
