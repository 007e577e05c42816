"""KDA's token mixer for one new token a sequence, in one launch.

Some columns of a head's state in each program. Those of a head share its query and key, and their
norm; so the last of them to arrive, when all have read the convolution's states of both, moves
these on and norms the head. Which one that is changes no bit: it reads what the others have stored.
A slot that is written is read by no other sequence, so slot_out may be slot_in.

Legend: D sequences, C channels, J taps, H heads, K head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.activations import sigmoid
from milepost.kernels.conv.triton_parts import convolve_one, keep_window
from milepost.kernels.decode_layout import DecodeLayout
from milepost.kernels.device import num_sms
from milepost.kernels.gated_delta.triton_decode import suits_hopper
from milepost.kernels.gated_delta.triton_parts import advance
from milepost.kernels.kda.triton_parts import channel_decay, finish_head, sizes_of, unit
from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

_COLUMNS = 32
_DECODE = {"num_warps": 4}


def decode(
    projected: Tensor,
    decay_inputs: Tensor,
    gate: Tensor,
    weights: KDAWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: DecodeLayout,
) -> Tensor:
    """See `kda.mix`."""
    if suits_hopper(recurrent_pool):
        from milepost.kernels.kda import triton_hopper

        slots = slot_in, slot_out
        inputs = projected, decay_inputs, gate, weights
        return triton_hopper.decode(*inputs, conv_pool, recurrent_pool, *slots)
    num_sequences = len(slot_out)
    _, heads, head_dim, _ = recurrent_pool.shape
    num_columns = triton.cdiv(head_dim, _COLUMNS)
    y = projected.new_empty(num_sequences, heads * head_dim, dtype=torch.float32)
    output = projected.new_empty(num_sequences, heads * head_dim)
    _decode[(num_columns, heads, num_sequences)](
        projected,
        projected.stride(0),
        decay_inputs,
        gate,
        weights.conv,
        weights.decay_rate,
        weights.decay_bias,
        weights.norm,
        weights.norm_eps,
        conv_pool,
        conv_pool.stride(0),
        recurrent_pool,
        recurrent_pool.stride(0),
        slot_in,
        slot_out,
        layout.arrivals,
        y,
        output,
        **sizes_of(weights, recurrent_pool),
        EARLY=num_columns * heads * num_sequences <= num_sms(projected.device),
        COLUMNS=_COLUMNS,
        **_DECODE,
        **OVERLAPPED,
    )
    return output


@triton.jit(do_not_specialize_on_alignment=["slot_in", "slot_out", "arrivals"])
def _decode(
    projected,
    projected_stride,
    decay_inputs,
    gate,
    conv_weight,
    decay_rate,
    decay_bias,
    norm_weight,
    norm_eps,
    conv_pool,
    conv_stride,
    pool,
    slot_stride,
    slot_in,
    slot_out,
    arrivals,
    y,
    output,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of a head: its state [K, K] moves on by one token and is read; the last of a
    head's programs also writes the head's part of `output` [D, H * K]."""
    i_column, i_head = tl.program_id(0), tl.program_id(1)
    i_sequence = tl.program_id(2).to(tl.int64)
    if EARLY:
        let_next_start()
    o_k, o_v = tl.arange(0, BLOCK), i_column * COLUMNS + tl.arange(0, COLUMNS)
    is_k, is_v = o_k < HEAD_DIM, o_v < HEAD_DIM
    size: tl.constexpr = HEADS * HEAD_DIM
    o_key, o_value = i_head * HEAD_DIM + o_k, i_head * HEAD_DIM + o_v
    p_output = output + i_sequence * size
    written = tl.load(slot_out + i_sequence).to(tl.int64)
    if written < 0:
        # Padding waits too: a launch that is nothing else must not end before the one before it.
        wait_for_inputs()
        tl.store(p_output + o_value, tl.zeros([COLUMNS], output.dtype.element_ty), is_v)
        return
    source = tl.load(slot_in + i_sequence).to(tl.int64)
    o_state = (i_head * HEAD_DIM + o_k[:, None]) * HEAD_DIM + o_v[None, :]
    in_state = is_k[:, None] & is_v[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_state = tl.load(pool + source * slot_stride + o_state, in_state, 0).to(tl.float32)
    rate, bias = tl.load(decay_rate + i_head), tl.load(decay_bias + o_key, is_k, 0)
    p_conv = conv_pool + source * conv_stride
    p_token = projected + i_sequence * projected_stride
    wait_for_inputs()

    head = i_head, o_key, is_k, o_value, is_v, conv_weight, rate, bias
    inputs = p_conv, p_token, decay_inputs, i_sequence
    b_state, b_q, windows = _take_in(b_state, inputs, head, HEADS, HEAD_DIM, TAPS, BLOCK_TAPS)
    p_y = y + i_sequence * size
    tl.store(p_y + o_value, tl.sum(b_state * b_q[:, None], 0), is_v)

    # All of the slots has been read by this program, and what the head's norm reads is stored.
    tl.debug_barrier()
    p_state = pool + written * slot_stride + o_state
    tl.store(p_state, b_state.to(pool.dtype.element_ty), in_state)
    p_conv = conv_pool + written * conv_stride
    window_q, window_k, window_v = windows
    keep_window(p_conv, window_v, 2 * size + o_value, is_v, TAPS, BLOCK_TAPS)
    p_arrivals = arrivals + i_sequence * HEADS + i_head
    arrived = tl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(p_arrivals, 0)
        keep_window(p_conv, window_q, o_key, is_k, TAPS, BLOCK_TAPS)
        keep_window(p_conv, window_k, size + o_key, is_k, TAPS, BLOCK_TAPS)
        p_gate = gate + i_sequence * size
        finish_head(p_y, p_gate, p_output, norm_weight, norm_eps, o_k, is_k, o_key, HEAD_DIM)


@triton.jit
def _take_in(
    b_state,
    inputs,
    head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """A head's state behind a token, the query that reads it, and what the convolution saw of its
    query, key and value."""
    p_conv, p_token, decay_inputs, i_sequence = inputs
    i_head, o_key, is_k, o_value, is_v, conv_weight, rate, bias = head
    size: tl.constexpr = HEADS * HEAD_DIM
    args = p_conv, p_token, conv_weight, None
    b_q, window_q = convolve_one(*args, o_key, is_k, TAPS, BLOCK_TAPS)
    b_k, window_k = convolve_one(*args, size + o_key, is_k, TAPS, BLOCK_TAPS)
    b_v, window_v = convolve_one(*args, 2 * size + o_value, is_v, TAPS, BLOCK_TAPS)
    b_q, b_k = unit(b_q, b_k, HEAD_DIM)
    beta = sigmoid(tl.load(p_token + 3 * size + i_head))
    b_decay = channel_decay(rate, bias, tl.load(decay_inputs + i_sequence * size + o_key, is_k, 0))
    b_state = advance(b_state, b_k, b_v, beta, b_decay[:, None])
    return b_state, b_q, (window_q, window_k, window_v)
