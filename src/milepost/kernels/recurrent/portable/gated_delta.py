"""The delta rule: of Gated DeltaNet, with one decay and one beta per value head, and of Kimi Delta
Attention, with one beta per head and one decay per key channel.

Gated Delta Networks (arXiv 2412.06464), equation 10; as Qwen3-Next has it. Kimi Linear (arXiv
2510.26692), section 3.1.

Legend: V value heads, K key_dim, W value_dim, O columns of a program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from milepost.kernels.platform.numerics import sigmoid, softplus
from milepost.kernels.recurrent.mixer import KDAProjected, MixerProjections, MixerSizes
from milepost.kernels.recurrent.portable.stream import load_place
from milepost.kernels.recurrent.structures import MixerInputs, ProjectedRows, RuleFunctions


def inputs_of(projected: MixerProjections, sizes: MixerSizes) -> MixerInputs:
    """Returns where the rule's inputs lie."""
    channels, heads = sizes.channels, sizes.heads
    if isinstance(projected, KDAProjected):
        rows, decays, gate = projected
        return MixerInputs(
            mixed=ProjectedRows(rows, rows.stride(0)),
            strengths=ProjectedRows(rows[:, channels:], rows.stride(0), channels),
            decays=ProjectedRows(decays, decays.stride(0), channels + heads),
            gate=ProjectedRows(gate, gate.stride(0)),
        )
    stride, gates_end = projected.stride(0), channels + sizes.width
    return MixerInputs(
        mixed=ProjectedRows(projected, stride),
        strengths=ProjectedRows(projected[:, gates_end:], stride, channels),
        decays=ProjectedRows(projected[:, gates_end + heads :], stride, channels + heads),
        gate=ProjectedRows(projected[:, channels:], stride),
    )


class DeltaHead(NamedTuple):
    """Small weights of a head, loaded once per program."""

    index: Any
    columns: Any
    """Columns of its decay inputs: one, or one per key channel [K]."""
    decay_rate: Any
    decay_bias: Any
    """Added to each of these inputs."""


@triton.jit
def open_head(weights, head, o_shared, o_own, SIZES: tl.constexpr, HEADS: tl.constexpr):
    """See `RuleFunctions`."""
    columns = head
    if SIZES.by_channel:
        # Channels past the head's last one repeat it; the state has no such rows.
        columns = head * SIZES.shared + tl.minimum(o_shared, SIZES.shared - 1)
    rate, bias = tl.load(weights.decay_rate + head), tl.load(weights.decay_bias + columns)
    return DeltaHead(head, columns, rate, bias)


@triton.jit
def strengths(streams, place, head, weights, SIZES: tl.constexpr, VERIFIES: tl.constexpr):
    """Returns beta and decay, with decays by channel a column [K, 1]; see `RuleFunctions`."""
    b_beta = sigmoid(load_place(streams.strengths, head.index, place, VERIFIES)) * SIZES.max_beta
    wide = load_place(streams.decays, head.columns, place, VERIFIES).to(tl.float32)
    wide += head.decay_bias
    b_decay = tl.exp(log_decays(wide, head.decay_rate, SIZES.least_decay))
    if SIZES.by_channel:
        b_decay = b_decay[:, None]
    return b_beta, b_decay


@triton.jit
def log_decays(x, rate, LEAST: tl.constexpr):
    """Returns the logarithms of decays: see `MixerSizes.least_decay`."""
    if LEAST != 0:
        return LEAST * sigmoid(-rate * x)
    else:
        return rate * softplus(x)


@triton.jit
def advance(b_state, vectors, b_beta, b_decay):
    """Applies the delta rule to a state [K, W]; the decay is one number, or a column [K, 1]."""
    b_state = b_state * b_decay
    change = (vectors.own - tl.sum(b_state * vectors.write[:, None], 0)) * b_beta
    return b_state + vectors.write[:, None] * change[None, :]


@triton.jit
def read(b_state, vectors, head):
    """See `RuleFunctions`."""
    return tl.sum(b_state * vectors.read[:, None], 0)


RULE = RuleFunctions(open_head, strengths, advance, read)
