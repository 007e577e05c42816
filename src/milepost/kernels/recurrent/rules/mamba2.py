"""Mamba2's rule: a time step per head, which decays the state and scales what is written to it.

Transformers are SSMs (arXiv 2405.21060), section 7.

Legend: H heads, P head_dim, G groups, K state_size, O entries of a program's heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.numerics import silu, softplus
from milepost.kernels.recurrent.portable.stream import load_place
from milepost.kernels.recurrent.structures import (
    Mixer,
    MixerInputs,
    MixerRule,
    MixerSizes,
    ProjectedRows,
    tile_of,
)
from milepost.kernels.recurrent.table import Mamba2Weights


class SmallMamba2Weights(NamedTuple):
    """Small weights of Mamba2 as kernel arguments."""

    conv: Any
    conv_bias: Any
    rate: Any
    dt_bias: Any
    dt_low: Any
    dt_high: Any
    skip: Any
    norm: Any
    norm_eps: Any


def describe(rows: Tensor, weights: Mamba2Weights, recurrent_pool: Tensor) -> Mixer:
    """Returns the mixer of `rows`: see `MixerProjections`."""
    sizes = _sizes(weights, recurrent_pool)
    stride, inner = rows.stride(0), sizes.width
    steps = ProjectedRows(rows[:, inner + sizes.channels :], stride, sizes.channels)
    finish = gate_first if sizes.gates_first else norm_first
    return Mixer(
        inputs=MixerInputs(
            mixed=ProjectedRows(rows[:, inner:], stride),
            strengths=steps,
            decays=steps,  # none of its columns is read
            gate=ProjectedRows(rows, stride),
        ),
        weights=SmallMamba2Weights(
            weights.conv,
            weights.conv_bias,
            weights.rate,
            weights.dt_bias,
            *weights.dt_limit,
            weights.skip,
            weights.norm,
            weights.norm_eps,
        ),
        sizes=sizes,
        rule=MixerRule(open_head, strengths, advance, read, finish),
        rule_of=Mamba2Weights,
        order=weights.order,
    )


def _sizes(weights: Mamba2Weights, recurrent_pool: Tensor) -> MixerSizes:
    """Returns the sizes of a mixer with `recurrent_pool` [slots, H, P, K]."""
    _, heads, head_dim, state_size = recurrent_pool.shape
    channels, taps = weights.conv.shape
    inner = heads * head_dim
    groups = (channels - inner) // (2 * state_size)
    return MixerSizes(
        units=groups,
        group=heads // groups,
        shared=state_size,
        own=head_dim,
        shared_tile=tile_of(state_size),
        own_tile=tile_of(head_dim),
        shared_stride=1,
        own_stride=state_size,
        first_read=inner + groups * state_size,
        first_write=inner,
        first_own=0,
        channels=channels,
        strengths=heads,
        decays=0,
        norms_heads=False,
        taps=taps,
        gates_first=not weights.norm_before_gate,
    )


class Mamba2Head(NamedTuple):
    """Small weights loaded once per program: [O] for the entries of several heads, or one number
    each."""

    index: Any
    rate: Any
    dt_bias: Any
    skip: Any


@triton.jit
def open_head(weights, head, o_shared, o_own, SIZES: tl.constexpr, HEADS: tl.constexpr):
    """See `MixerRule`."""
    if HEADS > 1:
        # Entries past the last head repeat it and are not stored.
        head = tl.minimum(head + o_own // SIZES.own, SIZES.units * SIZES.group - 1)
    rate, bias = tl.load(weights.rate + head), tl.load(weights.dt_bias + head)
    return Mamba2Head(head, rate, bias, tl.load(weights.skip + head))


@triton.jit
def strengths(streams, place, head, weights, SIZES: tl.constexpr, VERIFIES: tl.constexpr):
    """Returns the time step and the decay; see `MixerRule`."""
    inputs = load_place(streams.strengths, head.index, place, VERIFIES)
    b_step = time_step(inputs, head.dt_bias, weights.dt_low, weights.dt_high)
    b_decay = tl.exp(b_step * head.rate)
    return b_step, b_decay


@triton.jit
def advance(b_state, vectors, b_step, b_decay):
    """Applies the recurrence to states [O, K], fused as Hopper's kernels do it, so that their
    states are the same."""
    b_x = vectors.own
    b_decay = tl.broadcast_to(b_decay, b_x.shape)[:, None]
    return tl.fma((b_step * b_x)[:, None], vectors.write[None, :], b_state * b_decay)


@triton.jit
def read(b_state, vectors, head):
    """See `MixerRule`."""
    return tl.sum(b_state * vectors.read[None, :], 1) + head.skip * vectors.own


@triton.jit
def time_step(inputs, bias, low, high):
    """Returns softplus(inputs + bias) within bounds, float32; NaN stays NaN."""
    wide = softplus(inputs.to(tl.float32) + bias)
    wide = tl.maximum(wide, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(wide, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gate_first(y, weight, gate, eps, WIDTH: tl.constexpr):
    """Multiplies `y` by SiLU of `gate`, then norms the rows."""
    return _norm(y * silu(gate.to(tl.float32)), weight, eps, WIDTH)


@triton.jit
def norm_first(y, weight, gate, eps, WIDTH: tl.constexpr):
    """Norms the rows of `y`, then multiplies them by SiLU of `gate`."""
    return _norm(y, weight, eps, WIDTH) * silu(gate.to(tl.float32))


@triton.jit
def _norm(y, weight, eps, WIDTH: tl.constexpr):
    """Norms rows by their root mean square; does nothing without a `weight`."""
    if weight is not None:
        y *= tl.rsqrt(tl.sum(y * y, 1, keep_dims=True) / WIDTH + eps) * weight
    return y
