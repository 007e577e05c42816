"""Mamba2's verifying steps on Hopper, in Gluon: states, and the outputs that new tokens read from
them, which `portable.step` norms and gates.

Each program loops over heads of a group, whose states TMA brings to shared memory ahead of time. B
and C of all tokens are convolved once and kept in shared memory. The inputs of a head's x are
loaded while the head before it is computed. States are those of `portable.step`, bit for bit.

Legend: S sequences, F folded and N new tokens of each, H heads, P head_dim, G groups, K state_size,
J taps; I = H * P entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import softplus
from milepost.kernels.recurrent.hopper.states import (
    CHANNEL,
    MOST_AT_ONCE,
    StepForm,
    Window,
    begin_work,
    convolve,
    load_taps,
    operands,
    take,
)
from milepost.kernels.recurrent.hopper.stream import (
    TokenStream,
    bias_of,
    keep_all,
    load_inputs,
    open_stream,
    row_of,
)
from milepost.kernels.recurrent.mixer import MixerSizes
from milepost.kernels.recurrent.portable.step import finish
from milepost.kernels.recurrent.structures import DecodingSteps, Mixer, StepOutput

_HEAD_DIM, _STATE_SIZE = 64, 128
_NUM_WARPS = 4
_STATE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
"""Layout of a state [P, K]. A warp holds whole rows, so sums over columns stay in the warp."""
_BY_LINE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [64, 0], [128, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[_HEAD_DIM * _STATE_SIZE // 32, 32],
    )
)
"""Layout of a state by lines of 128 bytes, four per row."""
_PROGRAMS, _STAGES = 2, 2
"""Programs per SM, and places for states in each."""
_MOST_HEADS = 8
"""Largest number of heads that a program takes one after the other."""


def run(mixer: Mixer, steps: DecodingSteps, output: Tensor) -> None:
    """Folds recorded drafts into the states, advances each sequence by one token and goes on
    through its drafts. Writes `output` [T, I] of the decoding sequences."""
    sizes, num_sequences = mixer.sizes, len(steps.sequences.slot_out)
    units_at_once = _PROGRAMS * num_sms(output.device)
    each = _choose_heads(sizes, num_sequences, units_at_once)
    num_units = num_sequences * (sizes.heads // each)
    y = torch.empty_like(output, dtype=torch.float32)
    read = StepOutput(y, output)
    places = steps.num_places
    form = StepForm(sizes, each, _STAGES, places, min(places, MOST_AT_ONCE))
    options = {"FORM": form, "num_warps": _NUM_WARPS, **OVERLAPPED}
    grid = (min(num_units, units_at_once),)
    _verify_kernel[grid](*operands(mixer, steps), read, num_units, **options)
    finish(mixer, steps, read, moves=True)


def _choose_heads(sizes: MixerSizes, num_sequences: int, units_at_once: int) -> int:
    """Returns the number of heads of a program: as many of a group as leave work for all programs
    that run at a time."""
    each = 1
    while 2 * each <= _MOST_HEADS and sizes.group % (2 * each) == 0:
        if num_sequences * sizes.heads < 2 * each * units_at_once:
            break
        each *= 2
    return each


class Channels(NamedTuple):
    """Inputs of some channels of the convolution."""

    window: Window
    bias: Any


class SequenceTokens(NamedTuple):
    """A sequence's tokens: sources of their inputs, and shared memory for their vectors."""

    stream: TokenStream
    conv: Any
    """The convolution's state."""
    weights: Any
    vectors: Any
    """[2 * PLACES, K]: B, then C."""
    x: Any
    """[PLACES, P]"""


class HeadInputs(NamedTuple):
    """Inputs of a head's tokens, as loaded."""

    x: Channels
    rate: Any
    dt_bias: Any
    skip: Any
    step: Any
    """Input of the first token's time step."""


class GroupedHeadRows(NamedTuple):
    """Pointers to a head's outputs and state, and the column of its time steps."""

    y: Any
    state: Any
    steps: Any
    """Column of the inputs of time steps."""


@quick
@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=["steps"])
def _verify_kernel(inputs, weights, steps, lines, output, num_units, FORM: gl.constexpr):
    """Loops over units: EACH heads of a group of a sequence."""
    SIZES: gl.constexpr = FORM.sizes
    HEADS: gl.constexpr = SIZES.heads
    HEAD_DIM: gl.constexpr = SIZES.own
    STATE_SIZE: gl.constexpr = SIZES.shared
    UNITS: gl.constexpr = FORM.units
    EACH: gl.constexpr = FORM.each
    PLACES: gl.constexpr = FORM.places
    conv, states, sequences = steps.conv, steps.recurrent, steps.sequences
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    vectors = gl.allocate_shared_memory(gl.float32, [2 * PLACES, STATE_SIZE], VECTOR)
    values = gl.allocate_shared_memory(gl.float32, [PLACES, HEAD_DIM], VECTOR)
    work = begin_work(lines, steps, num_units, FORM)
    wait_for_inputs()
    launch_dependents()
    number = 0
    for unit in range(work.first, num_units, work.stride):
        sequence, first_head = unit // UNITS, unit % UNITS * EACH
        stream, first_token, target = open_stream(inputs.mixed, steps.records, sequences, sequence)
        read = conv.base + gl.load(sequences.slot_in + sequence).to(gl.int64) * conv.stride
        tokens = SequenceTokens(stream, read, weights, vectors, values)
        # All loads are issued before any is used.
        following = _ask_head(tokens, first_head, FORM)
        keep_all(_keep_both, tokens, first_head // SIZES.group, FORM)
        for member in range(EACH):
            head, own = first_head + member, following
            _keep_values(tokens, head, own.x, FORM)
            next_head = first_head + gl.minimum(member + 1, EACH - 1)
            following = _ask_head(tokens, next_head, FORM)
            state = take(work, number, _STATE, _BY_LINE, FORM)
            number += 1
            first_read = first_token * HEADS + head
            p_state = states.base + target.to(gl.int64) * states.stride
            at = GroupedHeadRows(
                output.read + first_read * HEAD_DIM,
                p_state + head * (HEAD_DIM * STATE_SIZE),
                SIZES.channels + head,
            )
            _pass_tokens(tokens, state, own, at, FORM)


@gluon.jit
def _ask(tokens, channel, begin, IS_FIRST: gl.constexpr, FORM: gl.constexpr):
    """Returns the `Channels` of some tokens from a place on."""
    STEP: gl.constexpr = FORM.at_once
    TAPS: gl.constexpr = FORM.sizes.taps
    bias = bias_of(tokens.weights.conv_bias, channel)
    inputs = load_inputs(tokens.stream, tokens.conv, channel, begin, IS_FIRST, TAPS, STEP)
    return Channels(Window(inputs, load_taps(tokens.weights.conv, channel, TAPS)), bias)


@gluon.jit
def _ask_head(tokens, head, FORM: gl.constexpr):
    """Returns a head's `HeadInputs`, x of the first tokens."""
    SIZES: gl.constexpr = FORM.sizes
    stream, weights = tokens.stream, tokens.weights
    channel = head * SIZES.own + gl.arange(0, SIZES.own, layout=CHANNEL)
    x = _ask(tokens, channel, 0, True, FORM)
    p_step = row_of(stream, 0) + SIZES.channels + head
    step = gl.load(p_step, mask=stream.num_places > 0, other=0.0)
    rate, dt_bias = gl.load(weights.rate + head), gl.load(weights.dt_bias + head)
    return HeadInputs(x, rate, dt_bias, gl.load(weights.skip + head), step)


@gluon.jit
def _keep(channels, vectors, first, begin, num_places, FORM: gl.constexpr):
    """Convolves some channels of some tokens into shared memory."""
    STEP: gl.constexpr = FORM.at_once
    for ahead in gl.static_range(STEP):
        if begin + ahead < num_places:
            x = convolve(channels.window, FORM.sizes.taps, ahead, channels.bias)
            vectors.index(first + ahead).store(x)


@gluon.jit
def _keep_both(tokens, group, begin, IS_FIRST: gl.constexpr, FORM: gl.constexpr):
    """Writes B and then C of some tokens, which the heads of a group share, to shared memory."""
    SIZES: gl.constexpr = FORM.sizes
    num_places = tokens.stream.num_places
    o_k = gl.arange(0, SIZES.shared, layout=CHANNEL)
    o_b = SIZES.first_write + group * SIZES.shared + o_k
    o_c = SIZES.first_read + group * SIZES.shared + o_k
    b = _ask(tokens, o_b, begin, IS_FIRST, FORM)
    c = _ask(tokens, o_c, begin, IS_FIRST, FORM)
    _keep(b, tokens.vectors, begin, begin, num_places, FORM)
    _keep(c, tokens.vectors, FORM.places + begin, begin, num_places, FORM)


@gluon.jit
def _keep_values(tokens, head, asked, FORM: gl.constexpr):
    """Writes a head's x of all tokens to shared memory; the first tokens' inputs are loaded
    already."""
    STEP: gl.constexpr = FORM.at_once
    SIZES: gl.constexpr = FORM.sizes
    num_places = tokens.stream.num_places
    channel = head * SIZES.own + gl.arange(0, SIZES.own, layout=CHANNEL)
    _keep(asked, tokens.x, 0, 0, num_places, FORM)
    if FORM.places > STEP:
        for begin in range(STEP, num_places, STEP):
            asked = _ask(tokens, channel, begin, False, FORM)
            _keep(asked, tokens.x, begin, begin, num_places, FORM)


@gluon.jit
def _pass_tokens(tokens, state, own, at, FORM: gl.constexpr):
    """Advances a head's state through all tokens. Stores it after the last committed token, and
    outputs for each new one."""
    SIZES: gl.constexpr = FORM.sizes
    stream, weights = tokens.stream, tokens.weights
    last = gl.minimum(stream.num_folded, stream.num_places - 1)
    o_p = gl.arange(0, SIZES.own, layout=gl.SliceLayout(1, _STATE))
    o_k = gl.arange(0, SIZES.shared, layout=gl.SliceLayout(0, _STATE))
    b_in = own.step
    for place in range(stream.num_places):
        new, is_new = place - stream.num_folded, place >= stream.num_folded
        step = _time_step(b_in, own.dt_bias, weights.dt_limit)
        b_in = gl.load(row_of(stream, gl.minimum(place + 1, stream.num_places - 1)) + at.steps)
        x = tokens.x.index(place).load(gl.SliceLayout(1, _STATE))
        b = tokens.vectors.index(place).load(gl.SliceLayout(0, _STATE))[None, :]
        state *= gl.exp(step * own.rate)
        state = gl.fma((x * step)[:, None], b, state)
        if place == last:
            gl.store(at.state + o_p[:, None] * SIZES.shared + o_k[None, :], state)
        if is_new:
            c = tokens.vectors.index(FORM.places + place).load(gl.SliceLayout(0, _STATE))[None, :]
            read = gl.fma(x, own.skip, _read_columns(state, c))
            gl.store(at.y + new * SIZES.width + o_p, read)


@gluon.jit
def _read_columns(state, x):
    """Returns what `x` [1, K] reads of a state [P, K]: [P], added up as in `states.read_rows`."""
    column = gl.arange(0, state.shape[1], layout=gl.SliceLayout(0, _STATE))[None, :]
    begins = column & 99 == 0  # each thread's first column
    rounded = gl.fma(state, x, gl.zeros_like(state))
    return gl.sum(gl.where(begins, rounded, state * x), 1)


@gluon.jit
def _time_step(inputs, bias, limit):
    """Returns a head's time step, between its limits."""
    low, high = limit
    step = softplus(inputs.to(gl.float32) + bias)
    step = gl.where(step < low, low, step)
    return gl.where(step > high, high, step)
