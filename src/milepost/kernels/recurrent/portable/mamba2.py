"""Mamba2: its rule for steps that decode, a time step per head, which decays the state and scales
what is written to it; and its prefill (Transformers are SSMs, arXiv 2405.21060, section 7) in five
launches.

1. `conv.convolve`: some channels of a tile in each program; x, B and C.
2. `ssd.discretise`: some heads of a chunk; time steps and decays.
3. `ssd`, states: some columns of a head's state, from chunk to chunk of a sequence, in float32;
   leaves the state before every chunk, writes exports and final states. What each chunk adds is
   never written.
4. `ssd`, outputs: some heads of a group and chunk, from states and tokens (its chunk scan).
5. `gated_norm`: a group of some tokens.

A chunk's arithmetic depends on nothing but its tokens and the state before it (see `fused`).

Legend: T tokens, I = heads * head_dim, K state_size, O entries of a program's heads in the rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.layout.chunks import ChunkLayout
from milepost.kernels.recurrent.mixer import MixerSizes
from milepost.kernels.recurrent.portable import ssd
from milepost.kernels.recurrent.portable.conv import convolve
from milepost.kernels.recurrent.portable.gated_norm import norm_units
from milepost.kernels.recurrent.portable.ssd import time_step
from milepost.kernels.recurrent.portable.stream import load_place
from milepost.kernels.recurrent.structures import (
    LayerStates,
    Mixer,
    MixerInputs,
    ProjectedRows,
    RuleFunctions,
    slot_states,
)


def prefill(mixer: Mixer, states: LayerStates, layout: ChunkLayout) -> Tensor:
    """Advances the sequences by all their tokens; returns [T, I]."""
    mixed = convolve(mixer, slot_states(states.conv), states.tiles(layout))
    chunks, chunk = states.chunks(layout), layout.chunk
    tensors = ssd.discretise(mixer, mixed, chunks, chunk)
    ssd.chunk_fwd_h(mixer, chunk, slot_states(states.recurrent), chunks, tensors)
    y = ssd.chunk_fwd_o(mixer, chunk, chunks, tensors)
    return norm_units(mixer, y, layout.sequence_begin)


def inputs_of(rows: Tensor, sizes: MixerSizes) -> MixerInputs:
    """Returns where the rule's inputs lie in `rows`: see `MixerProjections`."""
    stride, inner = rows.stride(0), sizes.width
    steps = ProjectedRows(rows[:, inner + sizes.channels :], stride, sizes.channels)
    return MixerInputs(
        mixed=ProjectedRows(rows[:, inner:], stride),
        strengths=steps,
        decays=steps,  # none of its columns is read
        gate=ProjectedRows(rows, stride),
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
    """See `RuleFunctions`."""
    if HEADS > 1:
        # Entries past the last head repeat it and are not stored.
        head = tl.minimum(head + o_own // SIZES.own, SIZES.units * SIZES.group - 1)
    rate, bias = tl.load(weights.rate + head), tl.load(weights.dt_bias + head)
    return Mamba2Head(head, rate, bias, tl.load(weights.skip + head))


@triton.jit
def strengths(streams, place, head, weights, SIZES: tl.constexpr, VERIFIES: tl.constexpr):
    """Returns the time step and the decay; see `RuleFunctions`."""
    inputs = load_place(streams.strengths, head.index, place, VERIFIES)
    b_step = time_step(inputs, head.dt_bias, weights.dt_limit)
    return b_step, tl.exp(b_step * head.rate)


@triton.jit
def advance(b_state, vectors, b_step, b_decay):
    """Applies the recurrence to states [O, K], fused as Hopper's kernels do it, so that their
    states are the same."""
    b_x = vectors.own
    b_decay = tl.broadcast_to(b_decay, b_x.shape)[:, None]
    return tl.fma((b_step * b_x)[:, None], vectors.write[None, :], b_state * b_decay)


@triton.jit
def read(b_state, vectors, head):
    """See `RuleFunctions`."""
    return tl.sum(b_state * vectors.read[None, :], 1) + head.skip * vectors.own


RULE = RuleFunctions(open_head, strengths, advance, read)
