"""Gated DeltaNet's token mixer for decoding sequences with drafts, in two launches.

As `triton_decode`, token by token, with the state in registers all the while: first the recorded
tokens that are folded in, then the sequence's own, behind which the state is written, then its
drafts, which are recorded. Each token takes the operations of `triton_decode` in their order: with
heads of 128 states are the same bit for bit. Hopper's kernel for decodes adds up in another order.

    place     0 .. F - 1    F          F + 1 .. F + N - 1
    token     records       its own    drafts

Legend: S sequences, F folded and N new tokens of each, R places at most, C channels, J taps, G key
heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.activations import sigmoid
from milepost.kernels.conv.triton_parts import convolve_place, move_on
from milepost.kernels.gated_delta.triton_decode import suits_hopper
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
from milepost.kernels.verify_layout import UNSPECIALISED, VerifyLayout

_CONVOLVE = {"num_warps": 1}
_UPDATE = {"num_warps": 4}


def verify(
    projected: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    output: Tensor,
) -> None:
    """Write `output` [T, V * W] of the sequences that decode; see `gated_delta.mix`."""
    if suits_hopper(recurrent_pool):
        from milepost.kernels.gated_delta import triton_hopper_verify

        pools = conv_pool, recurrent_pool
        triton_hopper_verify.verify(projected, weights, *pools, layout, records, output)
        return
    num_sequences = layout.num_sequences
    _, value_heads, key_dim, value_dim = recurrent_pool.shape
    channels, conv_width = weights.conv.shape
    places = 2 * records.shape[1] + 1
    mixed = projected.new_empty(num_sequences, places, channels, dtype=torch.float32)
    sizes = sizes_of(weights, recurrent_pool)
    recorded = records, records.stride(0), records.stride(1)
    _convolve[(num_sequences, 2 * sizes["KEY_HEADS"] + value_heads)](
        projected,
        projected.stride(0),
        *recorded,
        weights.conv,
        conv_pool,
        conv_pool.stride(0),
        *layout.sequences,
        mixed,
        channels,
        places,
        **sizes,
        TAPS=conv_width,
        BLOCK_TAPS=triton.next_power_of_2(conv_width),
        BLOCK=triton.next_power_of_2(max(key_dim, value_dim)),
        **_CONVOLVE,
    )
    _update[(value_heads, num_sequences)](
        projected,
        projected.stride(0),
        *recorded,
        mixed,
        weights.decay_rate,
        weights.decay_bias,
        weights.norm,
        weights.norm_eps,
        recurrent_pool,
        recurrent_pool.stride(0),
        *layout.sequences,
        output,
        channels,
        places,
        **sizes,
        VALUE_HEADS=value_heads,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_W=triton.next_power_of_2(value_dim),
        MAX_BETA=weights.max_beta,
        **_UPDATE,
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize_on_alignment=UNSPECIALISED)
def _convolve(
    projected,
    projected_stride,
    records,
    row_stride,
    record_stride,
    weight,
    pool,
    slot_stride,
    begin,
    length,
    fold,
    row,
    slot_in,
    slot_out,
    mixed,
    channels,
    places,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head: convolution, SiLU, L2 norm of queries and keys into `mixed` [S, R, C] float32;
    moves the head's convolution state on, and records the drafts' inputs."""
    let_next_start()
    i_n, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    written = tl.load(slot_out + i_n).to(tl.int64)
    if written < 0:
        return
    num_folded, num_new = tl.load(fold + i_n), tl.load(length + i_n)
    first, size = head_channels(i_h, KEY_HEADS, KEY_DIM, VALUE_DIM)
    o_c = tl.arange(0, BLOCK)
    o_channel, is_channel = first + o_c, o_c < size
    p_tokens = projected + tl.load(begin + i_n).to(tl.int64) * projected_stride
    p_records = records + tl.load(row + i_n).to(tl.int64) * row_stride
    p_state = pool + tl.load(slot_in + i_n).to(tl.int64) * slot_stride
    stream = p_tokens, projected_stride, p_records, record_stride, p_state, num_folded
    p_mixed = mixed + i_n * places * channels + o_channel
    for place in range(num_folded + num_new):
        b_x = convolve_place(stream, weight, None, o_channel, is_channel, place, TAPS, BLOCK_TAPS)
        b_x *= unit_scale(b_x, i_h, KEY_HEADS, KEY_DIM, 0)
        tl.store(p_mixed + place * channels, b_x, is_channel)

    last = num_folded + tl.minimum(num_new, 1) - 1
    p_written = pool + written * slot_stride
    move_on(stream, p_written, o_channel, is_channel, is_channel, last, num_new, TAPS, BLOCK_TAPS)


@triton.jit(do_not_specialize_on_alignment=UNSPECIALISED)
def _update(
    projected,
    projected_stride,
    records,
    row_stride,
    record_stride,
    mixed,
    decay_rate,
    decay_bias,
    norm_weight,
    norm_eps,
    pool,
    slot_stride,
    begin,
    length,
    fold,
    row,
    slot_in,
    slot_out,
    output,
    channels,
    places,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MAX_BETA: tl.constexpr,
):
    """One value head: its state [K, W] moves on token by token; of new ones it is read, and the
    gated norm of that goes to `output` [T, V * W]."""
    i_hv, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_W)
    is_k, is_v = o_k < KEY_DIM, o_v < VALUE_DIM
    written = tl.load(slot_out + i_n).to(tl.int64)
    if written < 0:
        # Padding waits too: a launch that is nothing else must not end before the one before it.
        wait_for_inputs()
        return
    num_folded, num_new = tl.load(fold + i_n), tl.load(length + i_n)
    o_h = (i_hv * KEY_DIM + o_k[:, None]) * VALUE_DIM + o_v[None, :]
    in_h = is_k[:, None] & is_v[None, :]
    p_read = pool + tl.load(slot_in + i_n).to(tl.int64) * slot_stride
    b_h = tl.load(p_read + o_h, in_h, 0).to(tl.float32)
    first = tl.load(begin + i_n).to(tl.int64)
    p_tokens = projected + first * projected_stride + channels
    p_gates = p_tokens + VALUE_HEADS * VALUE_DIM + i_hv
    p_records = records + tl.load(row + i_n).to(tl.int64) * row_stride + channels + i_hv
    p_o = output + (first * VALUE_HEADS + i_hv) * VALUE_DIM + o_v
    rate, bias = tl.load(decay_rate + i_hv), tl.load(decay_bias + i_hv)
    b_norm = tl.load(norm_weight + o_v, is_v, 0)
    p_q = mixed + i_n * places * channels + i_hv // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    p_v = mixed + i_n * places * channels + 2 * KEY_HEADS * KEY_DIM + i_hv * VALUE_DIM
    last = num_folded + tl.minimum(num_new, 1) - 1
    # From here on the first launch has ended.
    wait_for_inputs()

    for place in range(num_folded + num_new):
        p_new = p_gates + (place - num_folded) * projected_stride
        p_old = p_records + place * record_stride
        b_in, a_in = _load_strengths(p_new, p_old, place >= num_folded, VALUE_HEADS)
        b_beta = sigmoid(b_in) * MAX_BETA
        b_decay = tl.exp(log_decay(rate, bias, a_in))
        b_q = tl.load(p_q + place * channels + o_k, is_k, 0)
        b_k = tl.load(p_q + place * channels + KEY_HEADS * KEY_DIM + o_k, is_k, 0)
        b_v = tl.load(p_v + place * channels + o_v, is_v, 0)
        b_h = advance(b_h, b_k, b_v, b_beta, b_decay)
        if place >= num_folded:
            new = place - num_folded
            b_gate = tl.load(p_tokens + new * projected_stride + i_hv * VALUE_DIM + o_v, is_v, 0)
            b_o = tl.sum(b_h * b_q[:, None], 0)
            b_o = gated_norm(b_o, b_norm, b_gate, norm_eps, VALUE_DIM, 0)
            p_own = p_o + new * VALUE_HEADS * VALUE_DIM
            tl.store(p_own, b_o.to(output.dtype.element_ty), is_v)
        b_kept = b_h.to(pool.dtype.element_ty)
        if place == last:
            # Threads that hold the same numbers have all read them: slot_in may be slot_out.
            tl.debug_barrier()
            tl.store(pool + written * slot_stride + o_h, b_kept, in_h)
        # What a step that ends here would find in the pool.
        b_h = b_kept.to(tl.float32)
    tl.debug_barrier()
    for draft in range(num_new - 1):
        p_new = p_gates + (draft + 1) * projected_stride
        _record_strengths(p_new, p_records + draft * record_stride, VALUE_HEADS)


@triton.jit
def _load_strengths(p_new, p_old, is_new, VALUE_HEADS: tl.constexpr):
    """What a head's beta and decay are made of, of the step's token or a recorded one: either of
    two pointers is no pointer that AMD's compiler follows."""
    b_in = tl.load(p_new, is_new, 0) + tl.load(p_old, not is_new, 0)
    a_in = tl.load(p_new + VALUE_HEADS, is_new, 0)
    a_in += tl.load(p_old + VALUE_HEADS, not is_new, 0)
    return b_in, a_in


@triton.jit
def _record_strengths(p_new, p_kept, VALUE_HEADS: tl.constexpr):
    """Of a draft."""
    tl.store(p_kept, tl.load(p_new))
    tl.store(p_kept + VALUE_HEADS, tl.load(p_new + VALUE_HEADS))
