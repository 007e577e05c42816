"""Mamba2's token mixer for decoding sequences with drafts, in two launches.

1. `walk`: the states of some heads go through all tokens in registers: first the recorded ones that
   are folded in, then the sequence's own, behind which states are written, then its drafts. With
   each the operations of `triton_decode` in their order. On Hopper another kernel does it.
2. `_finish`: norms and gates what new tokens have read; moves the convolution's states on, and puts
   the drafts' inputs in place of the records, which all have been read by then.

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
    load_recorded,
    move_on,
    open_stream,
)
from milepost.kernels.device import num_sms, runs_gluon
from milepost.kernels.mamba2.triton_decode import choose_heads, choose_warps
from milepost.kernels.mamba2.triton_norm import finish_group
from milepost.kernels.mamba2.triton_parts import advance, sizes_of, time_step
from milepost.kernels.mamba2.weights import Mamba2Weights
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.verify_layout import UNSPECIALISED, VerifyLayout

_LEFT = 512
"""Columns that a program leaves to the next step."""
_FINISH = {"num_warps": 4}


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
    y = torch.empty_like(output, dtype=torch.float32)
    inputs = projected, weights, conv_pool, recurrent_pool, layout, records, y
    squares = _walk_states(*inputs)
    _, heads, head_dim, state_size = recurrent_pool.shape
    channels, conv_width = weights.conv.shape
    inner, most = heads * head_dim, records.shape[1] + 1
    groups = (channels - inner) // (2 * state_size)
    pad = triton.next_power_of_2
    num_parts = groups * most + triton.cdiv(channels + heads, _LEFT)
    _finish[(num_parts, layout.num_sequences)](
        projected,
        projected.stride(0),
        records,
        records.stride(0),
        records.stride(1),
        weights.norm,
        weights.norm_eps,
        conv_pool,
        conv_pool.stride(0),
        *layout.sequences,
        y,
        squares,
        output,
        HEADS=heads,
        INNER=inner,
        GROUPS=groups,
        CHANNELS=channels,
        TAPS=conv_width,
        MOST=most,
        BEFORE_GATE=weights.norm_before_gate,
        BLOCK_TAPS=pad(conv_width),
        BLOCK_W=pad(inner // groups),
        BLOCK_C=_LEFT,
        **_FINISH,
        **OVERLAPPED,
    )


def _walk_states(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    y: Tensor,
) -> Tensor | None:
    """Write the states of `recurrent_pool`, and to `y` [T, I] float32 what new tokens read; returns
    the sums of squares [T, H, warps] that the norm is to take, if it is not to add them up."""
    if runs_gluon(projected):
        from milepost.kernels.mamba2 import triton_hopper, triton_hopper_verify

        if triton_hopper.suits_states(recurrent_pool):
            inputs = projected, weights, conv_pool, recurrent_pool, layout, records, y
            return triton_hopper_verify.walk(*inputs)
    num_sequences = layout.num_sequences
    _, heads, head_dim, state_size = recurrent_pool.shape
    sizes = sizes_of(weights, recurrent_pool)
    each = choose_heads(heads, sizes["GROUPS"], num_sequences, projected.device)
    _walk[(heads // each, num_sequences)](
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
        conv_pool,
        conv_pool.stride(0),
        recurrent_pool,
        recurrent_pool.stride(0),
        *layout.sequences,
        y,
        **sizes,
        EACH=each,
        BLOCK_P=triton.next_power_of_2(each * head_dim),
        EARLY=heads // each * num_sequences <= num_sms(projected.device),
        num_warps=choose_warps(head_dim, state_size, each),
        **OVERLAPPED,
    )
    return None


@triton.jit(do_not_specialize_on_alignment=UNSPECIALISED)
def _walk(
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
    GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """EACH heads: their states [EACH * P, K] move on token by token, and are read behind new
    ones."""
    i_head, i_sequence = tl.program_id(0) * EACH, tl.program_id(1).to(tl.int64)
    if EARLY:
        let_next_start()
    o_p, o_k = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    is_p, is_k = o_p < EACH * HEAD_DIM, o_k < STATE_SIZE
    heads = i_head + o_p // HEAD_DIM
    inner: tl.constexpr = HEADS * HEAD_DIM
    written = tl.load(slot_out + i_sequence).to(tl.int64)
    if written < 0:
        # Padding waits too: a launch that is nothing else must not end before the one before it.
        wait_for_inputs()
        return
    source = tl.load(slot_in + i_sequence).to(tl.int64)
    tokens = projected + inner, projected_stride, records, row_stride, record_stride
    sequence = begin, length, fold, row, i_sequence
    inputs, num_new = open_stream(tokens, conv_pool + source * conv_stride, sequence)
    num_folded = inputs[5]
    o_state = (i_head * HEAD_DIM + o_p[:, None]) * STATE_SIZE + o_k[None, :]
    in_state = is_p[:, None] & is_k[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_state = tl.load(pool + source * slot_stride + o_state, in_state, 0).to(tl.float32)
    b_rate, b_bias = tl.load(rate + heads, is_p, 0), tl.load(dt_bias + heads, is_p, 0)
    b_skip = tl.load(skip + heads, is_p, 0)
    o_x = i_head * HEAD_DIM + o_p
    o_b = inner + i_head // (HEADS // GROUPS) * STATE_SIZE + o_k
    o_step = inner + 2 * GROUPS * STATE_SIZE + heads
    columns = o_x, is_p, o_b, is_k, o_step, GROUPS * STATE_SIZE
    own = conv_weight, conv_bias, b_rate, b_bias, dt_low, dt_high
    p_y = y + tl.load(begin + i_sequence).to(tl.int64) * inner + o_x
    p_written = pool + written * slot_stride + o_state
    last = num_folded + tl.minimum(num_new, 1) - 1
    wait_for_inputs()

    for place in range(num_folded + num_new):
        b_state, b_x, b_c = _take_in(b_state, inputs, place, columns, own, TAPS, BLOCK_TAPS)
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


@triton.jit
def _take_in(b_state, inputs, place, columns, own, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr):
    """The states of some heads behind the token at a place, its inputs of them, and the C that
    reads them. `own` is what the heads have of the weights."""
    o_x, is_p, o_b, is_k, o_step, to_c = columns
    weight, bias, b_rate, b_bias, dt_low, dt_high = own
    b_x = convolve_place(inputs, weight, bias, o_x, is_p, place, TAPS, BLOCK_TAPS)
    b_b = convolve_place(inputs, weight, bias, o_b, is_k, place, TAPS, BLOCK_TAPS)
    b_c = convolve_place(inputs, weight, bias, o_b + to_c, is_k, place, TAPS, BLOCK_TAPS)
    step = time_step(load_recorded(inputs, o_step, is_p, place), b_bias, dt_low, dt_high)
    return advance(b_state, b_x, b_b, step, b_rate), b_x, b_c


@triton.jit
def _add_squares(squares, first, EACH: tl.constexpr):
    """Of EACH heads from one on what `triton_hopper` adds up, in its order: what each of four warps
    has of all heads, then these."""
    o_w = tl.arange(0, 4)
    parts = tl.load(squares + first * 4 + o_w)
    for i_head in tl.static_range(1, EACH):
        parts += tl.load(squares + (first + i_head) * 4 + o_w)
    total = 0.0
    for i_warp in tl.static_range(4):
        total += tl.sum(tl.where(o_w == i_warp, parts, 0.0), 0)
    return total


@triton.jit(do_not_specialize_on_alignment=UNSPECIALISED)
def _finish(
    projected,
    projected_stride,
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
    squares,
    output,
    HEADS: tl.constexpr,
    INNER: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    MOST: tl.constexpr,
    BEFORE_GATE: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A group of one of a sequence's new tokens, MOST at most; behind all of these BLOCK_C columns
    of what is recorded."""
    i_part, i_sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    written = tl.load(slot_out + i_sequence).to(tl.int64)
    state = conv_pool + tl.load(slot_in + i_sequence).to(tl.int64) * conv_stride
    tokens = projected + INNER, projected_stride, records, row_stride, record_stride
    sequence = begin, length, fold, row, i_sequence
    inputs, num_new = open_stream(tokens, state, sequence)
    token = tl.load(begin + i_sequence).to(tl.int64) + i_part % MOST
    wait_for_inputs()
    if written < 0:
        return
    if i_part < GROUPS * MOST:
        if i_part % MOST < num_new:
            parts = y + token * INNER, projected + token * projected_stride, output + token * INNER
            i_group = i_part // MOST
            each: tl.constexpr = HEADS // GROUPS
            total = squares
            if squares is not None:
                total = _add_squares(squares, token * HEADS + i_group * each, each)
            norm = norm_weight, norm_eps, i_group
            finish_group(*parts, *norm, BEFORE_GATE, INNER // GROUPS, BLOCK_W, total)
        return
    column = (i_part - GROUPS * MOST) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column, is_channel = column < CHANNELS + HEADS, column < CHANNELS
    target = conv_pool + written * conv_stride
    last = inputs[5] + tl.minimum(num_new, 1) - 1
    move_on(inputs, target, column, is_column, is_channel, last, num_new, TAPS, BLOCK_TAPS)
