"""The walk of `recurrent.step`'s verify on Hopper, in Gluon.

Each program goes through heads of a group, one after the other, which TMA brings to shared memory
ahead. B and C of all tokens are worked out once, and a head's x while the one before it is worked
on; they wait in shared memory. What happens with a token is what `triton_hopper` does, in its
order: states are the same bit for bit, and so are outputs, for the squares that the norm adds up
are added here, head by head. States are those of `recurrent.step`'s decode, too.

Legend: S sequences, F folded and N new tokens of each, H heads, P head_dim, G groups, K state_size,
J taps; I = H * P entries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.layout.verify import VerifyLayout
from milepost.kernels.mamba2.triton_hopper import (
    BY_LINE,
    HEAD_DIM,
    MOST_HEADS,
    NUM_WARPS,
    STATE,
    STATE_SIZE,
    add_squares,
    bias_of,
    read_columns,
    time_step,
)
from milepost.kernels.mamba2.weights import Mamba2Weights
from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.gluon import launch_dependents, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.recurrent.hopper.states import (
    CHANNEL,
    begin_work,
    convolve,
    describe_states,
    load_taps,
    take,
)
from milepost.kernels.recurrent.hopper.stream import load_inputs, row_of

_UNSPECIALISED = ["begin", "length", "fold", "row", "slot_in", "slot_out"]
_PROGRAMS, _STAGES = 2, 2
"""Programs of an SM, and places for states in each."""
_MOST_HEADS = 8
"""Of a program, one after the other."""


def walk(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    y: Tensor,
) -> Tensor | None:
    """See `recurrent.step`: states, what new tokens read, the sums of its squares."""
    num_sequences, heads = layout.num_sequences, recurrent_pool.shape[1]
    channels, conv_width = weights.conv.shape
    groups = (channels - heads * HEAD_DIM) // (2 * STATE_SIZE)
    each = _choose_heads(heads, groups, num_sequences, projected.device)
    num_units = num_sequences * (heads // each)
    squares = y.new_empty(len(y), heads, NUM_WARPS)
    adds_squares = weights.norm is not None and heads // groups <= MOST_HEADS
    _walk_kernel[(min(num_units, _PROGRAMS * num_sms(projected.device)),)](
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
        describe_states(recurrent_pool),
        recurrent_pool,
        recurrent_pool.stride(0),
        *layout.sequences,
        y,
        squares,
        num_units,
        HEADS=heads,
        GROUPS=groups,
        EACH=each,
        HEAD_DIM=HEAD_DIM,
        STATE_SIZE=STATE_SIZE,
        TAPS=conv_width,
        ADDS_SQUARES=adds_squares,
        BEFORE_GATE=weights.norm_before_gate,
        PLACES=2 * records.shape[1] + 1,
        STAGES=_STAGES,
        num_warps=NUM_WARPS,
        **OVERLAPPED,
    )
    return squares if adds_squares else None


def _choose_heads(heads: int, groups: int, num_sequences: int, device: torch.device) -> int:
    """Heads of a program, as many of a group as leave work for all that run at a time."""
    each = 1
    enough = _PROGRAMS * num_sms(device)
    while 2 * each <= _MOST_HEADS and heads // groups % (2 * each) == 0:
        if num_sequences * heads < 2 * each * enough:
            break
        each *= 2
    return each


@quick
@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=_UNSPECIALISED)
def _walk_kernel(
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
    states,
    pool,
    slot_stride,
    begin,
    length,
    fold,
    row,
    slot_in,
    slot_out,
    y,
    squares,
    num_units,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    EACH: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STATE_SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    ADDS_SQUARES: gl.constexpr,
    BEFORE_GATE: gl.constexpr,
    PLACES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Every so many units, each EACH heads of a group of a sequence."""
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    UNITS: gl.constexpr = HEADS // EACH
    INNER: gl.constexpr = HEADS * HEAD_DIM
    WIDTH: gl.constexpr = GROUPS * STATE_SIZE
    SHAPE: gl.constexpr = [HEAD_DIM, STATE_SIZE]
    STEP: gl.constexpr = min(PLACES, 8)  # tokens whose inputs a thread holds at a time
    vectors = gl.allocate_shared_memory(gl.float32, [2 * PLACES, STATE_SIZE], VECTOR)
    values = gl.allocate_shared_memory(gl.float32, [PLACES, HEAD_DIM], VECTOR)
    work = begin_work(states, slot_stride, slot_in, slot_out, num_units, SHAPE, UNITS, EACH, STAGES)
    first, stride = work[4], work[5]
    o_x = gl.arange(0, HEAD_DIM, layout=CHANNEL)
    o_k = gl.arange(0, STATE_SIZE, layout=CHANNEL)
    convolution = conv_weight, conv_bias
    wait_for_inputs()
    launch_dependents()
    number = 0
    for unit in range(first, num_units, stride):
        sequence, first_head = unit // UNITS, unit % UNITS * EACH
        group = first_head // (HEADS // GROUPS)
        num_folded, num_new = gl.load(fold + sequence), gl.load(length + sequence)
        first_token = gl.load(begin + sequence).to(gl.int64)
        recorded = records + gl.load(row + sequence).to(gl.int64) * row_stride
        read = conv_pool + gl.load(slot_in + sequence).to(gl.int64) * conv_stride
        target = gl.load(slot_out + sequence)
        token = projected + first_token * projected_stride
        num_places = gl.where(target >= 0, num_folded + num_new, 0)
        stream = token + INNER, projected_stride, recorded, record_stride, num_folded, num_places
        # Everything is asked for before anything is used.
        first_step = INNER + 2 * WIDTH
        of_heads = convolution, rate, dt_bias, skip, first_step
        tokens = stream, read, convolution
        own = _ask(stream, read, of_heads, first_head, o_x, TAPS, STEP)
        o_b, o_c = INNER + group * STATE_SIZE + o_k, INNER + WIDTH + group * STATE_SIZE + o_k
        _keep_group(tokens, vectors, o_b, o_c, num_places, PLACES, TAPS, STEP)
        for member in range(EACH):
            head = first_head + member
            x_inputs, small = own
            o_own = head * HEAD_DIM + o_x
            _keep_values(x_inputs, tokens, values, o_own, num_places, PLACES, TAPS, STEP)
            following = first_head + gl.minimum(member + 1, EACH - 1)
            own = _ask(stream, read, of_heads, following, o_x, TAPS, STEP)
            state = take(work, number, STATE, BY_LINE, SHAPE, UNITS, EACH)
            number += 1
            written = pool + target.to(gl.int64) * slot_stride + head * (HEAD_DIM * STATE_SIZE)
            gate = token + head * HEAD_DIM
            first_read = first_token * HEADS + head
            output = y + first_read * HEAD_DIM, squares + first_read * gl.num_warps()
            limits = dt_low, dt_high, first_step + head
            at = vectors, values, written, gate, output
            _walk(stream, state, small, limits, at, HEADS, ADDS_SQUARES, BEFORE_GATE, PLACES)


@gluon.jit
def _ask_channels(
    stream,
    state,
    convolution,
    channel,
    begin,
    IS_FIRST: gl.constexpr,
    TAPS: gl.constexpr,
    STEP: gl.constexpr,
):
    """What some channels behind the convolution are made of: inputs, weights, bias."""
    weight, bias = convolution
    bias = bias_of(bias, channel)
    inputs = load_inputs(stream, state, channel, begin, IS_FIRST, TAPS, STEP)
    return inputs, load_taps(weight, channel, TAPS), bias


@gluon.jit
def _ask(stream, state, of_heads, head, row, TAPS: gl.constexpr, STEP: gl.constexpr):
    """What a head's walk is made of: its channels' part, and its small parameters with the input of
    its first time step."""
    convolution, rate, dt_bias, skip, first_step = of_heads
    channel = head * row.shape[0] + row
    inputs = _ask_channels(stream, state, convolution, channel, 0, True, TAPS, STEP)
    step = gl.load(row_of(stream, 0) + first_step + head, mask=stream[5] > 0, other=0.0)
    return inputs, (gl.load(rate + head), gl.load(dt_bias + head), gl.load(skip + head), step)


@gluon.jit
def _keep_vectors(asked, vectors, first, begin, num_places, TAPS: gl.constexpr, STEP: gl.constexpr):
    """Some channels behind the convolution, of STEP tokens in shared memory."""
    inputs, taps, bias = asked
    for ahead in gl.static_range(STEP):
        if begin + ahead < num_places:
            vectors.index(first + ahead).store(convolve(inputs, taps, TAPS, ahead, bias))


@gluon.jit
def _keep_group(
    tokens,
    vectors,
    o_b,
    o_c,
    num_places,
    PLACES: gl.constexpr,
    TAPS: gl.constexpr,
    STEP: gl.constexpr,
):
    """B of all tokens in shared memory, and C behind it, which the heads of a group have in
    common."""
    b_inputs = _ask_channels(*tokens, o_b, 0, True, TAPS, STEP)
    c_inputs = _ask_channels(*tokens, o_c, 0, True, TAPS, STEP)
    _keep_vectors(b_inputs, vectors, 0, 0, num_places, TAPS, STEP)
    _keep_vectors(c_inputs, vectors, PLACES, 0, num_places, TAPS, STEP)
    if PLACES > STEP:
        for begin in range(STEP, num_places, STEP):
            b_inputs = _ask_channels(*tokens, o_b, begin, False, TAPS, STEP)
            c_inputs = _ask_channels(*tokens, o_c, begin, False, TAPS, STEP)
            _keep_vectors(b_inputs, vectors, begin, begin, num_places, TAPS, STEP)
            _keep_vectors(c_inputs, vectors, PLACES + begin, begin, num_places, TAPS, STEP)


@gluon.jit
def _keep_values(
    asked,
    tokens,
    values,
    channel,
    num_places,
    PLACES: gl.constexpr,
    TAPS: gl.constexpr,
    STEP: gl.constexpr,
):
    """A head's x of all tokens in shared memory; that of the first STEP has been asked for."""
    _keep_vectors(asked, values, 0, 0, num_places, TAPS, STEP)
    if PLACES > STEP:
        for begin in range(STEP, num_places, STEP):
            asked = _ask_channels(*tokens, channel, begin, False, TAPS, STEP)
            _keep_vectors(asked, values, begin, begin, num_places, TAPS, STEP)


@gluon.jit
def _walk(
    stream,
    state,
    small,
    limits,
    at,
    HEADS: gl.constexpr,
    ADDS_SQUARES: gl.constexpr,
    BEFORE_GATE: gl.constexpr,
    PLACES: gl.constexpr,
):
    """Take a head's state through all tokens: it is stored behind the last committed one, and read
    for each new one."""
    rate, bias, own_skip, b_in = small
    dt_low, dt_high, column = limits
    vectors, values, written, p_gate, output = at
    p_y, p_squares = output
    STATE_SIZE: gl.constexpr = vectors.type.shape[1]
    HEAD_DIM: gl.constexpr = values.type.shape[1]
    num_folded, num_places = stream[4], stream[5]
    last = gl.minimum(num_folded, num_places - 1)
    o_p = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, STATE_SIZE, layout=gl.SliceLayout(0, STATE))
    for place in range(num_places):
        new, is_new = place - num_folded, place >= num_folded
        gate = gl.load(p_gate + new * stream[1] + o_p, mask=is_new, other=0.0).to(gl.float32)
        step = time_step(b_in, bias, dt_low, dt_high)
        b_in = gl.load(row_of(stream, gl.minimum(place + 1, num_places - 1)) + column)
        x = values.index(place).load(gl.SliceLayout(1, STATE))
        b = vectors.index(place).load(gl.SliceLayout(0, STATE))[None, :]
        state *= gl.exp(step * rate)
        state = gl.fma((x * step)[:, None], b, state)
        if place == last:
            gl.store(written + o_p[:, None] * STATE_SIZE + o_k[None, :], state)
        if is_new:
            c = vectors.index(PLACES + place).load(gl.SliceLayout(0, STATE))[None, :]
            read = gl.fma(x, own_skip, read_columns(state, c))
            gl.store(p_y + new * (HEADS * HEAD_DIM) + o_p, read)
            if ADDS_SQUARES:
                if not BEFORE_GATE:
                    read *= gate / (1 + gl.exp(-gate))
                parts = add_squares(read)
                o_w = gl.arange(0, parts.shape[0], layout=parts.type.layout)
                gl.store(p_squares + new * (HEADS * parts.shape[0]) + o_w, parts)
