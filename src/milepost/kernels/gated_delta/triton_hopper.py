"""`triton_decode` on Hopper in one launch, in Gluon: Triton's language for programs that place data
themselves.

Programs go through sequences and key heads. While one works on a value head's state in registers,
TMA brings the next to shared memory. It begins before the input projection has ended:
the states were written in an earlier step. A key head's query and key are worked out once for all
its value heads, and by one program, which alone reads and writes their convolution states.

Where there is work for many, two programs share an SM, with one place for a state each:
one waits while the other works. Else a program has two places, and fetches both states at once.

Legend: D sequences, C channels, J taps, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.device import num_sms
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.overlap import OVERLAPPED
from milepost.kernels.overlap_gluon import let_next_start, wait_for_inputs
from milepost.kernels.states_gluon import (
    STATE,
    STATE_SIZE,
    begin_work,
    by_row,
    can_describe,
    convolve,
    decay_of,
    describe_states,
    keep_window,
    load_window,
    pass_token,
    rms_scale,
    sigmoid,
    times_silu,
    unit_vectors,
)


def suits(recurrent_pool: Tensor) -> bool:
    """Whether the kernel can do this work, where `runs_gluon`."""
    return (
        recurrent_pool.dtype == torch.float32
        and recurrent_pool.shape[2:] == (STATE_SIZE, STATE_SIZE)
        and recurrent_pool.stride(0) % STATE_SIZE == 0
        and can_describe(recurrent_pool)
    )


def decode(
    projected: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
) -> Tensor:
    """See `gated_delta.mix`."""
    num_sequences = len(slot_out)
    value_heads = recurrent_pool.shape[1]
    channels, conv_width = weights.conv.shape
    key_heads = (channels - value_heads * STATE_SIZE) // (2 * STATE_SIZE)
    output = projected.new_empty(num_sequences, value_heads * STATE_SIZE)
    states = describe_states(recurrent_pool)
    num_units = num_sequences * key_heads
    units_at_once = num_sms(projected.device)
    stages = 2 if num_units <= units_at_once else 1
    _decode_kernel[(min(num_units, 2 * units_at_once),)](
        projected,
        projected.stride(0),
        weights.conv,
        conv_pool,
        conv_pool.stride(0),
        weights.decay_rate,
        weights.decay_bias,
        weights.norm,
        weights.norm_eps,
        states,
        recurrent_pool,
        recurrent_pool.stride(0),
        slot_in,
        slot_out,
        output,
        num_units,
        KEY_HEADS=key_heads,
        GROUP=value_heads // key_heads,
        SIZE=STATE_SIZE,
        TAPS=conv_width,
        BLOCK_TAPS=triton.next_power_of_2(conv_width),
        STAGES=stages,
        num_warps=4,
        **OVERLAPPED,
    )
    return output


@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=["slot_in", "slot_out"])
def _decode_kernel(
    projected,
    projected_stride,
    conv_weight,
    conv_pool,
    conv_stride,
    decay_rate,
    decay_bias,
    norm_weight,
    norm_eps,
    states,
    pool,
    slot_stride,
    slot_in,
    slot_out,
    output,
    num_units,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    BLOCK_TAPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Every so many units, each the value heads of a key head of a sequence."""
    WINDOW: gl.constexpr = gl.BlockedLayout([1, BLOCK_TAPS], [32, 1], [4, 1], [1, 0])
    VALUE_HEADS: gl.constexpr = KEY_HEADS * GROUP
    CHANNELS: gl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    work = begin_work(
        states, slot_stride, slot_in, slot_out, num_units, [SIZE, SIZE], KEY_HEADS, GROUP, STAGES
    )
    first, stride = work[4], work[5]

    row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    scale = gl.load(norm_weight + column)
    following = first // KEY_HEADS
    source, target = gl.load(slot_in + following), gl.load(slot_out + following)
    wait_for_inputs()
    let_next_start()  # the output projection, which begins with its weights
    number = 0
    for unit in range(first, num_units, stride):
        sequence, key_head = (unit // KEY_HEADS).to(gl.int64), unit % KEY_HEADS
        token = projected + sequence * projected_stride
        # Everything is asked for before anything is used.
        inputs = token, conv_weight, conv_pool + source.to(gl.int64) * conv_stride
        query_window = load_window(inputs, key_head, SIZE, TAPS, WINDOW)
        key_window = load_window(inputs, KEY_HEADS + key_head, SIZE, TAPS, WINDOW)
        members = ()
        for member in gl.static_range(GROUP):
            head = key_head * GROUP + member
            window = load_window(inputs, 2 * KEY_HEADS + head, SIZE, TAPS, WINDOW)
            gate = gl.load(token + CHANNELS + head * SIZE + column)
            gates = token + CHANNELS + VALUE_HEADS * SIZE + head
            b_in, a_in = gl.load(gates), gl.load(gates + VALUE_HEADS)
            rate, bias = gl.load(decay_rate + head), gl.load(decay_bias + head)
            members += ((window, gate, b_in, a_in, rate, bias),)
        is_real = target >= 0
        kept = conv_pool + target.to(gl.int64) * conv_stride
        written = pool + target.to(gl.int64) * slot_stride
        following = gl.minimum(unit + stride, num_units - 1) // KEY_HEADS
        source, target = gl.load(slot_in + following), gl.load(slot_out + following)

        query, key = unit_vectors(convolve(query_window), convolve(key_window), SIZE)
        query, key = by_row(query), by_row(key)
        keep_window(query_window, kept, key_head, is_real, SIZE, TAPS, WINDOW)
        keep_window(key_window, kept, KEY_HEADS + key_head, is_real, SIZE, TAPS, WINDOW)
        for member in gl.static_range(GROUP):
            window, gate, b_in, a_in, rate, bias = members[member]
            head = key_head * GROUP + member
            value = gl.convert_layout(convolve(window), gl.SliceLayout(0, STATE))
            keep_window(window, kept, 2 * KEY_HEADS + head, is_real, SIZE, TAPS, WINDOW)
            own = query, key, value, sigmoid(b_in), decay_of(a_in, rate, bias)
            own_target = written, head, row, column, is_real
            x = pass_token(work, number, own, own_target, KEY_HEADS, GROUP)
            number += 1
            x *= rms_scale(x, norm_eps, SIZE) * scale
            x = gl.where(is_real, times_silu(x, gate), 0.0)
            output_at = output + (sequence * VALUE_HEADS + head) * SIZE + column
            gl.store(output_at, x.to(output.dtype.element_ty))
