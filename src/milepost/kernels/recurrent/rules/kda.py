"""Kimi Delta Attention's rule: one beta per head, one decay per key channel.

Kimi Linear (arXiv 2510.26692), section 3.1.

Legend: H heads, K head_dim, O columns of a program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.platform.numerics import sigmoid, softplus
from milepost.kernels.recurrent.portable.step import Mixer
from milepost.kernels.recurrent.portable.stream import load_place
from milepost.kernels.recurrent.rules.gated_delta import DeltaWeights, advance, read
from milepost.kernels.recurrent.structures import MixerInputs, MixerSizes, ProjectedRows


def describe(
    projected: Tensor,
    decay_inputs: Tensor,
    gate: Tensor,
    weights: KDAWeights,
    recurrent_pool: Tensor,
) -> Mixer:
    """The mixer of `projected` [T, C + H] and the others [T, H * K]; see `kda.mix`."""
    _, heads, head_dim, _ = recurrent_pool.shape
    channels, taps = weights.conv.shape
    size, stride = heads * head_dim, projected.stride(0)
    return Mixer(
        inputs=MixerInputs(
            mixed=ProjectedRows(projected, stride, 0),
            strengths=ProjectedRows(projected[:, channels:], stride, channels),
            decays=ProjectedRows(decay_inputs, size, channels + heads),
        ),
        gate=ProjectedRows(gate, size, 0),
        weights=DeltaWeights(
            weights.conv,
            None,
            weights.decay_rate,
            weights.decay_bias,
            1.0,
            weights.norm,
            weights.norm_eps,
        ),
        sizes=MixerSizes(
            units=heads,
            group=1,
            shared=head_dim,
            own=head_dim,
            shared_stride=head_dim,
            own_stride=1,
            first_read=0,
            first_write=size,
            first_own=2 * size,
            channels=channels,
            strengths=heads,
            decays=size,
            norms_heads=True,
            taps=taps,
        ),
        open_head=open_head,
        strengths=strengths,
        advance=advance,
        read=read,
        finish=finish,
    )


class KDAHead(NamedTuple):
    """What a program reads once."""

    index: Any
    channel: Any
    """[K] of its decay inputs."""
    decay_rate: Any
    decay_bias: Any
    """[K]"""


@triton.jit
def open_head(weights, head, o_shared, o_own, SIZES: tl.constexpr, HEADS: tl.constexpr):
    """See `step.Mixer`."""
    # Channels beyond the head's last repeat it: the state has none of them.
    channel = head * SIZES.shared + tl.minimum(o_shared, SIZES.shared - 1)
    bias = tl.load(weights.decay_bias + channel)
    return KDAHead(head, channel, tl.load(weights.decay_rate + head), bias)


@triton.jit
def strengths(streams, place, head, weights, VERIFIES: tl.constexpr):
    """Beta, and the decay of each key channel [K, 1]; see `step.Mixer`."""
    b_beta = sigmoid(load_place(streams.strengths, head.index, place, VERIFIES))
    wide = load_place(streams.decays, head.channel, place, VERIFIES).to(tl.float32)
    wide += head.decay_bias
    return b_beta, tl.exp(head.decay_rate * softplus(wide))[:, None]


@triton.jit
def finish(y, weight, gate, eps, WIDTH: tl.constexpr, squares=None):
    """RMS norm of the rows of `y`, times the sigmoid of `gate`."""
    scale = tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / WIDTH + eps)
    return y * scale * weight * sigmoid(gate)
