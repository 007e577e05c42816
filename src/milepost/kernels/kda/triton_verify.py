"""KDA's token mixer for decoding sequences with drafts, in one launch.

As `triton_decode`, token by token, with the state in registers all the while: first the recorded
tokens that are folded in, then the sequence's own, behind which the state is written, then its
drafts. The last program of a head to arrive, when all have read the records, also puts the drafts
there. Hopper's kernel for decodes adds up in another order.

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
    keep_window,
    load_recorded,
    record_drafts,
    stream_window,
)
from milepost.kernels.device import num_sms
from milepost.kernels.gated_delta.triton_parts import advance
from milepost.kernels.kda.triton_parts import channel_decay, finish_head, unit
from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.verify_layout import UNSPECIALISED, VerifyLayout

_COLUMNS = 32
_VERIFY = {"num_warps": 4}


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
    assert layout.decodes is not None, "programs of a head wait for one another"
    num_sequences = len(layout.slot_out)
    _, heads, head_dim, _ = recurrent_pool.shape
    conv_width = weights.conv.shape[1]
    num_columns = triton.cdiv(head_dim, _COLUMNS)
    _verify[(num_columns, heads, num_sequences)](
        projected,
        projected.stride(0),
        decay_inputs,
        gate,
        records,
        records.stride(0),
        records.stride(1),
        weights.conv,
        weights.decay_rate,
        weights.decay_bias,
        weights.norm,
        weights.norm_eps,
        conv_pool,
        conv_pool.stride(0),
        recurrent_pool,
        recurrent_pool.stride(0),
        *layout.sequences,
        layout.decodes.arrivals,
        torch.empty_like(output, dtype=torch.float32),
        output,
        HEADS=heads,
        HEAD_DIM=head_dim,
        TAPS=conv_width,
        BLOCK_TAPS=triton.next_power_of_2(conv_width),
        BLOCK=triton.next_power_of_2(head_dim),
        EARLY=num_columns * heads * num_sequences <= num_sms(projected.device),
        COLUMNS=_COLUMNS,
        **_VERIFY,
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize_on_alignment=UNSPECIALISED)
def _verify(
    projected,
    projected_stride,
    decay_inputs,
    gate,
    records,
    row_stride,
    record_stride,
    conv_weight,
    decay_rate,
    decay_bias,
    norm_weight,
    norm_eps,
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
    """COLUMNS columns of a head: its state [K, K] moves on token by token, and is read behind new
    ones; the last of a head's programs also writes the head's part of `output` [T, H * K]."""
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
    num_folded, num_new = tl.load(fold + i_sequence), tl.load(length + i_sequence)
    first = tl.load(begin + i_sequence).to(tl.int64)
    o_state = (i_head * HEAD_DIM + o_k[:, None]) * HEAD_DIM + o_v[None, :]
    in_state = is_k[:, None] & is_v[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_state = tl.load(pool + source * slot_stride + o_state, in_state, 0).to(tl.float32)
    rate, bias = tl.load(decay_rate + i_head), tl.load(decay_bias + o_key, is_k, 0)
    p_conv = conv_pool + source * conv_stride
    p_record = records + tl.load(row + i_sequence).to(tl.int64) * row_stride
    p_tokens = projected + first * projected_stride
    inputs = p_tokens, projected_stride, p_record, record_stride, p_conv, num_folded
    p_decays, p_recorded = decay_inputs + first * size, p_record + 3 * size + HEADS
    decays = p_decays, size, p_recorded, record_stride, p_conv, num_folded
    p_y = y + first * size + i_head * HEAD_DIM
    p_written = pool + written * slot_stride + o_state
    last = num_folded + tl.minimum(num_new, 1) - 1
    wait_for_inputs()

    for place in range(num_folded + num_new):
        b_q = convolve_place(inputs, conv_weight, None, o_key, is_k, place, TAPS, BLOCK_TAPS)
        b_k = convolve_place(inputs, conv_weight, None, size + o_key, is_k, place, TAPS, BLOCK_TAPS)
        o_input = 2 * size + o_value
        b_v = convolve_place(inputs, conv_weight, None, o_input, is_v, place, TAPS, BLOCK_TAPS)
        b_q, b_k = unit(b_q, b_k, HEAD_DIM)
        beta = sigmoid(load_recorded(inputs, 3 * size + i_head, True, place))
        b_decay = channel_decay(rate, bias, load_recorded(decays, o_key, is_k, place))
        b_state = advance(b_state, b_k, b_v, beta, b_decay[:, None])
        if place >= num_folded:
            b_y = tl.sum(b_state * b_q[:, None], 0)
            tl.store(p_y + (place - num_folded) * size + o_v, b_y, is_v)
        b_kept = b_state.to(pool.dtype.element_ty)
        if place == last:
            # Threads that hold the same numbers have all read them: slot_in may be slot_out.
            tl.debug_barrier()
            tl.store(p_written, b_kept, in_state)
        # What a step that ends here would find in the pool.
        b_state = b_kept.to(tl.float32)

    o_input = 2 * size + o_value
    window_v = stream_window(inputs, o_input, is_v, last, TAPS, BLOCK_TAPS)
    # All of the slots has been read by this program, and what the head's norm reads is stored.
    tl.debug_barrier()
    p_kept = conv_pool + written * conv_stride
    keep_window(p_kept, window_v, o_input, is_v, TAPS, BLOCK_TAPS)
    record_drafts(inputs, o_input, is_v, num_new)
    p_arrivals = arrivals + i_sequence * HEADS + i_head
    arrived = tl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(p_arrivals, 0)
        window_q = stream_window(inputs, o_key, is_k, last, TAPS, BLOCK_TAPS)
        window_k = stream_window(inputs, size + o_key, is_k, last, TAPS, BLOCK_TAPS)
        tl.debug_barrier()
        keep_window(p_kept, window_q, o_key, is_k, TAPS, BLOCK_TAPS)
        keep_window(p_kept, window_k, size + o_key, is_k, TAPS, BLOCK_TAPS)
        record_drafts(inputs, o_key, is_k, num_new)
        record_drafts(inputs, size + o_key, is_k, num_new)
        record_drafts(inputs, 3 * size + i_head, True, num_new)
        record_drafts(decays, o_key, is_k, num_new)
        for new in range(num_new):
            own = (first + new) * size
            parts = y + own, gate + own, output + own, norm_weight, norm_eps
            finish_head(*parts, o_k, is_k, o_key, HEAD_DIM)
