"""A prefill of Mamba2 in five launches.

1. `conv.convolve`: some channels of a tile in each program; x, B and C.
2. `_discretise_kernel`: some heads of a chunk; time steps and decays.
3. `ssd`, states: some columns of a head's state, from chunk to chunk of a sequence, in float32;
   leaves the state before every chunk, writes exports and final states. (Mamba2's chunk states and
   their passing at once: what each chunk adds is never written.)
4. `ssd`, outputs: some heads of a group and chunk, from states and tokens (its chunk scan).
5. `_norm_kernel`: a group of some tokens.

A chunk's arithmetic depends on nothing but its tokens and the state before it: that is what makes
an export equal, bit for bit, the state that a prefill ending there leaves.

Legend: T tokens, N chunks, C tokens in a chunk, H heads, P head_dim, G groups; I = H * P entries, W
= I / G entries of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.layout.chunks import ChunkLayout
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import LOG2_E
from milepost.kernels.recurrent.portable import ssd
from milepost.kernels.recurrent.portable.conv import convolve
from milepost.kernels.recurrent.rules.mamba2 import time_step
from milepost.kernels.recurrent.structures import LayerStates, Mixer, PrefillChunks, slot_states

_HEADS = 8
"""Heads per program of `_discretise_kernel`."""
_NORMED = 4096
"""Entries per program of `_norm_kernel`."""


def prefill(mixer: Mixer, states: LayerStates, layout: ChunkLayout) -> Tensor:
    """Advances the sequences by all their tokens; returns [T, I]."""
    mixed = convolve(mixer, slot_states(states.conv), states.tiles(layout))
    chunks, chunk = states.chunks(layout), layout.chunk
    tensors = _discretise(mixer, mixed, chunks, chunk)
    ssd.chunk_fwd_h(mixer, chunk, slot_states(states.recurrent), chunks, tensors)
    y = ssd.chunk_fwd_o(mixer, chunk, chunks, tensors)
    return _norm(mixer, y, layout.sequence_begin)


def _discretise(mixer: Mixer, mixed: Tensor, chunks: PrefillChunks, chunk: int) -> ssd.SSDTensors:
    sizes, num_chunks = mixer.sizes, len(chunks.size)
    of_tokens = mixed.new_empty(3, sizes.heads, len(mixed), dtype=torch.float32)
    decays = mixed.new_empty(num_chunks, sizes.heads, dtype=torch.float32)
    h = mixed.new_empty(num_chunks, sizes.heads, sizes.own, sizes.shared)
    steps, sums, to_end = of_tokens.unbind()
    tensors = ssd.SSDTensors(mixed, steps, sums, to_end, decays, h)
    operands = mixer.inputs.strengths, len(mixed), mixer.weights, chunks, tensors
    options = {"num_warps": 4, **OVERLAPPED}
    grid = triton.cdiv(sizes.heads, _HEADS), num_chunks
    _discretise_kernel[grid](*operands, SIZES=sizes, C=chunk, BLOCK=_HEADS, **options)
    return tensors


def _norm(mixer: Mixer, y: Tensor, sequence_begin: Tensor) -> Tensor:
    sizes, output = mixer.sizes, torch.empty_like(y)
    block = triton.next_power_of_2(sizes.group * sizes.own)
    rows = max(1, _NORMED // block)
    num_sequences = len(sequence_begin) - 1
    operands = y, mixer.inputs.gate, len(y), sequence_begin, num_sequences, mixer.weights, output
    constants = {"SIZES": sizes, "FINISH": mixer.rule.finish, "ROWS": rows, "BLOCK": block}
    grid = sizes.units, triton.cdiv(len(y), rows)
    _norm_kernel[grid](*operands, **constants, num_warps=4, **OVERLAPPED)
    return output


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["chunks"])
def _discretise_kernel(
    inputs,
    num_tokens,
    weights,
    chunks,
    tensors,
    SIZES: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes time steps and log2 decays of some heads of a chunk."""
    launch_dependents()
    i_t = tl.program_id(1)
    size = tl.load(chunks.size + i_t)
    wait_for_inputs()
    if size <= 0:
        return
    token = tl.load(chunks.begin + i_t).to(tl.int64) + tl.arange(0, C)
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_head = head < SIZES.heads
    is_real = (tl.arange(0, C) < size)[:, None] & is_head[None, :]
    b_in = tl.load(inputs.base + token[:, None] * inputs.stride + head[None, :], is_real, 0)
    bias = tl.load(weights.dt_bias + head, is_head, 0)[None, :]
    b_steps = tl.where(is_real, time_step(b_in, bias, weights.dt_low, weights.dt_high), 0)
    b_rate = tl.load(weights.rate + head, is_head, 0) * LOG2_E
    b_sums = tl.cumsum(b_steps * b_rate[None, :], 0)
    at = head.to(tl.int64)[None, :] * num_tokens + token[:, None]
    tl.store(tensors.steps + at, b_steps, is_real)
    tl.store(tensors.sums + at, b_sums, is_real)
    # Tokens past the chunk's end decay nothing.
    total = tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], b_sums, 0), 0)
    tl.store(tensors.to_end + at, b_steps * tl.exp2(total[None, :] - b_sums), is_real)
    tl.store(tensors.decays + i_t * SIZES.heads + head, tl.exp2(total), is_head)


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
