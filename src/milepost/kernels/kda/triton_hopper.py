"""Decode steps on Hopper, as Gated DeltaNet's in Gluon: a head's whole state in each program,
which TMA brings to shared memory while the program works on the one before.

Legend: D sequences, C channels, J taps, H heads, K head_dim.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.gluon import launch_dependents, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.recurrent.hopper.states import (
    CHANNEL,
    STATE,
    STATE_SIZE,
    begin_work,
    by_row,
    convolve,
    describe_states,
    keep_window,
    load_window,
    pass_token,
    read_rows,
    rms_scale,
    sigmoid,
    softplus,
    unit_vectors,
)


def decode(
    projected: Tensor,
    decay_inputs: Tensor,
    gate: Tensor,
    weights: KDAWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
) -> Tensor:
    """See `kda.mix`."""
    num_sequences, heads = len(slot_out), recurrent_pool.shape[1]
    conv_width = weights.conv.shape[1]
    output = projected.new_empty(num_sequences, heads * STATE_SIZE)
    num_units = num_sequences * heads
    units_at_once = num_sms(projected.device)
    _decode_kernel[(min(num_units, 2 * units_at_once),)](
        projected,
        projected.stride(0),
        decay_inputs,
        gate,
        weights.conv,
        conv_pool,
        conv_pool.stride(0),
        weights.decay_rate,
        weights.decay_bias,
        weights.norm,
        weights.norm_eps,
        describe_states(recurrent_pool),
        recurrent_pool,
        recurrent_pool.stride(0),
        slot_in,
        slot_out,
        output,
        num_units,
        HEADS=heads,
        SIZE=STATE_SIZE,
        TAPS=conv_width,
        num_warps=4,
        **OVERLAPPED,
    )
    return output


@quick
@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=["slot_in", "slot_out"])
def _decode_kernel(
    projected,
    projected_stride,
    decay_inputs,
    gate,
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
    HEADS: gl.constexpr,
    SIZE: gl.constexpr,
    TAPS: gl.constexpr,
):
    """Every so many units, each a head of a sequence."""
    work = begin_work(states, slot_stride, slot_in, slot_out, num_units, [SIZE, SIZE], HEADS, 1, 1)
    first, stride = work[4], work[5]

    o_k = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    o_c = gl.arange(0, SIZE, layout=CHANNEL)
    b_norm = gl.load(norm_weight + o_v)
    following = first // HEADS
    source, target = gl.load(slot_in + following), gl.load(slot_out + following)
    wait_for_inputs()
    launch_dependents()  # the output projection, which begins with its weights
    for unit in range(first, num_units, stride):
        number = (unit - first) // stride
        i_n, i_h = (unit // HEADS).to(gl.int64), unit % HEADS
        p_token = projected + i_n * projected_stride
        o_own = i_n * (HEADS * SIZE) + i_h * SIZE
        # Everything is asked for before anything is used.
        inputs = p_token, conv_weight, conv_pool + source.to(gl.int64) * conv_stride
        window_q = load_window(inputs, i_h, SIZE, TAPS)
        window_k = load_window(inputs, HEADS + i_h, SIZE, TAPS)
        window_v = load_window(inputs, 2 * HEADS + i_h, SIZE, TAPS)
        b_wide = gl.load(decay_inputs + o_own + o_c).to(gl.float32)
        b_wide += gl.load(decay_bias + i_h * SIZE + o_c)
        rate = gl.load(decay_rate + i_h)
        b_gate = gl.load(gate + o_own + o_v)
        b_in = gl.load(p_token + 3 * HEADS * SIZE + i_h)
        is_real = target >= 0
        p_conv = conv_pool + target.to(gl.int64) * conv_stride
        p_state = pool + target.to(gl.int64) * slot_stride
        following = gl.minimum(unit + stride, num_units - 1) // HEADS
        source, target = gl.load(slot_in + following), gl.load(slot_out + following)

        b_q, b_k = convolve(*window_q, TAPS), convolve(*window_k, TAPS)
        b_q, b_k = unit_vectors(b_q, b_k, SIZE)
        b_decay = gl.exp(rate * softplus(b_wide))
        b_k, b_decay = by_row(b_k), by_row(b_decay)
        b_v = gl.convert_layout(convolve(*window_v, TAPS), gl.SliceLayout(0, STATE))
        keep_window(window_q[0], p_conv, i_h, is_real, SIZE, TAPS)
        keep_window(window_k[0], p_conv, HEADS + i_h, is_real, SIZE, TAPS)
        keep_window(window_v[0], p_conv, 2 * HEADS + i_h, is_real, SIZE, TAPS)
        b_beta = sigmoid(b_in)

        own = b_k, b_v, b_beta, b_decay
        own_target = p_state, i_h, o_k, o_v, is_real
        b_state = pass_token(work, number, own, own_target, HEADS, 1)
        # Only now by row: beside a state, its key and its decay a thread has no registers left.
        b_o = read_rows(b_state, by_row(b_q))
        b_o *= rms_scale(b_o, norm_eps, SIZE) * b_norm
        b_o = gl.where(is_real, b_o / (1 + gl.exp(-b_gate.to(gl.float32))), 0.0)
        gl.store(output + o_own + o_v, b_o.to(output.dtype.element_ty))
