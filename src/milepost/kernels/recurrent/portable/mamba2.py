"""Mamba2: its rule for steps that decode, a time step per head, which decays the state and scales
what is written to it; and its prefill (Transformers are SSMs, arXiv 2405.21060, section 7) in five
launches.

1. `conv.convolve`: some channels of a tile in each program; x, B and C.
2. `ssd.discretise`: some heads of a chunk; time steps and decays.
3. `ssd`, states: some columns of a head's state, from chunk to chunk of a sequence, in float32;
   leaves the state before every chunk, writes exports and final states. What each chunk adds is
   never written.
4. `ssd`, outputs: some heads of a group and chunk, from states and tokens (its chunk scan).
5. `_norm_kernel`: a group of some tokens.

A chunk's arithmetic depends on nothing but its tokens and the state before it (see `fused`).

Legend: T tokens, N chunks, C tokens in a chunk, H heads, P head_dim, G groups; I = H * P entries, W
= I / G entries of a group; K state_size and O entries of a program's heads in the rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.layout.chunks import ChunkLayout
from milepost.kernels.platform.launches import OVERLAPPED, quick, wait_for_inputs
from milepost.kernels.platform.numerics import silu
from milepost.kernels.recurrent.portable import ssd
from milepost.kernels.recurrent.portable.conv import convolve
from milepost.kernels.recurrent.portable.ssd import time_step
from milepost.kernels.recurrent.portable.stream import load_place
from milepost.kernels.recurrent.structures import (
    LayerStates,
    Mixer,
    MixerInputs,
    MixerRule,
    MixerSizes,
    ProjectedRows,
    slot_states,
    tile_of,
)
from milepost.kernels.recurrent.table import Mamba2Weights

_NORMED = 4096
"""Entries per program of `_norm_kernel`."""


def prefill(mixer: Mixer, states: LayerStates, layout: ChunkLayout) -> Tensor:
    """Advances the sequences by all their tokens; returns [T, I]."""
    mixed = convolve(mixer, slot_states(states.conv), states.tiles(layout))
    chunks, chunk = states.chunks(layout), layout.chunk
    tensors = ssd.discretise(mixer, mixed, chunks, chunk)
    ssd.chunk_fwd_h(mixer, chunk, slot_states(states.recurrent), chunks, tensors)
    y = ssd.chunk_fwd_o(mixer, chunk, chunks, tensors)
    return _norm_groups(mixer, y, layout.sequence_begin)


def _norm_groups(mixer: Mixer, y: Tensor, sequence_begin: Tensor) -> Tensor:
    sizes, output = mixer.sizes, torch.empty_like(y)
    block = triton.next_power_of_2(sizes.group * sizes.own)
    rows, ends = max(1, _NORMED // block), (sequence_begin, len(sequence_begin) - 1)
    operands = y, mixer.inputs.gate, len(y), *ends, mixer.weights, output
    constants = {"SIZES": sizes, "FINISH": mixer.rule.finish, "ROWS": rows, "BLOCK": block}
    grid = sizes.units, triton.cdiv(len(y), rows)
    _norm_kernel[grid](*operands, **constants, num_warps=4, **OVERLAPPED)
    return output


@quick
@triton.jit
def _norm_kernel(
    y,
    gate,
    num_tokens,
    sequence_begin,
    num_sequences,
    weights,
    output,
    SIZES: tl.constexpr,
    FINISH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gates and norms one group of ROWS tokens of `y` [T, I] into `output` [T, I]; tokens of no
    sequence get zeros."""
    W: tl.constexpr = SIZES.group * SIZES.own
    i_g = tl.program_id(0)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_column = column < W
    b_weight = None
    if weights.norm is not None:
        b_weight = tl.load(weights.norm + i_g * W + column, is_column, 0)[None, :]
    begin, end = tl.load(sequence_begin), tl.load(sequence_begin + num_sequences)
    wait_for_inputs()
    is_real = ((token >= begin) & (token < end))[:, None] & is_column[None, :]
    at = i_g * W + column[None, :]
    row = token.to(tl.int64)[:, None]
    b_y = tl.load(y + row * (SIZES.width) + at, is_real, 0).to(tl.float32)
    b_gate = tl.load(gate.base + row * gate.stride + at, is_real, 0)
    b_y = FINISH(b_y, b_weight, b_gate, weights.norm_eps, W)
    in_output = (token < num_tokens)[:, None] & is_column[None, :]
    p_output = output + row * (SIZES.width) + at
    tl.store(p_output, tl.where(is_real, b_y, 0).to(output.dtype.element_ty), in_output)


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
    """See `MixerRule`."""
    return tl.sum(b_state * vectors.read[None, :], 1) + head.skip * vectors.own


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
