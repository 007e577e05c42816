"""`triton_decode` on Hopper, as Gated DeltaNet's in Gluon: a head's whole state in each program,
which TMA brings to shared memory while the program works on the one before.

Legend: D sequences, C channels, J taps, H heads, K head_dim.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.device import num_sms
from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.overlap import OVERLAPPED
from milepost.kernels.overlap_gluon import let_next_start, wait_for_inputs
from milepost.kernels.states_gluon import (
    STATE,
    STATE_SIZE,
    begin_work,
    by_row,
    convolve,
    describe_states,
    keep_window,
    load_window,
    pass_token,
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
        BLOCK_TAPS=triton.next_power_of_2(conv_width),
        num_warps=4,
        **OVERLAPPED,
    )
    return output


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
    BLOCK_TAPS: gl.constexpr,
):
    """Every so many units, each a head of a sequence."""
    WINDOW: gl.constexpr = gl.BlockedLayout([1, BLOCK_TAPS], [32, 1], [4, 1], [1, 0])
    work = begin_work(states, slot_stride, slot_in, slot_out, num_units, [SIZE, SIZE], HEADS, 1, 1)
    first, stride = work[4], work[5]

    row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    channel = gl.arange(0, SIZE, layout=gl.SliceLayout(1, WINDOW))
    scale = gl.load(norm_weight + column)
    following = first // HEADS
    source, target = gl.load(slot_in + following), gl.load(slot_out + following)
    wait_for_inputs()
    let_next_start()  # the output projection, which begins with its weights
    for unit in range(first, num_units, stride):
        number = (unit - first) // stride
        sequence, head = (unit // HEADS).to(gl.int64), unit % HEADS
        token = projected + sequence * projected_stride
        first_own = sequence * (HEADS * SIZE) + head * SIZE
        # Everything is asked for before anything is used.
        inputs = token, conv_weight, conv_pool + source.to(gl.int64) * conv_stride
        query_window = load_window(inputs, head, SIZE, TAPS, WINDOW)
        key_window = load_window(inputs, HEADS + head, SIZE, TAPS, WINDOW)
        value_window = load_window(inputs, 2 * HEADS + head, SIZE, TAPS, WINDOW)
        wide = gl.load(decay_inputs + first_own + channel).to(gl.float32)
        wide += gl.load(decay_bias + head * SIZE + channel)
        rate = gl.load(decay_rate + head)
        own_gate = gl.load(gate + first_own + column)
        strength = gl.load(token + 3 * HEADS * SIZE + head)
        is_real = target >= 0
        kept = conv_pool + target.to(gl.int64) * conv_stride
        written = pool + target.to(gl.int64) * slot_stride
        following = gl.minimum(unit + stride, num_units - 1) // HEADS
        source, target = gl.load(slot_in + following), gl.load(slot_out + following)

        query, key = unit_vectors(convolve(query_window), convolve(key_window), SIZE)
        decay = gl.exp(rate * softplus(wide))
        query, key, decay = by_row(query), by_row(key), by_row(decay)
        value = gl.convert_layout(convolve(value_window), gl.SliceLayout(0, STATE))
        keep_window(query_window, kept, head, is_real, SIZE, TAPS, WINDOW)
        keep_window(key_window, kept, HEADS + head, is_real, SIZE, TAPS, WINDOW)
        keep_window(value_window, kept, 2 * HEADS + head, is_real, SIZE, TAPS, WINDOW)
        beta = sigmoid(strength)

        own = query, key, value, beta, decay
        x = pass_token(work, number, own, (written, head, row, column, is_real), HEADS, 1)
        x *= rms_scale(x, norm_eps, SIZE) * scale
        x = gl.where(is_real, x / (1 + gl.exp(-own_gate.to(gl.float32))), 0.0)
        gl.store(output + first_own + column, x.to(output.dtype.element_ty))
