"""Verifying steps of Gated DeltaNet and KDA on Hopper in one launch, in Gluon.

As in `delta_decode`, programs go through sequences and units, and while one works on a value head's
state, TMA brings the next. A key head's queries and keys are worked out once, for all tokens and
all its value heads, and a value head's values; they wait in shared memory. Its state then goes
through all tokens in registers. What happens with a token is what `delta_decode` does, in its
order: states and outputs are the same bit for bit.

KDA's heads are units of one value head with a decay for each channel of a key (BY_CHANNEL): all of
a unit's inputs are asked for before anything is used, and decays wait beside the keys.

Legend: S sequences, F folded and N new tokens of each, J taps, G key heads, V value heads, K
key_dim, W value_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.gluon import launch_dependents, thread_barrier, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.recurrent.hopper.states import (
    BY_LINE,
    CHANNEL,
    STATE,
    Window,
    begin_work,
    convolve,
    delta_rule,
    describe_states,
    load_taps,
    norm_and_gate,
    read_rows,
    sigmoid,
    softplus,
    take,
    unit_vectors,
)
from milepost.kernels.recurrent.hopper.stream import (
    ROWS,
    TokenStream,
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
    """Fold recorded drafts, advance by one token, continue through drafts; writes `output` [T, V *
    W] of the decoding sequences."""
    sizes, num_sequences = mixer.sizes, len(steps.sequences.slot_out)
    num_units, units_at_once = num_sequences * sizes.units, num_sms(output.device)
    by_channel = sizes.decays > sizes.heads
    _verify_kernel[(min(num_units, 2 * units_at_once),)](
        mixer.inputs,
        mixer.weights,
        steps.conv,
        describe_states(steps.recurrent.base),
        steps.recurrent,
        steps.sequences,
        steps.records,
        output,
        num_units,
        SIZES=sizes,
        BY_CHANNEL=by_channel,
        MAX_BETA=mixer.weights.max_beta,
        PLACES=steps.num_places,
        STAGES=2 if num_units <= units_at_once and not by_channel else 1,
        num_warps=4,
        **OVERLAPPED,
    )


class Convolution(NamedTuple):
    """Where a sequence's convolution is read and written."""

    read: Any
    kept: Any
    weight: Any


class TokenVectors(NamedTuple):
    """Vectors of a value head's tokens, in shared memory."""

    rows: Any
    """[2 or 3 times PLACES, K]: queries, keys, decays of channels."""
    columns: Any
    """[PLACES, W]: values."""


class HeadWeights(NamedTuple):
    """Small weights of a value head."""

    rate: Any
    bias: Any
    norm: Any
    norm_eps: Any


class HeadRows(NamedTuple):
    """Where a value head's new tokens are read and written."""

    gate: Any
    gate_stride: Any
    output: Any
    state: Any


@quick
@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=["sequences"])
def _verify_kernel(
    inputs,
    weights,
    conv,
    lines,
    states,
    sequences,
    records,
    output,
    num_units,
    SIZES: gl.constexpr,
    BY_CHANNEL: gl.constexpr,
    MAX_BETA: gl.constexpr,
    PLACES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A unit after the other, each the value heads of a key head of a sequence."""
    SIZE: gl.constexpr = SIZES.shared
    KEY_HEADS: gl.constexpr = SIZES.units
    GROUP: gl.constexpr = SIZES.group
    SHAPE: gl.constexpr = [SIZE, SIZE]
    VALUE_HEADS: gl.constexpr = KEY_HEADS * GROUP
    WIDTH: gl.constexpr = VALUE_HEADS * SIZE
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    NUM_ROWS: gl.constexpr = (2 + BY_CHANNEL) * PLACES
    rows = gl.allocate_shared_memory(gl.float32, [NUM_ROWS, SIZE // 4, 4], ROWS)
    columns = gl.allocate_shared_memory(gl.float32, [PLACES, SIZE], VECTOR)
    vectors = TokenVectors(rows, columns)
    work = begin_work(lines, states.stride, sequences, num_units, SHAPE, KEY_HEADS, GROUP, STAGES)
    o_c = gl.arange(0, SIZE, layout=CHANNEL)
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    b_norm = gl.load(weights.norm + o_v)
    wait_for_inputs()
    launch_dependents()  # the output projection, which begins with its weights
    number = 0
    for unit in range(work.first, num_units, work.stride):
        sequence, key_head = unit // KEY_HEADS, unit % KEY_HEADS
        stream, first_token, target = open_stream(inputs.mixed, records, sequences, sequence)
        betas = _beside(stream, inputs.strengths, first_token)
        decays = _beside(stream, inputs.decays, first_token)
        read = conv.base + gl.load(sequences.slot_in + sequence).to(gl.int64) * conv.stride
        small = Convolution(read, conv.base + target.to(gl.int64) * conv.stride, weights.conv)
        p_gate = inputs.gate.base + first_token * inputs.gate.stride
        o_key = key_head * SIZE + o_c
        keys = stream, decays, small, weights, o_key, vectors
        _keep_places(*keys, SIZES, BY_CHANNEL, PLACES, True)
        for member in gl.static_range(GROUP):
            head = key_head * GROUP + member
            rate = gl.load(weights.decay_rate + head)
            bias = rate if BY_CHANNEL else gl.load(weights.decay_bias + head)
            if not BY_CHANNEL:
                o_value = (2 * KEY_HEADS + head) * SIZE + o_c
                own = stream, decays, small, weights, o_value, vectors
                _keep_places(*own, SIZES, BY_CHANNEL, PLACES, False)
            state = take(work, number, STATE, BY_LINE, SHAPE, KEY_HEADS, GROUP)
            number += 1
            own_weights = HeadWeights(rate, bias, b_norm, weights.norm_eps)
            at = HeadRows(
                p_gate + head * SIZE + o_v,
                inputs.gate.stride,
                output + (first_token * VALUE_HEADS + head) * SIZE + o_v,
                states.base + target.to(gl.int64) * states.stride + head * (SIZE * SIZE),
            )
            small_rows = betas, decays, head
            _pass_tokens(
                state, vectors, small_rows, own_weights, at,
                SIZE, WIDTH, BY_CHANNEL, MAX_BETA, PLACES,
            )  # fmt: skip
            # All threads have read what these columns had recorded.
            thread_barrier()
            leave_column(betas, head, o_c)
            if not BY_CHANNEL:
                leave_column(decays, head, o_c)


@gluon.jit
def _beside(stream, rows, first_token):
    """The `TokenStream` of other columns of the same tokens."""
    new = rows.base + first_token * rows.stride
    folded = stream.folded + rows.recorded
    return TokenStream(
        new, rows.stride, folded, stream.folded_stride, stream.num_folded, stream.num_places
    )


@gluon.jit
def _keep_places(
    stream,
    decays,
    small,
    weights,
    channel,
    vectors,
    SIZES: gl.constexpr,
    BY_CHANNEL: gl.constexpr,
    PLACES: gl.constexpr,
    ARE_KEYS: gl.constexpr,
):
    """Vectors of all tokens in shared memory, some at a time: a unit's, or a head's values."""
    STEP: gl.constexpr = min(PLACES, 8)  # tokens whose inputs a thread holds at a time
    args = stream, decays, small, weights, channel, vectors
    if ARE_KEYS:
        _keep_keys(*args, 0, True, SIZES, BY_CHANNEL, PLACES, STEP)
    else:
        _keep_values(stream, small, channel, vectors, 0, True, SIZES.taps, STEP)
    if PLACES > STEP:
        for begin in range(STEP, stream.num_places, STEP):
            if ARE_KEYS:
                _keep_keys(*args, begin, False, SIZES, BY_CHANNEL, PLACES, STEP)
            else:
                _keep_values(stream, small, channel, vectors, begin, False, SIZES.taps, STEP)


@gluon.jit
def _keep_keys(
    stream,
    decays,
    small,
    weights,
    channel,
    vectors,
    begin,
    IS_FIRST: gl.constexpr,
    SIZES: gl.constexpr,
    BY_CHANNEL: gl.constexpr,
    PLACES: gl.constexpr,
    STEP: gl.constexpr,
):
    """A key head's queries and keys of STEP tokens in shared memory, and KDA's values and decays;
    leaves their inputs."""
    SIZE: gl.constexpr = SIZES.shared
    TAPS: gl.constexpr = SIZES.taps
    WIDTH: gl.constexpr = SIZES.units * SIZE
    queries = load_inputs(stream, small.read, channel, begin, IS_FIRST, TAPS, STEP)
    keys = load_inputs(stream, small.read, WIDTH + channel, begin, IS_FIRST, TAPS, STEP)
    if BY_CHANNEL:
        values = load_inputs(stream, small.read, 2 * WIDTH + channel, begin, IS_FIRST, TAPS, STEP)
        wide = load_places(decays, channel, begin, STEP)
        value_taps = load_taps(small.weight, 2 * WIDTH + channel, TAPS)
        rate = gl.load(weights.decay_rate + channel // SIZE)
        bias = gl.load(weights.decay_bias + channel)
    query_window = Window(queries, load_taps(small.weight, channel, TAPS))
    key_window = Window(keys, load_taps(small.weight, WIDTH + channel, TAPS))
    for ahead in gl.static_range(STEP):
        place = begin + ahead
        if place < stream.num_places:
            query = convolve(query_window, TAPS, ahead)
            query, key = unit_vectors(query, convolve(key_window, TAPS, ahead), SIZE)
            if BY_CHANNEL:
                value = convolve(Window(values, value_taps), TAPS, ahead)
                decay = gl.exp(rate * softplus(wide[ahead].to(gl.float32) + bias))
                keep_rows(vectors.rows.index(2 * PLACES + place), decay)
                vectors.columns.index(place).store(value)
            keep_rows(vectors.rows.index(place), query)
            keep_rows(vectors.rows.index(PLACES + place), key)
    leave_inputs(queries, stream, small.kept, channel, begin, TAPS, STEP)
    leave_inputs(keys, stream, small.kept, WIDTH + channel, begin, TAPS, STEP)
    if BY_CHANNEL:
        leave_inputs(values, stream, small.kept, 2 * WIDTH + channel, begin, TAPS, STEP)
        leave_places(wide, decays, channel, begin, STEP)


@gluon.jit
def _keep_values(
    stream,
    small,
    channel,
    vectors,
    begin,
    IS_FIRST: gl.constexpr,
    TAPS: gl.constexpr,
    STEP: gl.constexpr,
):
    """A value head's values of STEP tokens in shared memory; leaves their inputs."""
    values = load_inputs(stream, small.read, channel, begin, IS_FIRST, TAPS, STEP)
    window = Window(values, load_taps(small.weight, channel, TAPS))
    for ahead in gl.static_range(STEP):
        if begin + ahead < stream.num_places:
            vectors.columns.index(begin + ahead).store(convolve(window, TAPS, ahead))
    leave_inputs(values, stream, small.kept, channel, begin, TAPS, STEP)


@gluon.jit
def _pass_tokens(
    state,
    vectors,
    small_rows,
    weights,
    at,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BY_CHANNEL: gl.constexpr,
    MAX_BETA: gl.constexpr,
    PLACES: gl.constexpr,
):
    """Take a value head's state through all tokens: it is stored after the last committed one, and
    read for each new one. `small_rows` are streams of beta and decay inputs, and their column."""
    betas, decays, head = small_rows
    last = gl.minimum(betas.num_folded, betas.num_places - 1)
    o_k = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    has_any = betas.num_places > 0
    b_in = gl.load(row_of(betas, 0) + head, mask=has_any, other=0.0)
    a_in = b_in if BY_CHANNEL else gl.load(row_of(decays, 0) + head, mask=has_any, other=0.0)
    for place in range(betas.num_places):
        new, is_new = place - betas.num_folded, place >= betas.num_folded
        gate = gl.load(at.gate + new * at.gate_stride, mask=is_new, other=0.0)
        beta = sigmoid(b_in) * MAX_BETA
        if BY_CHANNEL:
            decay = load_rows(vectors.rows.index(2 * PLACES + place))
        else:
            decay = gl.exp(weights.rate * softplus(a_in.to(gl.float32) + weights.bias))
        following = gl.minimum(place + 1, betas.num_places - 1)
        b_in = gl.load(row_of(betas, following) + head)
        if not BY_CHANNEL:
            a_in = gl.load(row_of(decays, following) + head)
        key = load_rows(vectors.rows.index(PLACES + place))
        value = vectors.columns.index(place).load(gl.SliceLayout(0, STATE))
        state = delta_rule(state * decay, key, value, beta)
        if place == last:
            gl.store(at.state + o_k[:, None] * SIZE + o_v[None, :], state)
        if is_new:
            x = read_rows(state, load_rows(vectors.rows.index(place)))
            x = norm_and_gate(x, weights.norm, weights.norm_eps, gate, SIZE, BY_CHANNEL)
            gl.store(at.output + new * WIDTH, x.to(at.output.dtype.element_ty))
