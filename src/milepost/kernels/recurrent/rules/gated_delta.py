"""Gated DeltaNet's rule: one decay and one beta per value head.

Gated Delta Networks (arXiv 2412.06464), equation 10; as Qwen3-Next has it.

Legend: U key heads, V value heads, K key_dim, W value_dim, O columns of a program.
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
from milepost.kernels.recurrent.weights import GatedDeltaWeights, KDAWeights


class DeltaWeights(NamedTuple):
    """The small weights, as the kernels take them; `KDA` has the same."""

    conv: Any
    conv_bias: Any
    decay_rate: Any
    decay_bias: Any
    norm: Any
    norm_eps: Any


def describe(rows: Tensor, weights: GatedDeltaWeights, recurrent_pool: Tensor) -> Mixer:
    """The mixer of `rows`: see `MixerProjections`."""
    sizes = delta_sizes(weights, recurrent_pool, recurrent_pool.shape[1], weights.max_beta)
    stride, channels, heads = rows.stride(0), sizes.channels, sizes.heads
    gates_end = channels + sizes.width
    return Mixer(
        inputs=MixerInputs(
            mixed=ProjectedRows(rows, stride),
            strengths=ProjectedRows(rows[:, gates_end:], stride, channels),
            decays=ProjectedRows(rows[:, gates_end + heads :], stride, channels + heads),
            gate=ProjectedRows(rows[:, channels:], stride),
        ),
        weights=delta_weights(weights),
        sizes=sizes,
        rule=MixerRule(open_head, strengths, advance, read, finish),
        rule_of=GatedDeltaWeights,
    )


def delta_weights(weights: GatedDeltaWeights | KDAWeights) -> DeltaWeights:
    decays = weights.decay_rate, weights.decay_bias
    return DeltaWeights(weights.conv, None, *decays, weights.norm, weights.norm_eps)


def delta_sizes(
    weights: GatedDeltaWeights | KDAWeights,
    recurrent_pool: Tensor,
    num_decays: int,
    max_beta: float = 1.0,
) -> MixerSizes:
    """Sizes for `recurrent_pool` [slots, V, K, W] and `num_decays` of a token."""
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
    """Weights that a program reads once."""

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
    """Beta and decay; see `MixerRule`."""
    b_beta = sigmoid(load_place(streams.strengths, head.index, place, VERIFIES)) * SIZES.max_beta
    wide = load_place(streams.decays, head.index, place, VERIFIES).to(tl.float32) + head.decay_bias
    return b_beta, tl.exp(head.decay_rate * softplus(wide))


@triton.jit
def advance(b_state, vectors, b_beta, b_decay):
    """The delta rule on a state [K, W]; the decay is one number, or a column [K, 1]."""
    b_state = b_state * b_decay
    change = (vectors.own - tl.sum(b_state * vectors.write[:, None], 0)) * b_beta
    return b_state + vectors.write[:, None] * change[None, :]


@triton.jit
def read(b_state, vectors, head):
    """See `MixerRule`."""
    return tl.sum(b_state * vectors.read[:, None], 0)


@triton.jit
def finish(y, weight, gate, eps, WIDTH: tl.constexpr):
    """RMS norm of the rows of `y`, times SiLU of `gate`."""
    scale = tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / WIDTH + eps)
    return y * scale * weight * silu(gate.to(tl.float32))
