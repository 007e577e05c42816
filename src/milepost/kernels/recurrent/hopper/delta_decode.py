"""Decoding steps of Gated DeltaNet and KDA on Hopper in one launch, in Gluon.

Programs go through sequences and units: a key head with its value heads. While one works on a value
head's state in registers, TMA brings the next to shared memory. It begins before the input
projection has ended: the states were written in an earlier step. A key head's query and key are
worked out once for all its value heads, and by one program, which alone reads and writes their
convolution states.

With many units, two programs share an SM and have one place for a state each, so that one computes
while the other waits. With fewer, a program has two places and fetches both states at once. If each
value head can have an SM, it has a program. Each program of a key head then computes the query and
key itself, and the last one to arrive advances their convolution states, which all have read by
then.

KDA's heads are units of one value head with a decay for each channel of a key.

Legend: S sequences, T tokens, J taps, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.recurrent.hopper.states import (
    BY_LINE,
    CHANNEL,
    STATE,
    StepForm,
    Window,
    begin_work,
    by_row,
    convolve,
    decays_of,
    delta_rule,
    keep_window,
    load_window,
    norm_and_gate,
    operands,
    read_rows,
    sigmoid,
    take,
    unit_vectors,
)
from milepost.kernels.recurrent.structures import DecodingSteps, Mixer


def run(
    mixer: Mixer,
    steps: DecodingSteps,
    output: Tensor,
    arrivals: Tensor | None = None,
) -> None:
    """Advances each sequence by one token. Writes `output` [S, V * W], zeros for padding.

    With `arrivals` [S, G] int32, zeros before and after, each value head has a program of its own.
    """
    sizes = mixer.sizes
    each = sizes.group if arrivals is None else 1
    num_units = len(output) * sizes.heads // each
    units_at_once = num_sms(output.device)
    stages = 2 if each > 1 and num_units <= units_at_once else 1
    outputs = arrivals if each < sizes.group else None, output
    form = StepForm(sizes, each, stages)
    _decode_kernel[(min(num_units, 2 * units_at_once),)](
        *operands(mixer, steps), *outputs, num_units, FORM=form, num_warps=4, **OVERLAPPED
    )


@quick
@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=["steps"])
def _decode_kernel(inputs, weights, steps, lines, arrivals, output, num_units, FORM: gl.constexpr):
    """Loops over units: EACH value heads (all or one) of a key head of a sequence."""
    SIZES: gl.constexpr = FORM.sizes
    SIZE: gl.constexpr = SIZES.shared
    TAPS: gl.constexpr = SIZES.taps
    KEY_HEADS: gl.constexpr = SIZES.units
    GROUP: gl.constexpr = SIZES.group
    EACH: gl.constexpr = FORM.each
    UNITS: gl.constexpr = FORM.units
    conv, states, sequences = steps.conv, steps.recurrent, steps.sequences
    work = begin_work(lines, steps, num_units, FORM)

    o_k = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    b_norm = gl.load(weights.norm + o_v)
    following = work.first // UNITS
    source = gl.load(sequences.slot_in + following)
    target = gl.load(sequences.slot_out + following)
    wait_for_inputs()
    launch_dependents()  # the output projection, which begins with its weights
    number = 0
    for unit in range(work.first, num_units, work.stride):
        i_n, i_first = (unit // UNITS).to(gl.int64), unit % UNITS * EACH
        i_h = i_first // GROUP
        p_token = inputs.mixed.base + i_n * inputs.mixed.stride
        # All loads are issued before any is used.
        args = p_token, weights.conv, conv.base + source.to(gl.int64) * conv.stride
        window_q = load_window(*args, i_h, SIZE, TAPS)
        window_k = load_window(*args, KEY_HEADS + i_h, SIZE, TAPS)
        heads = ()
        for i_m in gl.static_range(EACH):
            i_hv = i_first + i_m
            window_v = load_window(*args, 2 * KEY_HEADS + i_hv, SIZE, TAPS)
            heads += (_load_head(window_v, inputs, weights, i_n, i_hv, SIZES),)
        is_real = target >= 0
        p_conv = conv.base + target.to(gl.int64) * conv.stride
        p_state = states.base + target.to(gl.int64) * states.stride
        following = gl.minimum(unit + work.stride, num_units - 1) // UNITS
        source = gl.load(sequences.slot_in + following)
        target = gl.load(sequences.slot_out + following)

        b_q, b_k = unit_vectors(convolve(window_q, TAPS), convolve(window_k, TAPS), SIZE)
        b_k = by_row(b_k)
        if EACH == GROUP:
            keep_window(window_q, p_conv, i_h, is_real, SIZE, TAPS)
            keep_window(window_k, p_conv, KEY_HEADS + i_h, is_real, SIZE, TAPS)
        else:
            # All threads have both windows by now: the unit vectors depend on them.
            p_arrivals = arrivals + i_n * KEY_HEADS + i_h
            arrived = gl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu")
        for i_m in gl.static_range(EACH):
            head, i_hv = ValueHead(*heads[i_m]), i_first + i_m  # adding tuples loses field names
            window_v = Window(*head.window)
            b_v = gl.convert_layout(convolve(window_v, TAPS), gl.SliceLayout(0, STATE))
            keep_window(window_v, p_conv, 2 * KEY_HEADS + i_hv, is_real, SIZE, TAPS)
            b_state = take(work, number, STATE, BY_LINE, FORM, _decay_of(head, SIZES))
            b_state = delta_rule(b_state, b_k, b_v, sigmoid(head.beta) * SIZES.max_beta)
            o_state = i_hv * (SIZE * SIZE) + o_k[:, None] * SIZE + o_v[None, :]
            gl.store(p_state + o_state, b_state, mask=is_real)
            number += 1
            # Converted only now: a thread has no registers for it beside a state, its key and its
            # decay.
            b_o = read_rows(b_state, by_row(b_q))
            b_o = norm_and_gate(b_o, b_norm, weights.norm_eps, head.gate, SIZE, SIZES.by_channel)
            b_o = gl.where(is_real, b_o, 0.0).to(output.dtype.element_ty)
            gl.store(output + (i_n * SIZES.heads + i_hv) * SIZE + o_v, b_o)
        if EACH < GROUP:
            is_last = arrived == GROUP // EACH - 1
            gl.store(p_arrivals, 0, mask=is_last)
            keep_window(window_q, p_conv, i_h, is_real & is_last, SIZE, TAPS)
            keep_window(window_k, p_conv, KEY_HEADS + i_h, is_real & is_last, SIZE, TAPS)


class ValueHead(NamedTuple):
    """A token's inputs of a value head, as loaded."""

    window: Window
    gate: Any
    beta: Any
    decay: Any
    """One number, or [K]."""
    rate: Any
    bias: Any


@gluon.jit
def _load_head(window, inputs, weights, token, head, SIZES: gl.constexpr):
    """Returns a token's `ValueHead`."""
    SIZE: gl.constexpr = SIZES.own
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    gate = gl.load(inputs.gate.base + token * inputs.gate.stride + head * SIZE + o_v)
    beta = gl.load(inputs.strengths.base + token * inputs.strengths.stride + head)
    column = head * SIZE + gl.arange(0, SIZE, layout=CHANNEL) if SIZES.by_channel else head
    decay = gl.load(inputs.decays.base + token * inputs.decays.stride + column)
    rate, bias = gl.load(weights.decay_rate + head), gl.load(weights.decay_bias + column)
    return ValueHead(window, gate, beta, decay, rate, bias)


@gluon.jit
def _decay_of(head, SIZES: gl.constexpr):
    """Returns the decay of a head's state: one number, or one per row [K, 1]."""
    wide = head.decay.to(gl.float32) + head.bias
    b_decay = decays_of(wide, head.rate, SIZES.least_decay)
    if SIZES.by_channel:
        b_decay = by_row(b_decay)
    return b_decay
