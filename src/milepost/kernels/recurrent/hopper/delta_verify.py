"""Verifying steps of Gated DeltaNet and KDA on Hopper in one launch, in Gluon.

As in `delta_decode`, programs loop over sequences and units, and while one works on a value head's
state, TMA brings the next. The convolved queries and keys of all tokens are computed once for all
value heads of a key head and kept in shared memory, as are a value head's values. Its state then
passes all tokens in registers. A token takes the operations of `delta_decode` in their order, so
states and outputs are the same bit for bit.

KDA's heads are units of one value head with a decay for each channel of a key: all inputs of a unit
are loaded before any is used, and decays are kept beside the keys.

Legend: S sequences, F folded and N new tokens of each, J taps, G key heads, V value heads, K
key_dim, W value_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.gluon import thread_barrier
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.recurrent.hopper.states import (
    BY_LINE,
    CHANNEL,
    MOST_AT_ONCE,
    STATE,
    StepForm,
    Window,
    begin_work,
    convolve,
    decays_of,
    delta_rule,
    load_taps,
    norm_and_gate,
    operands,
    read_rows,
    sigmoid,
    take,
    unit_vectors,
)
from milepost.kernels.recurrent.hopper.stream import (
    ROWS,
    TokenStream,
    keep_all,
    keep_rows,
    leave_column,
    leave_inputs,
    leave_places,
    load_inputs,
    load_places,
    load_rows,
    open_stream,
    row_of,
)
from milepost.kernels.recurrent.structures import DecodingSteps, Mixer


def run(mixer: Mixer, steps: DecodingSteps, output: Tensor) -> None:
    """Folds recorded drafts into the states, advances each sequence by one token and goes on
    through its drafts. Writes `output` [T, V * W] of the decoding sequences."""
    sizes = mixer.sizes
    num_units = len(steps.sequences.slot_out) * sizes.units
    units_at_once = num_sms(output.device)
    stages = 2 if num_units <= units_at_once and not sizes.by_channel else 1
    places = steps.num_places
    form = StepForm(sizes, sizes.group, stages, places, min(places, MOST_AT_ONCE))
    options = {"FORM": form, "num_warps": 4, **OVERLAPPED}
    grid = (min(num_units, 2 * units_at_once),)
    _verify_kernel[grid](*operands(mixer, steps), output, num_units, **options)


class UnitTokens(NamedTuple):
    """A unit's tokens: sources of their inputs, destinations, and shared memory for their
    vectors."""

    stream: TokenStream
    """Inputs of the convolution."""
    betas: TokenStream
    decays: TokenStream
    conv: Any
    """The convolution's state."""
    kept_conv: Any
    """Destination of the convolution's state."""
    weights: Any
    rows: Any
    """In shared memory [2 or 3 times PLACES, K]: queries, keys, decays of channels."""
    columns: Any
    """In shared memory [PLACES, W]: values."""


class VerifiedHead(NamedTuple):
    """A value head's small weights, and pointers to its gates, outputs and state."""

    index: Any
    rate: Any
    bias: Any
    norm: Any
    gate: Any
    gate_stride: Any
    output: Any
    state: Any


@quick
@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=["steps"])
def _verify_kernel(inputs, weights, steps, lines, output, num_units, FORM: gl.constexpr):
    """Loops over units: the value heads of a key head of a sequence."""
    SIZES: gl.constexpr = FORM.sizes
    SIZE: gl.constexpr = SIZES.shared
    KEY_HEADS: gl.constexpr = SIZES.units
    GROUP: gl.constexpr = SIZES.group
    PLACES: gl.constexpr = FORM.places
    conv, states, sequences = steps.conv, steps.recurrent, steps.sequences
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    NUM_ROWS: gl.constexpr = (2 + SIZES.by_channel) * PLACES
    rows = gl.allocate_shared_memory(gl.float32, [NUM_ROWS, SIZE // 4, 4], ROWS)
    columns = gl.allocate_shared_memory(gl.float32, [PLACES, SIZE], VECTOR)
    work = begin_work(lines, steps, num_units, FORM)
    o_c = gl.arange(0, SIZE, layout=CHANNEL)
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    b_norm = gl.load(weights.norm + o_v)
    wait_for_inputs()
    launch_dependents()  # the output projection, which begins with its weights
    number = 0
    for unit in range(work.first, num_units, work.stride):
        sequence, key_head = unit // KEY_HEADS, unit % KEY_HEADS
        stream, first_token, target = open_stream(inputs.mixed, steps.records, sequences, sequence)
        betas = _other_columns(stream, inputs.strengths, first_token)
        decays = _other_columns(stream, inputs.decays, first_token)
        read = conv.base + gl.load(sequences.slot_in + sequence).to(gl.int64) * conv.stride
        kept = conv.base + target.to(gl.int64) * conv.stride
        own = UnitTokens(stream, betas, decays, read, kept, weights, rows, columns)
        p_gate = inputs.gate.base + first_token * inputs.gate.stride
        keep_all(_keep_keys, own, key_head * SIZE + o_c, FORM)
        for member in gl.static_range(GROUP):
            i_hv = key_head * GROUP + member
            rate = gl.load(weights.decay_rate + i_hv)
            bias = rate if SIZES.by_channel else gl.load(weights.decay_bias + i_hv)
            if not SIZES.by_channel:
                keep_all(_keep_values, own, (2 * KEY_HEADS + i_hv) * SIZE + o_c, FORM)
            state = take(work, number, STATE, BY_LINE, FORM)
            number += 1
            p_head = p_gate + i_hv * SIZE + o_v, inputs.gate.stride
            p_output = output + (first_token * SIZES.heads + i_hv) * SIZE + o_v
            p_state = states.base + target.to(gl.int64) * states.stride + i_hv * (SIZE * SIZE)
            head = VerifiedHead(i_hv, rate, bias, b_norm, *p_head, p_output, p_state)
            _pass_tokens(state, own, head, FORM)
            # All threads have read the records before any overwrites them.
            thread_barrier()
            leave_column(betas, i_hv, o_c)
            if not SIZES.by_channel:
                leave_column(decays, i_hv, o_c)


@gluon.jit
def _other_columns(stream, rows, first_token):
    """Returns the `TokenStream` of other columns of the same tokens."""
    new = rows.base + first_token * rows.stride
    folded = stream.folded + rows.recorded
    return TokenStream(
        new, rows.stride, folded, stream.folded_stride, stream.num_folded, stream.num_places
    )


@gluon.jit
def _keep_values(own, channel, begin, IS_FIRST: gl.constexpr, FORM: gl.constexpr):
    """Writes some tokens' values of a head to shared memory, and their inputs to states and
    records."""
    STEP: gl.constexpr = FORM.at_once
    TAPS: gl.constexpr = FORM.sizes.taps
    values = load_inputs(own.stream, own.conv, channel, begin, IS_FIRST, TAPS, STEP)
    window = Window(values, load_taps(own.weights.conv, channel, TAPS))
    for ahead in gl.static_range(STEP):
        if begin + ahead < own.stream.num_places:
            own.columns.index(begin + ahead).store(convolve(window, TAPS, ahead))
    leave_inputs(values, own.stream, own.kept_conv, channel, begin, TAPS, STEP)


@gluon.jit
def _keep_keys(own, channel, begin, IS_FIRST: gl.constexpr, FORM: gl.constexpr):
    """Writes some tokens' queries and keys of a key head to shared memory, for KDA values and
    decays too, and their inputs to states and records."""
    SIZES: gl.constexpr = FORM.sizes
    PLACES: gl.constexpr = FORM.places
    STEP: gl.constexpr = FORM.at_once
    SIZE: gl.constexpr = SIZES.shared
    TAPS: gl.constexpr = SIZES.taps
    WIDTH: gl.constexpr = SIZES.units * SIZE
    stream, weights = own.stream, own.weights
    queries = load_inputs(stream, own.conv, channel, begin, IS_FIRST, TAPS, STEP)
    keys = load_inputs(stream, own.conv, WIDTH + channel, begin, IS_FIRST, TAPS, STEP)
    if SIZES.by_channel:
        values = load_inputs(stream, own.conv, 2 * WIDTH + channel, begin, IS_FIRST, TAPS, STEP)
        wide = load_places(own.decays, channel, begin, STEP)
        value_taps = load_taps(weights.conv, 2 * WIDTH + channel, TAPS)
        rate = gl.load(weights.decay_rate + channel // SIZE)
        bias = gl.load(weights.decay_bias + channel)
    query_window = Window(queries, load_taps(weights.conv, channel, TAPS))
    key_window = Window(keys, load_taps(weights.conv, WIDTH + channel, TAPS))
    for ahead in gl.static_range(STEP):
        place = begin + ahead
        if place < stream.num_places:
            query = convolve(query_window, TAPS, ahead)
            query, key = unit_vectors(query, convolve(key_window, TAPS, ahead), SIZE)
            if SIZES.by_channel:
                value = convolve(Window(values, value_taps), TAPS, ahead)
                inputs = wide[ahead].to(gl.float32) + bias
                decay = decays_of(inputs, rate, SIZES.least_decay)
                keep_rows(own.rows.index(2 * PLACES + place), decay)
                own.columns.index(place).store(value)
            keep_rows(own.rows.index(place), query)
            keep_rows(own.rows.index(PLACES + place), key)
    leave_inputs(queries, stream, own.kept_conv, channel, begin, TAPS, STEP)
    leave_inputs(keys, stream, own.kept_conv, WIDTH + channel, begin, TAPS, STEP)
    if SIZES.by_channel:
        leave_inputs(values, stream, own.kept_conv, 2 * WIDTH + channel, begin, TAPS, STEP)
        leave_places(wide, own.decays, channel, begin, STEP)


@gluon.jit
def _pass_tokens(state, own, head, FORM: gl.constexpr):
    """Advances a value head's state through all tokens. Stores it after the last committed token,
    and outputs for each new one."""
    SIZES: gl.constexpr = FORM.sizes
    SIZE: gl.constexpr = SIZES.shared
    PLACES: gl.constexpr = FORM.places
    betas, decays = own.betas, own.decays
    last = gl.minimum(betas.num_folded, betas.num_places - 1)
    o_k = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    has_any = betas.num_places > 0
    b_in = gl.load(row_of(betas, 0) + head.index, mask=has_any, other=0.0)
    a_in = b_in
    if not SIZES.by_channel:
        a_in = gl.load(row_of(decays, 0) + head.index, mask=has_any, other=0.0)
    for place in range(betas.num_places):
        new, is_new = place - betas.num_folded, place >= betas.num_folded
        gate = gl.load(head.gate + new * head.gate_stride, mask=is_new, other=0.0)
        beta = sigmoid(b_in) * SIZES.max_beta
        if SIZES.by_channel:
            decay = load_rows(own.rows.index(2 * PLACES + place))
        else:
            decay = decays_of(a_in.to(gl.float32) + head.bias, head.rate, 0.0)
        following = gl.minimum(place + 1, betas.num_places - 1)
        b_in = gl.load(row_of(betas, following) + head.index)
        if not SIZES.by_channel:
            a_in = gl.load(row_of(decays, following) + head.index)
        key = load_rows(own.rows.index(PLACES + place))
        value = own.columns.index(place).load(gl.SliceLayout(0, STATE))
        state = delta_rule(state * decay, key, value, beta)
        if place == last:
            gl.store(head.state + o_k[:, None] * SIZE + o_v[None, :], state)
        if is_new:
            x = read_rows(state, load_rows(own.rows.index(place)))
            x = norm_and_gate(x, head.norm, own.weights.norm_eps, gate, SIZE, SIZES.by_channel)
            gl.store(head.output + new * SIZES.width, x.to(head.output.dtype.element_ty))
