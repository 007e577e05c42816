"""Kimi Delta Attention's rule: one beta per head, one decay per key channel.

Kimi Linear (arXiv 2510.26692), section 3.1.

Legend: H heads, K head_dim, O columns of a program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.numerics import sigmoid, softplus
from milepost.kernels.recurrent.portable.stream import load_place
from milepost.kernels.recurrent.rules.gated_delta import (
    advance,
    delta_sizes,
    delta_weights,
    read,
)
from milepost.kernels.recurrent.structures import Mixer, MixerInputs, MixerRule, ProjectedRows
from milepost.kernels.recurrent.weights import KDAProjected, KDAWeights


def describe(projected: KDAProjected, weights: KDAWeights, recurrent_pool: Tensor) -> Mixer:
    """The mixer of `projected`."""
    rows, decays, gate = projected
    sizes = delta_sizes(weights, recurrent_pool, decays.shape[1])
    sizes = sizes._replace(least_decay=weights.least_decay)
    stride, channels = rows.stride(0), sizes.channels
    return Mixer(
        inputs=MixerInputs(
            mixed=ProjectedRows(rows, stride),
            strengths=ProjectedRows(rows[:, channels:], stride, channels),
            decays=ProjectedRows(decays, decays.stride(0), channels + sizes.heads),
            gate=ProjectedRows(gate, gate.stride(0)),
        ),
        weights=delta_weights(weights),
        sizes=sizes,
        rule=MixerRule(open_head, strengths, advance, read, finish),
        rule_of=KDAWeights,
    )


class KDAHead(NamedTuple):
    """Weights that a program reads once."""

    index: Any
    channel: Any
    """[K] of its decay inputs."""
    decay_rate: Any
    decay_bias: Any
    """[K]"""


@triton.jit
def open_head(weights, head, o_shared, o_own, SIZES: tl.constexpr, HEADS: tl.constexpr):
    """See `MixerRule`."""
    # Channels beyond the head's last repeat it: the state has none of them.
    channel = head * SIZES.shared + tl.minimum(o_shared, SIZES.shared - 1)
    bias = tl.load(weights.decay_bias + channel)
    return KDAHead(head, channel, tl.load(weights.decay_rate + head), bias)


@triton.jit
def strengths(streams, place, head, weights, SIZES: tl.constexpr, VERIFIES: tl.constexpr):
    """Beta, and the decay of each key channel [K, 1]; see `MixerRule`."""
    b_beta = sigmoid(load_place(streams.strengths, head.index, place, VERIFIES))
    wide = load_place(streams.decays, head.channel, place, VERIFIES).to(tl.float32)
    wide += head.decay_bias
    return b_beta, tl.exp(log_decays(wide, head.decay_rate, SIZES.least_decay))[:, None]


@triton.jit
def log_decays(x, rate, LEAST: tl.constexpr):
    """The logarithms of decays: see `KDAWeights.least_decay`."""
    if LEAST != 0:
        return LEAST * sigmoid(-rate * x)
    else:
        return rate * softplus(x)


@triton.jit
def finish(y, weight, gate, eps, WIDTH: tl.constexpr):
    """RMS norm of the rows of `y`, times the sigmoid of `gate`."""
    scale = tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / WIDTH + eps)
    return y * scale * weight * sigmoid(gate)
