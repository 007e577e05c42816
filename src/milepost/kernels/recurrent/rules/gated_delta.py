"""Gated DeltaNet's rule: one decay and one beta per value head.

Gated Delta Networks (arXiv 2412.06464), equation 10; as Qwen3-Next has it.

Legend: U key heads, V value heads, K key_dim, W value_dim, O columns of a program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.platform.numerics import sigmoid, silu, softplus
from milepost.kernels.recurrent.portable.step import Mixer
from milepost.kernels.recurrent.portable.stream import load_place
from milepost.kernels.recurrent.structures import MixerInputs, MixerSizes, ProjectedRows


class DeltaWeights(NamedTuple):
    """The small weights, as the kernels take them; `KDA` has the same."""

    conv: Any
    conv_bias: Any
    decay_rate: Any
    decay_bias: Any
    max_beta: Any
    norm: Any
    norm_eps: Any


def describe(projected: Tensor, weights: GatedDeltaWeights, recurrent_pool: Tensor) -> Mixer:
    """The mixer of `projected` [T, C + V * W + 2 * V]; see `gated_delta.mix`."""
    _, heads, key_dim, value_dim = recurrent_pool.shape
    channels, taps = weights.conv.shape
    key_heads = (channels - heads * value_dim) // (2 * key_dim)
    stride, gates_end = projected.stride(0), channels + heads * value_dim
    return Mixer(
        inputs=MixerInputs(
            mixed=ProjectedRows(projected, stride, 0),
            strengths=ProjectedRows(projected[:, gates_end:], stride, channels),
            decays=ProjectedRows(projected[:, gates_end + heads :], stride, channels + heads),
        ),
        gate=ProjectedRows(projected[:, channels:], stride, 0),
        weights=DeltaWeights(
            weights.conv,
            None,
            weights.decay_rate,
            weights.decay_bias,
            weights.max_beta,
            weights.norm,
            weights.norm_eps,
        ),
        sizes=MixerSizes(
            units=key_heads,
            group=heads // key_heads,
            shared=key_dim,
            own=value_dim,
            shared_stride=value_dim,
            own_stride=1,
            first_read=0,
            first_write=key_heads * key_dim,
            first_own=2 * key_heads * key_dim,
            channels=channels,
            strengths=heads,
            decays=heads,
            norms_heads=True,
            taps=taps,
        ),
        open_head=open_head,
        strengths=strengths,
        advance=advance,
        read=read,
        finish=finish,
    )


class GatedDeltaHead(NamedTuple):
    """What a program reads once."""

    index: Any
    decay_rate: Any
    decay_bias: Any


@triton.jit
def open_head(weights, head, o_shared, o_own, SIZES: tl.constexpr, HEADS: tl.constexpr):
    """See `step.Mixer`."""
    return GatedDeltaHead(
        head, tl.load(weights.decay_rate + head), tl.load(weights.decay_bias + head)
    )


@triton.jit
def strengths(streams, place, head, weights, VERIFIES: tl.constexpr):
    """Beta and decay; see `step.Mixer`."""
    b_beta = sigmoid(load_place(streams.strengths, head.index, place, VERIFIES)) * weights.max_beta
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
    """See `step.Mixer`."""
    return tl.sum(b_state * vectors.read[:, None], 0)


@triton.jit
def finish(y, weight, gate, eps, WIDTH: tl.constexpr, squares=None):
    """RMS norm of the rows of `y`, times SiLU of `gate`."""
    scale = tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / WIDTH + eps)
    return y * scale * weight * silu(gate.to(tl.float32))
