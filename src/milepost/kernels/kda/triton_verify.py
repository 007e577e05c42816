"""KDA's token mixer for decoding sequences with drafts, in two launches; on Hopper in one, of
another kernel.

1. `_walk`: a head's state goes through all tokens in registers: first the recorded ones that are
   folded in, then the sequence's own, behind which the state is written, then its drafts. With each
   the operations of `triton_decode` in their order: states are the same bit for bit.
2. `_finish`: norms and gates what new tokens have read; moves the convolution's states on, and puts
   the drafts' inputs in place of the records, which all have been read by then.

    place     0 .. F - 1    F          F + 1 .. F + N - 1
    token     records       its own    drafts

Legend: S sequences, F folded and N new tokens of each, C channels, J taps, H heads, K head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.activations import sigmoid
from milepost.kernels.conv.triton_parts import (
    convolve_place,
    load_recorded,
    move_on,
    open_stream,
    record_drafts,
)
from milepost.kernels.device import num_sms
from milepost.kernels.gated_delta.triton_decode import suits_hopper
from milepost.kernels.gated_delta.triton_parts import advance
from milepost.kernels.kda.triton_parts import channel_decay, gated_norm, sizes_of, unit
from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.verify_layout import UNSPECIALISED, VerifyLayout

_COLUMNS = 32
_WALK = {"num_warps": 4}
_LEFT = 512
"""Columns that a program leaves to the next step."""
_FINISH = {"num_warps": 4}


def verify(
    projected: Tensor,
    decay_inputs: Tensor,
    gate: Tensor,
    weights: KDAWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    output: Tensor,
) -> None:
    """Write `output` [T, H * K] of the sequences that decode; see `kda.mix`."""
    if suits_hopper(recurrent_pool):
        from milepost.kernels.kda import triton_hopper_verify

        inputs = projected, decay_inputs, gate, weights, conv_pool, recurrent_pool
        triton_hopper_verify.verify(*inputs, layout, records, output)
        return
    y = torch.empty_like(output, dtype=torch.float32)
    _walk_states(projected, decay_inputs, weights, conv_pool, recurrent_pool, layout, records, y)
    _, heads, head_dim, _ = recurrent_pool.shape
    size = heads * head_dim
    num_blocks = triton.cdiv(3 * size + heads, _LEFT) + triton.cdiv(size, _LEFT)
    _finish[(heads + num_blocks, layout.num_sequences)](
        projected,
        projected.stride(0),
        decay_inputs,
        gate,
        records,
        records.stride(0),
        records.stride(1),
        weights.norm,
        weights.norm_eps,
        conv_pool,
        conv_pool.stride(0),
        *layout.sequences,
        y,
        output,
        **sizes_of(weights, recurrent_pool),
        BLOCK_N=triton.next_power_of_2(records.shape[1] + 1),
        BLOCK_C=_LEFT,
        **_FINISH,
        **OVERLAPPED,
    )


def _walk_states(
    projected: Tensor,
    decay_inputs: Tensor,
    weights: KDAWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    y: Tensor,
) -> None:
    """Write the states of `recurrent_pool`, and to `y` [T, H * K] float32 what new tokens read."""
    num_sequences = layout.num_sequences
    _, heads, head_dim, _ = recurrent_pool.shape
    num_columns = triton.cdiv(head_dim, _COLUMNS)
    _walk[(num_columns, heads, num_sequences)](
        projected,
        projected.stride(0),
        decay_inputs,
        records,
        records.stride(0),
        records.stride(1),
        weights.conv,
        weights.decay_rate,
        weights.decay_bias,
        conv_pool,
        conv_pool.stride(0),
        recurrent_pool,
        recurrent_pool.stride(0),
        *layout.sequences,
        y,
        **sizes_of(weights, recurrent_pool),
        EARLY=num_columns * heads * num_sequences <= num_sms(projected.device),
        COLUMNS=_COLUMNS,
        **_WALK,
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize_on_alignment=UNSPECIALISED)
def _walk(
    projected,
    projected_stride,
    decay_inputs,
    records,
    row_stride,
    record_stride,
    conv_weight,
    decay_rate,
    decay_bias,
    conv_pool,
    conv_stride,
    pool,
    slot_stride,
    begin,
    length,
    fold,
    row,
    slot_in,
    slot_out,
    y,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of a head: its state [K, K] moves on token by token, and is read behind new
    ones."""
    i_column, i_head = tl.program_id(0), tl.program_id(1)
    i_sequence = tl.program_id(2).to(tl.int64)
    if EARLY:
        let_next_start()
    o_k, o_v = tl.arange(0, BLOCK), i_column * COLUMNS + tl.arange(0, COLUMNS)
    is_k, is_v = o_k < HEAD_DIM, o_v < HEAD_DIM
    size: tl.constexpr = HEADS * HEAD_DIM
    o_key, o_value = i_head * HEAD_DIM + o_k, i_head * HEAD_DIM + o_v
    written = tl.load(slot_out + i_sequence).to(tl.int64)
    if written < 0:
        # Padding waits too: a launch that is nothing else must not end before the one before it.
        wait_for_inputs()
        return
    source = tl.load(slot_in + i_sequence).to(tl.int64)
    sequence = begin, length, fold, row, i_sequence
    tokens = projected, projected_stride, records, row_stride, record_stride
    inputs, num_new = open_stream(tokens, conv_pool + source * conv_stride, sequence)
    tokens = decay_inputs, size, records + 3 * size + HEADS, row_stride, record_stride
    decays, num_new = open_stream(tokens, conv_pool, sequence)
    num_folded = inputs[5]
    o_state = (i_head * HEAD_DIM + o_k[:, None]) * HEAD_DIM + o_v[None, :]
    in_state = is_k[:, None] & is_v[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_state = tl.load(pool + source * slot_stride + o_state, in_state, 0).to(tl.float32)
    rate, bias = tl.load(decay_rate + i_head), tl.load(decay_bias + o_key, is_k, 0)
    p_y = y + tl.load(begin + i_sequence).to(tl.int64) * size + o_value
    p_written = pool + written * slot_stride + o_state
    last = num_folded + tl.minimum(num_new, 1) - 1
    head = i_head, o_key, is_k, o_value, is_v, conv_weight, rate, bias
    wait_for_inputs()

    for place in range(num_folded + num_new):
        at = inputs, decays, place
        b_state, b_q = _take_in(b_state, at, head, HEADS, HEAD_DIM, TAPS, BLOCK_TAPS)
        if place >= num_folded:
            b_y = tl.sum(b_state * b_q[:, None], 0)
            tl.store(p_y + (place - num_folded) * size, b_y, is_v)
        b_kept = b_state.to(pool.dtype.element_ty)
        if place == last:
            # Threads that hold the same numbers have all read them: slot_in may be slot_out.
            tl.debug_barrier()
            tl.store(p_written, b_kept, in_state)
        # What a step that ends here would find in the pool.
        b_state = b_kept.to(tl.float32)


@triton.jit
def _take_in(
    b_state,
    at,
    head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """A head's state behind the token at a place, and the query that reads it."""
    inputs, decays, place = at
    i_head, o_key, is_k, o_value, is_v, weight, rate, bias = head
    size: tl.constexpr = HEADS * HEAD_DIM
    b_q = convolve_place(inputs, weight, None, o_key, is_k, place, TAPS, BLOCK_TAPS)
    b_k = convolve_place(inputs, weight, None, size + o_key, is_k, place, TAPS, BLOCK_TAPS)
    b_v = convolve_place(inputs, weight, None, 2 * size + o_value, is_v, place, TAPS, BLOCK_TAPS)
    b_q, b_k = unit(b_q, b_k, HEAD_DIM)
    beta = sigmoid(load_recorded(inputs, 3 * size + i_head, True, place))
    b_decay = channel_decay(rate, bias, load_recorded(decays, o_key, is_k, place))
    return advance(b_state, b_k, b_v, beta, b_decay[:, None]), b_q


@triton.jit(do_not_specialize_on_alignment=UNSPECIALISED)
def _finish(
    projected,
    projected_stride,
    decay_inputs,
    gate,
    records,
    row_stride,
    record_stride,
    norm_weight,
    norm_eps,
    conv_pool,
    conv_stride,
    begin,
    length,
    fold,
    row,
    slot_in,
    slot_out,
    y,
    output,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A head of a sequence's new tokens; behind the heads BLOCK_C columns of what is recorded."""
    i_part, i_sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    size: tl.constexpr = HEADS * HEAD_DIM
    written = tl.load(slot_out + i_sequence).to(tl.int64)
    sequence = begin, length, fold, row, i_sequence
    state = conv_pool + tl.load(slot_in + i_sequence).to(tl.int64) * conv_stride
    tokens = projected, projected_stride, records, row_stride, record_stride
    inputs, num_new = open_stream(tokens, state, sequence)
    first = tl.load(begin + i_sequence).to(tl.int64)
    wait_for_inputs()
    if written < 0:
        return
    if i_part < HEADS:
        o_k, o_n = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK_N)[:, None]
        is_k = o_k < HEAD_DIM
        is_read = (o_n < num_new) & is_k
        at = (first + o_n) * size + i_part * HEAD_DIM + o_k
        b_y, b_gate = tl.load(y + at, is_read, 0), tl.load(gate + at, is_read, 0)
        b_norm = tl.load(norm_weight + o_k, is_k, 0)
        b_o = gated_norm(b_y, b_norm, b_gate, norm_eps, HEAD_DIM, 1)
        tl.store(output + at, b_o.to(output.dtype.element_ty), is_read)
        return
    column = (i_part - HEADS) * BLOCK_C + tl.arange(0, BLOCK_C)
    inputs_end: tl.constexpr = (3 * size + HEADS + BLOCK_C - 1) // BLOCK_C * BLOCK_C
    target = conv_pool + written * conv_stride
    last = inputs[5] + tl.minimum(num_new, 1) - 1
    is_input, is_channel = column < 3 * size + HEADS, column < 3 * size
    move_on(inputs, target, column, is_input, is_channel, last, num_new, TAPS, BLOCK_TAPS)
    tokens = decay_inputs, size, records + 3 * size + HEADS, row_stride, record_stride
    decays, num_new = open_stream(tokens, state, sequence)
    column -= inputs_end
    record_drafts(decays, column, (column >= 0) & (column < size), num_new)
