"""Mamba2's token mixer in plain torch: the definition, on any device.

Legend: T tokens, C channels, H heads, P head_dim, G groups, N state_size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import conv
from milepost.kernels.mamba2 import reference
from milepost.kernels.mamba2.weights import Mamba2Weights
from milepost.kernels.platform.tensors import cast, rows_apart
from milepost.kernels.recurrent.mixer_rows import MixerRows, PrefillRows, Steps, run


def mix(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    rows: MixerRows,
    records: Tensor | None = None,
) -> Tensor:
    """See `mamba2.mix`."""
    channels = len(weights.conv)
    _, heads, head_dim, _ = recurrent_pool.shape
    gate, *inputs = projected.split((heads * head_dim, channels, heads), -1)
    steps = Steps(
        prepare=partial(_prepare, weights),
        decode=partial(_decode, weights),
        prefill=partial(_prefill, weights),
    )
    output = run(steps, inputs, (conv_pool, recurrent_pool), rows, records)
    groups = (channels - heads * head_dim) // (2 * recurrent_pool.shape[-1])
    return cast(gated_norm(output.flatten(1), gate, weights, groups), projected.dtype)


def _prepare(weights: Mamba2Weights, mixed: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What the convolution takes, and time steps [T, H]. These are bounded where a sequence decodes
    too: a state must not depend on who made it."""
    rate = weights.rate
    wide = torch.add(inputs, weights.dt_bias, out=rows_apart(rate, len(inputs), len(rate)))
    return mixed, F.softplus(wide).clamp_(*weights.dt_limit)


def _decode(
    weights: Mamba2Weights,
    mixed: Tensor,
    steps: Tensor,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
) -> Tensor:
    """One token a sequence; [D, H, P] before the norm."""
    slots = slot_in, slot_out
    inputs = conv.decode(mixed, weights.conv, weights.conv_bias, conv_pool, *slots)
    small = weights.rate, weights.skip, recurrent_pool
    return reference.decode(*_split(inputs, recurrent_pool), steps, *small, *slots)


def _prefill(
    weights: Mamba2Weights,
    mixed: Tensor,
    steps: Tensor,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    rows: PrefillRows,
) -> Tensor:
    """Many tokens a sequence; [T, H, P] before the norm."""
    slots, convolution = (rows.slot_in, rows.slot_out), (weights.conv, weights.conv_bias)
    inputs = conv.prefill(mixed, *convolution, conv_pool, *slots, rows.windows)
    small = weights.rate, weights.skip, recurrent_pool
    return reference.prefill(*_split(inputs, recurrent_pool), steps, *small, *slots, rows.chunks)


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
