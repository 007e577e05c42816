"""The delta rule of Gated DeltaNet, with one decay and one beta per value head, and of Kimi Delta
Attention, with one beta per head and one decay per key channel.

Gated Delta Networks (arXiv 2412.06464), equation 10; as Qwen3-Next has it. Kimi Linear (arXiv
2510.26692), section 3.1.

Legend: U key heads, V value heads, K key_dim, W value_dim, O columns of a program; of KDA H heads,
each of K.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.numerics import sigmoid, silu, softplus
from milepost.kernels.recurrent.portable.stream import load_place
from milepost.kernels.recurrent.structures import (
    Mixer,
    MixerInputs,
    MixerRule,
    MixerSizes,
    ProjectedRows,
    tile_of,
)
from milepost.kernels.recurrent.table import GatedDeltaWeights, KDAProjected, KDAWeights


class DeltaWeights(NamedTuple):
    """Small weights of the delta rule as kernel arguments."""

    conv: Any
    conv_bias: Any
    decay_rate: Any
    decay_bias: Any
    norm: Any
    norm_eps: Any


def describe_gated_delta(rows: Tensor, weights: GatedDeltaWeights, recurrent_pool: Tensor) -> Mixer:
    """Returns the mixer of `rows`: see `MixerProjections`."""
    sizes = _delta_sizes(weights, recurrent_pool, recurrent_pool.shape[1], weights.max_beta)
    stride, channels, heads = rows.stride(0), sizes.channels, sizes.heads
    gates_end = channels + sizes.width
    ending = finish_by_sigmoid if weights.gates_by_sigmoid else finish
    return Mixer(
        inputs=MixerInputs(
            mixed=ProjectedRows(rows, stride),
            strengths=ProjectedRows(rows[:, gates_end:], stride, channels),
            decays=ProjectedRows(rows[:, gates_end + heads :], stride, channels + heads),
            gate=ProjectedRows(rows[:, channels:], stride),
        ),
        weights=_delta_weights(weights),
        sizes=sizes,
        rule=MixerRule(open_head, strengths, advance, read, ending),
        rule_of=GatedDeltaWeights,
        gates_by_sigmoid=weights.gates_by_sigmoid,
    )


def _delta_weights(weights: GatedDeltaWeights | KDAWeights) -> DeltaWeights:
    decays = weights.decay_rate, weights.decay_bias
    return DeltaWeights(weights.conv, None, *decays, weights.norm, weights.norm_eps)


def _delta_sizes(
    weights: GatedDeltaWeights | KDAWeights,
    recurrent_pool: Tensor,
    num_decays: int,
    max_beta: float = 1.0,
) -> MixerSizes:
    """Returns the sizes of a mixer with `recurrent_pool` [slots, V, K, W] and `num_decays` decay
    inputs per token."""
    _, heads, key_dim, value_dim = recurrent_pool.shape
    channels, taps = weights.conv.shape
    key_heads = (channels - heads * value_dim) // (2 * key_dim)
    return MixerSizes(
        units=key_heads,
        group=heads // key_heads,
        shared=key_dim,
        own=value_dim,
        shared_tile=tile_of(key_dim),
        own_tile=tile_of(value_dim),
        shared_stride=value_dim,
        own_stride=1,
        first_read=0,
        first_write=key_heads * key_dim,
        first_own=2 * key_heads * key_dim,
        channels=channels,
        strengths=heads,
        decays=num_decays,
        norms_heads=True,
        taps=taps,
        max_beta=max_beta,
    )


class GatedDeltaHead(NamedTuple):
    """Small weights of a head, loaded once per program."""

    index: Any
    decay_rate: Any
    decay_bias: Any


@triton.jit
def open_head(weights, head, o_shared, o_own, SIZES: tl.constexpr, HEADS: tl.constexpr):
    """See `MixerRule`."""
    return GatedDeltaHead(
        head, tl.load(weights.decay_rate + head), tl.load(weights.decay_bias + head)
    )


@triton.jit
def strengths(streams, place, head, weights, SIZES: tl.constexpr, VERIFIES: tl.constexpr):
    """Returns beta and decay; see `MixerRule`."""
    b_beta = sigmoid(load_place(streams.strengths, head.index, place, VERIFIES)) * SIZES.max_beta
    wide = load_place(streams.decays, head.index, place, VERIFIES).to(tl.float32) + head.decay_bias
    return b_beta, tl.exp(head.decay_rate * softplus(wide))


@triton.jit
def advance(b_state, vectors, b_beta, b_decay):
    """Applies the delta rule to a state [K, W]; the decay is one number, or a column [K, 1]."""
    b_state = b_state * b_decay
    change = (vectors.own - tl.sum(b_state * vectors.write[:, None], 0)) * b_beta
    return b_state + vectors.write[:, None] * change[None, :]


@triton.jit
def read(b_state, vectors, head):
    """See `MixerRule`."""
    return tl.sum(b_state * vectors.read[:, None], 0)


@triton.jit
def finish(y, weight, gate, eps, WIDTH: tl.constexpr):
    """Norms the rows of `y` and multiplies them by SiLU of `gate`."""
    scale = tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / WIDTH + eps)
    return y * scale * weight * silu(gate.to(tl.float32))


def describe_kda(projected: KDAProjected, weights: KDAWeights, recurrent_pool: Tensor) -> Mixer:
    """Returns the mixer of `projected`."""
    rows, decays, gate = projected
    sizes = _delta_sizes(weights, recurrent_pool, decays.shape[1])
    sizes = sizes._replace(least_decay=weights.least_decay)
    stride, channels = rows.stride(0), sizes.channels
    return Mixer(
        inputs=MixerInputs(
            mixed=ProjectedRows(rows, stride),
            strengths=ProjectedRows(rows[:, channels:], stride, channels),
            decays=ProjectedRows(decays, decays.stride(0), channels + sizes.heads),
            gate=ProjectedRows(gate, gate.stride(0)),
        ),
        weights=_delta_weights(weights),
        sizes=sizes,
        rule=MixerRule(open_kda_head, kda_strengths, advance, read, finish_by_sigmoid),
        rule_of=KDAWeights,
    )


class KDAHead(NamedTuple):
    """Small weights of a head, loaded once per program."""

    index: Any
    channel: Any
    """[K], columns of its decay inputs."""
    decay_rate: Any
    decay_bias: Any
    """[K]"""


@triton.jit
def open_kda_head(weights, head, o_shared, o_own, SIZES: tl.constexpr, HEADS: tl.constexpr):
    """See `MixerRule`."""
    # Channels past the head's last one repeat it; the state has no such rows.
    channel = head * SIZES.shared + tl.minimum(o_shared, SIZES.shared - 1)
    bias = tl.load(weights.decay_bias + channel)
    return KDAHead(head, channel, tl.load(weights.decay_rate + head), bias)


@triton.jit
def kda_strengths(streams, place, head, weights, SIZES: tl.constexpr, VERIFIES: tl.constexpr):
    """Returns beta, and the decay of each key channel [K, 1]; see `MixerRule`."""
    b_beta = sigmoid(load_place(streams.strengths, head.index, place, VERIFIES))
    wide = load_place(streams.decays, head.channel, place, VERIFIES).to(tl.float32)
    wide += head.decay_bias
    return b_beta, tl.exp(log_decays(wide, head.decay_rate, SIZES.least_decay))[:, None]


@triton.jit
def log_decays(x, rate, LEAST: tl.constexpr):
    """Returns the logarithms of decays: see `KDAWeights.least_decay`."""
    if LEAST != 0:
        return LEAST * sigmoid(-rate * x)
    else:
        return rate * softplus(x)


@triton.jit
def finish_by_sigmoid(y, weight, gate, eps, WIDTH: tl.constexpr):
    """Norms the rows of `y` and multiplies them by the sigmoid of `gate`."""
    scale = tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / WIDTH + eps)
    return y * scale * weight * sigmoid(gate)
