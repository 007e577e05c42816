"""Mamba2's token mixer in plain torch: the definition, on any device.

Legend: T tokens, C channels, H heads, P head_dim, G groups, N state_size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import conv
from milepost.kernels.mamba2 import reference
from milepost.kernels.mamba2.weights import Mamba2Weights
from milepost.kernels.mixer_rows import MixerRows
from milepost.kernels.precision import cast


def mix(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    rows: MixerRows,
) -> Tensor:
    """See `mamba2.mix`."""
    channels = len(weights.conv)
    _, heads, head_dim, _ = recurrent_pool.shape
    gate, mixed, steps = projected.split((heads * head_dim, channels, heads), -1)
    # Bounded where a sequence decodes too: a state must not depend on who made it.
    steps = F.softplus(cast(steps, weights.rate.dtype) + weights.dt_bias).clamp_(*weights.dt_limit)
    small = weights.rate, weights.skip, recurrent_pool
    parts, num_decodes = [], len(rows.slot_in)
    if num_decodes:
        own = slice(num_decodes)
        slots = rows.slot_in, rows.slot_out
        inputs = conv.decode(mixed[own], weights.conv, weights.conv_bias, conv_pool, *slots)
        x, b, c = _split(inputs, recurrent_pool)
        parts.append(reference.decode(x, b, c, steps[own], *small, *slots))
    if rows.prefills is not None:
        own, many = slice(num_decodes, None), rows.prefills
        slots = many.slot_in, many.slot_out
        inputs = conv.prefill(
            mixed[own], weights.conv, weights.conv_bias, conv_pool, *slots, many.windows
        )
        x, b, c = _split(inputs, recurrent_pool)
        parts.append(reference.prefill(x, b, c, steps[own], *small, *slots, many.chunks))
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    groups = (channels - heads * head_dim) // (2 * recurrent_pool.shape[-1])
    return cast(gated_norm(output.flatten(1), gate, weights, groups), projected.dtype)


def _split(inputs: Tensor, recurrent_pool: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H, P], b and c [T, G, N]."""
    _, heads, head_dim, state_size = recurrent_pool.shape
    x, b_c = inputs.tensor_split((heads * head_dim,), -1)
    b, c = b_c.unflatten(-1, (2, -1, state_size)).unbind(1)
    return x.unflatten(-1, (heads, head_dim)), b, c


def gated_norm(hidden: Tensor, gate: Tensor, weights: Mamba2Weights, groups: int) -> Tensor:
    """`hidden` [T, H * P] times SiLU of `gate`, normed group by group behind that or before it."""
    gate = F.silu(cast(gate, hidden.dtype))
    if weights.norm is None:
        return hidden * gate
    if not weights.norm_before_gate:
        hidden = hidden * gate
    grouped = hidden.unflatten(-1, (groups, -1))
    normed = F.rms_norm(grouped, grouped.shape[-1:], eps=weights.norm_eps).flatten(1)
    normed = normed.mul_(weights.norm)
    return normed.mul_(gate) if weights.norm_before_gate else normed
