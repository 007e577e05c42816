"""Kimi Delta Attention in plain torch: the definition, on any device. See `delta` for its rule.

Legend: T tokens, H heads, K head_dim.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels.platform.tensors import cast, rows_apart
from milepost.kernels.recurrent.reference import delta
from milepost.kernels.recurrent.reference.rows import MixerRows, run
from milepost.kernels.recurrent.structures import LayerStates
from milepost.kernels.recurrent.weights import KDAProjected, KDAWeights


def mix(
    projected: KDAProjected, weights: KDAWeights, states: LayerStates, rows: MixerRows
) -> Tensor:
    """See `recurrent.mix`."""
    sizes = len(weights.conv), len(weights.decay_rate)
    inputs = *projected.rows.split(sizes, -1), projected.decays
    steps = delta.steps_of(partial(_prepare, weights), weights.conv, _split)
    output = run(steps, inputs, states, rows)
    return gated_norm(output, projected.gate, weights).flatten(1)


def _prepare(
    weights: KDAWeights, mixed: Tensor, beta_inputs: Tensor, decay_inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution's inputs, log decays [T, H, K] and betas [T, H]."""
    rate, bias, least = weights.decay_rate, weights.decay_bias, weights.least_decay
    beta = rows_apart(rate, len(beta_inputs), len(rate)).copy_(beta_inputs).sigmoid_()
    wide = torch.add(decay_inputs, bias, out=rows_apart(rate, len(decay_inputs), len(bias)))
    by_head = wide.unflatten(-1, (len(rate), -1))
    if least:
        log_decay = by_head.mul_(-rate[:, None]).sigmoid_().mul_(least)
    else:
        log_decay = F.softplus(by_head).mul_(rate[:, None])
    return mixed, log_decay, beta


def _split(convolved: Tensor, recurrent_pool: Tensor) -> tuple[Tensor, Tensor]:
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
