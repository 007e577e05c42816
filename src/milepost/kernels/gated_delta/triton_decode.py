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

from milepost.kernels.activations import sigmoid
from milepost.kernels.chunks import UNSPECIALISED
from milepost.kernels.conv.triton_parts import convolve_one, keep_window
from milepost.kernels.decode_layout import DecodeLayout
from milepost.kernels.device import runs_gluon
from milepost.kernels.emit import Emit, Inputs
from milepost.kernels.gated_delta.triton_parts import (
    advance,
    gated_norm,
    head_channels,
    log_decay,
    sizes_of,
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
    layout: DecodeLayout | None = None,
    *,
    emit: Emit = Emit.VALUES,
) -> Inputs:
    """See `gated_delta.mix`."""
    if suits_hopper(recurrent_pool):
        from milepost.kernels.gated_delta import triton_hopper

        inputs = projected, weights, conv_pool, recurrent_pool, slot_in, slot_out
        arrivals = None if layout is None else layout.arrivals
        return triton_hopper.decode(*inputs, arrivals, emit=emit)
    num_sequences = len(slot_out)
    _, value_heads, key_dim, value_dim = recurrent_pool.shape
    channels, conv_width = weights.conv.shape
    mixed = projected.new_empty(num_sequences, channels, dtype=torch.float32)
    output = projected.new_empty(num_sequences, value_heads * value_dim)
    sizes = sizes_of(weights, recurrent_pool)
    _convolve[(num_sequences, 2 * sizes["KEY_HEADS"] + value_heads)](
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
        MAX_BETA=weights.max_beta,
        **_UPDATE,
        **OVERLAPPED,
    )
    return output


def suits_hopper(recurrent_pool: Tensor) -> bool:
    """Whether the kernels of `triton_hopper` and `triton_hopper_verify` do the work: both or none,
    whatever the number of rows. For one sequence two launches verify sooner (19 against 21 us a
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
    i_n, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    written = tl.load(slot_out + i_n).to(tl.int64)
    if written < 0:
        return
    read = tl.load(slot_in + i_n).to(tl.int64)
    first, size = head_channels(i_h, KEY_HEADS, KEY_DIM, VALUE_DIM)
    o_c = tl.arange(0, BLOCK)
    o_channel, is_channel = first + o_c, o_c < size
    p_token = projected + i_n * projected_stride
    args = pool + read * slot_stride, p_token, weight, None
    b_x, b_window = convolve_one(*args, o_channel, is_channel, TAPS, BLOCK_TAPS)
    b_x *= unit_scale(b_x, i_h, KEY_HEADS, KEY_DIM, 0)
    tl.store(mixed + i_n * channels + o_channel, b_x, is_channel)

    tl.debug_barrier()
    p_state = pool + written * slot_stride
    keep_window(p_state, b_window, o_channel, is_channel, TAPS, BLOCK_TAPS)


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
    MAX_BETA: tl.constexpr,
):
    """One value head: its state [K, W] moves on by one token, is read, and the gated norm of what
    was read goes to `output` [D, V * W]."""
    i_hv, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_W)
    is_k, is_v = o_k < KEY_DIM, o_v < VALUE_DIM
    p_o = output + (i_n * VALUE_HEADS + i_hv) * VALUE_DIM + o_v
    written = tl.load(slot_out + i_n).to(tl.int64)
    if written < 0:
        # Padding waits too: a launch that is nothing else must not end before the one before it.
        wait_for_inputs()
        tl.store(p_o, tl.zeros([BLOCK_W], output.dtype.element_ty), is_v)
        return
    o_h = (i_hv * KEY_DIM + o_k[:, None]) * VALUE_DIM + o_v[None, :]
    in_h = is_k[:, None] & is_v[None, :]
    p_read = pool + tl.load(slot_in + i_n).to(tl.int64) * slot_stride
    b_h = tl.load(p_read + o_h, in_h, 0)

    p_token = projected + i_n * projected_stride + channels
    b_gate = tl.load(p_token + i_hv * VALUE_DIM + o_v, is_v, 0)
    p_gates = p_token + VALUE_HEADS * VALUE_DIM + i_hv
    b_beta = sigmoid(tl.load(p_gates)) * MAX_BETA
    rate, bias = tl.load(decay_rate + i_hv), tl.load(decay_bias + i_hv)
    b_decay = tl.exp(log_decay(rate, bias, tl.load(p_gates + VALUE_HEADS)))
    b_norm = tl.load(norm_weight + o_v, is_v, 0)
    # From here on the first launch has ended.
    wait_for_inputs()

    p_q = mixed + i_n * channels + (i_hv // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + o_k
    b_q = tl.load(p_q, is_k, 0)
    b_k = tl.load(p_q + KEY_HEADS * KEY_DIM, is_k, 0)
    p_v = mixed + i_n * channels + 2 * KEY_HEADS * KEY_DIM + i_hv * VALUE_DIM + o_v
    b_v = tl.load(p_v, is_v, 0)

    b_h = advance(b_h.to(tl.float32), b_k, b_v, b_beta, b_decay)
    tl.debug_barrier()
    p_h = pool + written * slot_stride + o_h
    tl.store(p_h, b_h.to(pool.dtype.element_ty), in_h)
    b_o = tl.sum(b_h * b_q[:, None], 0)
    b_o = gated_norm(b_o, b_norm, b_gate, norm_eps, VALUE_DIM, 0)
    tl.store(p_o, b_o.to(output.dtype.element_ty), is_v)
