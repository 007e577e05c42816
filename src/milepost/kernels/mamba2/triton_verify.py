"""Mamba2's token mixer for decoding sequences with drafts, in one launch.

As `triton_decode`, token by token, with the states in registers all the while: first the recorded
tokens that are folded in, then the sequence's own, behind which the states are written, then its
drafts. The last program of a group to arrive, when all have read the records, also puts the drafts'
B and C there. Hopper's kernel for decodes adds up in another order.

    place     0 .. F - 1    F          F + 1 .. F + N - 1
    token     records       its own    drafts

Legend: S sequences, F folded and N new tokens of each, H heads, P head_dim, G groups, K state_size,
J taps; I = H * P entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.conv.triton_parts import (
    convolve_place,
    keep_window,
    load_recorded,
    record_drafts,
    stream_window,
)
from milepost.kernels.device import num_sms
from milepost.kernels.mamba2.triton_decode import choose_heads, choose_warps
from milepost.kernels.mamba2.triton_norm import finish_group
from milepost.kernels.mamba2.triton_parts import advance, time_step
from milepost.kernels.mamba2.weights import Mamba2Weights
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.verify_layout import UNSPECIALISED, VerifyLayout


def verify(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    output: Tensor,
) -> None:
    """Write `output` [T, I] of the sequences that decode; see `mamba2.mix`."""
    assert layout.decodes is not None, "programs of a group wait for one another"
    num_sequences = layout.num_sequences
    _, heads, head_dim, state_size = recurrent_pool.shape
    channels, conv_width = weights.conv.shape
    inner = heads * head_dim
    groups = (channels - inner) // (2 * state_size)
    pad = triton.next_power_of_2
    each = choose_heads(heads, groups, num_sequences, projected.device)
    _verify[(heads // each, num_sequences)](
        projected,
        projected.stride(0),
        records,
        records.stride(0),
        records.stride(1),
        weights.conv,
        weights.conv_bias,
        weights.rate,
        weights.dt_bias,
        *weights.dt_limit,
        weights.skip,
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
        GROUPS=groups,
        STATE_SIZE=state_size,
        TAPS=conv_width,
        BEFORE_GATE=weights.norm_before_gate,
        BLOCK_TAPS=pad(conv_width),
        EACH=each,
        BLOCK_P=pad(each * head_dim),
        BLOCK_K=pad(state_size),
        BLOCK_W=pad(inner // groups),
        EARLY=heads // each * num_sequences <= num_sms(projected.device),
        num_warps=choose_warps(head_dim, state_size, each),
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize_on_alignment=UNSPECIALISED)
def _verify(
    projected,
    projected_stride,
    records,
    row_stride,
    record_stride,
    conv_weight,
    conv_bias,
    rate,
    dt_bias,
    dt_low,
    dt_high,
    skip,
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
    GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BEFORE_GATE: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    EARLY: tl.constexpr,
):
    """EACH heads: their states [EACH * P, K] move on token by token, and are read behind new ones;
    the last heads of a group also write the group's part of `output` [T, I]."""
    i_head, i_sequence = tl.program_id(0) * EACH, tl.program_id(1).to(tl.int64)
    i_group = i_head // (HEADS // GROUPS)
    if EARLY:
        let_next_start()
    o_p, o_k = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    is_p, is_k = o_p < EACH * HEAD_DIM, o_k < STATE_SIZE
    heads = i_head + o_p // HEAD_DIM
    inner: tl.constexpr = HEADS * HEAD_DIM
    channels: tl.constexpr = inner + 2 * GROUPS * STATE_SIZE
    written = tl.load(slot_out + i_sequence).to(tl.int64)
    if written < 0:
        # Padding waits too: a launch that is nothing else must not end before the one before it.
        wait_for_inputs()
        return
    source = tl.load(slot_in + i_sequence).to(tl.int64)
    num_folded, num_new = tl.load(fold + i_sequence), tl.load(length + i_sequence)
    first = tl.load(begin + i_sequence).to(tl.int64)
    o_state = (i_head * HEAD_DIM + o_p[:, None]) * STATE_SIZE + o_k[None, :]
    in_state = is_p[:, None] & is_k[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_state = tl.load(pool + source * slot_stride + o_state, in_state, 0).to(tl.float32)
    b_rate, b_bias = tl.load(rate + heads, is_p, 0), tl.load(dt_bias + heads, is_p, 0)
    b_skip = tl.load(skip + heads, is_p, 0)
    o_x, o_b = i_head * HEAD_DIM + o_p, inner + i_group * STATE_SIZE + o_k
    o_c = o_b + GROUPS * STATE_SIZE
    p_conv = conv_pool + source * conv_stride
    p_record = records + tl.load(row + i_sequence).to(tl.int64) * row_stride
    p_tokens = projected + first * projected_stride
    inputs = p_tokens + inner, projected_stride, p_record, record_stride, p_conv, num_folded
    p_y = y + first * inner + o_x
    p_written = pool + written * slot_stride + o_state
    last = num_folded + tl.minimum(num_new, 1) - 1
    wait_for_inputs()

    for place in range(num_folded + num_new):
        b_x = convolve_place(inputs, conv_weight, conv_bias, o_x, is_p, place, TAPS, BLOCK_TAPS)
        b_b = convolve_place(inputs, conv_weight, conv_bias, o_b, is_k, place, TAPS, BLOCK_TAPS)
        b_c = convolve_place(inputs, conv_weight, conv_bias, o_c, is_k, place, TAPS, BLOCK_TAPS)
        step = time_step(
            load_recorded(inputs, channels + heads, is_p, place), b_bias, dt_low, dt_high
        )
        b_state = advance(b_state, b_x, b_b, step, b_rate)
        if place >= num_folded:
            b_y = tl.sum(b_state * b_c[None, :], 1) + b_skip * b_x
            tl.store(p_y + (place - num_folded) * inner, b_y, is_p)
        b_kept = b_state.to(pool.dtype.element_ty)
        if place == last:
            # Threads that hold the same numbers have all read them: slot_in may be slot_out.
            tl.debug_barrier()
            tl.store(p_written, b_kept, in_state)
        # What a step that ends here would find in the pool.
        b_state = b_kept.to(tl.float32)

    window_x = stream_window(inputs, o_x, is_p, last, TAPS, BLOCK_TAPS)
    # All of the slots has been read by this program, and what the group's norm reads is stored.
    tl.debug_barrier()
    p_kept = conv_pool + written * conv_stride
    keep_window(p_kept, window_x, o_x, is_p, TAPS, BLOCK_TAPS)
    record_drafts(inputs, o_x, is_p, num_new)
    record_drafts(inputs, channels + heads, is_p, num_new)
    p_arrivals = arrivals + i_sequence * GROUPS + i_group
    arrived = tl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu")
    if arrived == HEADS // GROUPS // EACH - 1:
        tl.store(p_arrivals, 0)
        window_b = stream_window(inputs, o_b, is_k, last, TAPS, BLOCK_TAPS)
        window_c = stream_window(inputs, o_c, is_k, last, TAPS, BLOCK_TAPS)
        tl.debug_barrier()
        keep_window(p_kept, window_b, o_b, is_k, TAPS, BLOCK_TAPS)
        keep_window(p_kept, window_c, o_c, is_k, TAPS, BLOCK_TAPS)
        record_drafts(inputs, o_b, is_k, num_new)
        record_drafts(inputs, o_c, is_k, num_new)
        for new in range(num_new):
            own = (first + new) * inner
            parts = y + own, p_tokens + new * projected_stride, output + own, norm_weight, norm_eps
            finish_group(*parts, i_group, BEFORE_GATE, inner // GROUPS, BLOCK_W)
