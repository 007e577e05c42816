"""Decode steps on Hopper in one launch, in Gluon: Triton's language for programs that place data
themselves.

Programs go through sequences and key heads. While one works on a value head's state in registers,
TMA brings the next to shared memory. It begins before the input projection has ended:
the states were written in an earlier step. A key head's query and key are worked out once for all
its value heads, and by one program, which alone reads and writes their convolution states.

Where there is work for many, two programs share an SM, with one place for a state each:
one waits while the other works. Else a program has two places, and fetches both states at once.
Of so few sequences that each value head can have an SM, each has a program. Those of a key head
then work its query and key out by themselves, and the last of them to arrive, when all have read
their convolution states, moves these on.

Legend: D sequences, C channels, J taps, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.layout.emit import Emit, Inputs, handed_on, room_for
from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.gluon import launch_dependents, round_block, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.recurrent.hopper.states import (
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
    read_rows,
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
    arrivals: Tensor | None = None,
    *,
    emit: Emit = Emit.VALUES,
) -> Inputs:
    """See `gated_delta.mix`. With `arrivals` [D, G], which are zeros and stay so, each value head
    has a program."""
    num_sequences = len(slot_out)
    value_heads = recurrent_pool.shape[1]
    channels, conv_width = weights.conv.shape
    key_heads = (channels - value_heads * STATE_SIZE) // (2 * STATE_SIZE)
    output = projected.new_empty(num_sequences, value_heads * STATE_SIZE)
    emit = emit if emit is Emit.VALUES else Emit.BOTH
    fp8 = room_for(*output.shape, output, emit)
    values, scales = (None, None) if fp8 is None else (fp8.values, fp8.scales)
    states = describe_states(recurrent_pool)
    group = value_heads // key_heads
    each = group if arrivals is None else 1
    num_units = num_sequences * value_heads // each
    units_at_once = num_sms(projected.device)
    stages = 2 if each > 1 and num_units <= units_at_once else 1
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
        arrivals if each < group else None,
        output,
        values,
        scales,
        0 if scales is None else scales.stride(0),
        num_units,
        KEY_HEADS=key_heads,
        GROUP=group,
        EACH=each,
        SIZE=STATE_SIZE,
        TAPS=conv_width,
        MAX_BETA=weights.max_beta,
        STAGES=stages,
        num_warps=4,
        **OVERLAPPED,
    )
    return handed_on(output, fp8)


@quick
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
    arrivals,
    output,
    values,
    scales,
    scales_stride,
    num_units,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    EACH: gl.constexpr,
    SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    MAX_BETA: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Every so many units, each EACH value heads of a key head of a sequence: all or one."""
    VALUE_HEADS: gl.constexpr = KEY_HEADS * GROUP
    UNITS: gl.constexpr = VALUE_HEADS // EACH
    CHANNELS: gl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    work = begin_work(
        states, slot_stride, slot_in, slot_out, num_units, [SIZE, SIZE], UNITS, EACH, STAGES
    )
    first, stride = work[4], work[5]

    o_k = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    b_norm = gl.load(norm_weight + o_v)
    following = first // UNITS
    source, target = gl.load(slot_in + following), gl.load(slot_out + following)
    wait_for_inputs()
    launch_dependents()  # the output projection, which begins with its weights
    number = 0
    for unit in range(first, num_units, stride):
        i_n, i_first = (unit // UNITS).to(gl.int64), unit % UNITS * EACH
        i_h = i_first // GROUP
        p_token = projected + i_n * projected_stride
        # Everything is asked for before anything is used.
        inputs = p_token, conv_weight, conv_pool + source.to(gl.int64) * conv_stride
        window_q = load_window(inputs, i_h, SIZE, TAPS)
        window_k = load_window(inputs, KEY_HEADS + i_h, SIZE, TAPS)
        members = ()
        for i_m in gl.static_range(EACH):
            i_hv = i_first + i_m
            window_v = load_window(inputs, 2 * KEY_HEADS + i_hv, SIZE, TAPS)
            b_gate = gl.load(p_token + CHANNELS + i_hv * SIZE + o_v)
            p_gates = p_token + CHANNELS + VALUE_HEADS * SIZE + i_hv
            b_in, a_in = gl.load(p_gates), gl.load(p_gates + VALUE_HEADS)
            rate, bias = gl.load(decay_rate + i_hv), gl.load(decay_bias + i_hv)
            members += ((window_v, b_gate, b_in, a_in, rate, bias),)
        is_real = target >= 0
        p_conv = conv_pool + target.to(gl.int64) * conv_stride
        p_state = pool + target.to(gl.int64) * slot_stride
        following = gl.minimum(unit + stride, num_units - 1) // UNITS
        source, target = gl.load(slot_in + following), gl.load(slot_out + following)

        b_q, b_k = convolve(*window_q, TAPS), convolve(*window_k, TAPS)
        b_q, b_k = unit_vectors(b_q, b_k, SIZE)
        b_q, b_k = by_row(b_q), by_row(b_k)
        if EACH == GROUP:
            keep_window(window_q[0], p_conv, i_h, is_real, SIZE, TAPS)
            keep_window(window_k[0], p_conv, KEY_HEADS + i_h, is_real, SIZE, TAPS)
        else:
            # All threads have both windows: unit vectors are made of them.
            p_arrivals = arrivals + i_n * KEY_HEADS + i_h
            arrived = gl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu")
        for i_m in gl.static_range(EACH):
            window_v, b_gate, b_in, a_in, rate, bias = members[i_m]
            i_hv = i_first + i_m
            b_v = gl.convert_layout(convolve(*window_v, TAPS), gl.SliceLayout(0, STATE))
            keep_window(window_v[0], p_conv, 2 * KEY_HEADS + i_hv, is_real, SIZE, TAPS)
            own = b_k, b_v, sigmoid(b_in) * MAX_BETA, decay_of(a_in, rate, bias)
            own_target = p_state, i_hv, o_k, o_v, is_real
            b_state = pass_token(work, number, own, own_target, UNITS, EACH)
            b_o = read_rows(b_state, b_q)
            number += 1
            b_o *= rms_scale(b_o, norm_eps, SIZE) * b_norm
            b_o = gl.where(is_real, times_silu(b_o, b_gate), 0.0)
            b_o = b_o.to(output.dtype.element_ty)
            at = (i_n * VALUE_HEADS + i_hv) * SIZE + o_v
            gl.store(output + at, b_o)
            if values is not None:
                b_rounded, scale = round_block(b_o.to(gl.float32), 0)
                gl.store(values + at, b_rounded)
                gl.store(scales + i_hv * scales_stride + i_n, scale)
        if EACH < GROUP:
            is_last = arrived == GROUP // EACH - 1
            gl.store(p_arrivals, 0, mask=is_last)
            keep_window(window_q[0], p_conv, i_h, is_real & is_last, SIZE, TAPS)
            keep_window(window_k[0], p_conv, KEY_HEADS + i_h, is_real & is_last, SIZE, TAPS)
