"""Gated DeltaNet's token mixer for one new token a sequence, in two launches.

The first convolves and normalises, a head of a sequence in each program; the second updates a value
head's state, reads it and applies the gated norm. Both read a slot before they write it, and a slot
that is written is read by no other sequence, so slot_out may be slot_in.

Legend: D sequences, C channels, J taps, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.activations import sigmoid, silu
from milepost.kernels.chunks import UNSPECIALISED
from milepost.kernels.device import runs_gluon
from milepost.kernels.gated_delta.triton_parts import (
    advance,
    gated_norm,
    head_channels,
    log_decay,
    unit_scale,
)
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

_CONVOLVE = {"num_warps": 1}
_UPDATE = {"num_warps": 4}


def decode(
    projected: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
) -> Tensor:
    """See `gated_delta.mix`."""
    if suits_hopper(recurrent_pool):
        from milepost.kernels.gated_delta import triton_hopper

        pools = conv_pool, recurrent_pool
        return triton_hopper.decode(projected, weights, *pools, slot_in, slot_out)
    num_sequences = len(slot_out)
    _, value_heads, key_dim, value_dim = recurrent_pool.shape
    channels, conv_width = weights.conv.shape
    key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
    mixed = projected.new_empty(num_sequences, channels, dtype=torch.float32)
    output = projected.new_empty(num_sequences, value_heads * value_dim)
    sizes = {"KEY_HEADS": key_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    _convolve[(num_sequences, 2 * key_heads + value_heads)](
        projected,
        projected.stride(0),
        weights.conv,
        conv_pool,
        conv_pool.stride(0),
        slot_in,
        slot_out,
        mixed,
        channels,
        **sizes,
        TAPS=conv_width,
        BLOCK_TAPS=triton.next_power_of_2(conv_width),
        BLOCK=triton.next_power_of_2(max(key_dim, value_dim)),
        **_CONVOLVE,
    )
    _update[(value_heads, num_sequences)](
        projected,
        projected.stride(0),
        mixed,
        weights.decay_rate,
        weights.decay_bias,
        weights.norm,
        weights.norm_eps,
        recurrent_pool,
        recurrent_pool.stride(0),
        slot_in,
        slot_out,
        output,
        channels,
        **sizes,
        VALUE_HEADS=value_heads,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_W=triton.next_power_of_2(value_dim),
        **_UPDATE,
        **OVERLAPPED,
    )
    return output


def suits_hopper(recurrent_pool: Tensor) -> bool:
    """Whether the kernels of `triton_hopper` and `triton_hopper_verify` do the work: both or none,
    whatever the number of rows. For one sequence two launches verify sooner (19 against 29 us a
    layer on an H200), but they norm a key in one warp and Hopper's kernels in four, so squares are
    added up in another order and a state would no longer be a decode's bit for bit."""
    if not runs_gluon(recurrent_pool):
        return False
    from milepost.kernels.gated_delta import triton_hopper

    return triton_hopper.suits(recurrent_pool)


@triton.jit(do_not_specialize_on_alignment=UNSPECIALISED)
def _convolve(
    projected,
    projected_stride,
    weight,
    pool,
    slot_stride,
    slot_in,
    slot_out,
    mixed,
    channels,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head: convolution, SiLU, L2 norm of queries and keys into `mixed` [D, C] float32; moves
    the head's convolution state on by one input."""
    # The second launch may start, and load what this one doesn't write.
    let_next_start()
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    written = tl.load(slot_out + sequence).to(tl.int64)
    if written < 0:
        return
    read = tl.load(slot_in + sequence).to(tl.int64)
    first, size = head_channels(head, KEY_HEADS, KEY_DIM, VALUE_DIM)
    column = tl.arange(0, BLOCK)
    channel, is_channel = first + column, column < size
    tap = tl.arange(0, BLOCK_TAPS)[None, :]
    at = channel[:, None]

    state_at = at * (TAPS - 1) + tap
    was_kept = is_channel[:, None] & (tap < TAPS - 1)
    window = tl.load(pool + read * slot_stride + state_at, was_kept, 0)
    newest = tl.load(projected + sequence * projected_stride + channel, is_channel, 0)
    window = tl.where(tap == TAPS - 1, newest[:, None], window.to(newest.dtype))
    taps = tl.load(weight + at * TAPS + tap, is_channel[:, None] & (tap < TAPS), 0)
    x = silu(tl.sum(window.to(tl.float32) * taps.to(tl.float32), 1))
    x *= unit_scale(x, head, KEY_HEADS, KEY_DIM, 0)
    tl.store(mixed + sequence * channels + channel, x, is_channel)

    tl.debug_barrier()
    is_kept = is_channel[:, None] & (tap > 0) & (tap < TAPS)
    kept = window.to(pool.dtype.element_ty)
    tl.store(pool + written * slot_stride + state_at - 1, kept, is_kept)


@triton.jit(do_not_specialize_on_alignment=UNSPECIALISED)
def _update(
    projected,
    projected_stride,
    mixed,
    decay_rate,
    decay_bias,
    norm_weight,
    norm_eps,
    pool,
    slot_stride,
    slot_in,
    slot_out,
    output,
    channels,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One value head: its state [K, W] moves on by one token, is read, and the gated norm of what
    was read goes to `output` [D, V * W]."""
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_W)
    is_row, is_column = row < KEY_DIM, column < VALUE_DIM
    output_at = output + (sequence * VALUE_HEADS + head) * VALUE_DIM + column
    written = tl.load(slot_out + sequence).to(tl.int64)
    if written < 0:
        # Padding waits too: a launch that is nothing else must not end before the one before it.
        wait_for_inputs()
        tl.store(output_at, tl.zeros([BLOCK_W], output.dtype.element_ty), is_column)
        return
    state_at = (head * KEY_DIM + row[:, None]) * VALUE_DIM + column[None, :]
    in_state = is_row[:, None] & is_column[None, :]
    read = pool + tl.load(slot_in + sequence).to(tl.int64) * slot_stride
    state = tl.load(read + state_at, in_state, 0)

    token = projected + sequence * projected_stride + channels
    gate = tl.load(token + head * VALUE_DIM + column, is_column, 0)
    gates = token + VALUE_HEADS * VALUE_DIM + head
    beta = sigmoid(tl.load(gates))
    rate, bias = tl.load(decay_rate + head), tl.load(decay_bias + head)
    decay = tl.exp(log_decay(rate, bias, tl.load(gates + VALUE_HEADS)))
    weight = tl.load(norm_weight + column, is_column, 0)
    # From here on the first launch has ended.
    wait_for_inputs()

    query_at = mixed + sequence * channels + (head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + row
    query = tl.load(query_at, is_row, 0)
    key = tl.load(query_at + KEY_HEADS * KEY_DIM, is_row, 0)
    value_at = mixed + sequence * channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    value = tl.load(value_at, is_column, 0)

    state = advance(state.to(tl.float32), key, value, beta, decay)
    tl.debug_barrier()
    written_at = pool + written * slot_stride + state_at
    tl.store(written_at, state.to(pool.dtype.element_ty), in_state)
    x = tl.sum(state * query[:, None], 0)
    x = gated_norm(x, weight, gate, norm_eps, VALUE_DIM, 0)
    tl.store(output_at, x.to(output.dtype.element_ty), is_column)
