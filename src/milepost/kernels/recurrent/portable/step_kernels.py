"""Kernels of `step` in Triton. Places of a sequence's tokens:

    place     0 .. F - 1    F          F + 1 .. F + N - 1
    token     records       its own    drafts

Legend: S sequences, F folded and N new tokens of each, R places at most, C channels, U units, K
shared entries of a state, O own entries of a program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from milepost.kernels.platform.launches import launch_dependents, wait_for_inputs
from milepost.kernels.recurrent.portable.gated_norm import gated_norm
from milepost.kernels.recurrent.portable.stream import (
    TokenRows,
    convolve,
    keep_window,
    load_window,
    open_stream,
    record_drafts,
)


class Vectors(NamedTuple):
    """A token's vectors after the convolution, float32."""

    read: Any
    """[K] query, or C."""
    write: Any
    """[K] key, or B."""
    own: Any
    """[O] value, or x."""


class Streams(NamedTuple):
    """Inputs of a sequence's strengths and decays, for all its tokens."""

    strengths: TokenRows
    decays: TokenRows


@triton.jit(do_not_specialize_on_alignment=["steps"])
def convolve_kernel(inputs, weights, steps, mixed, places, SIZES: tl.constexpr):
    """Convolves one vector of a sequence, with SiLU, into `mixed` [S, R, C] float32; a query or a
    key of the delta rule becomes a unit vector."""
    VERIFIES: tl.constexpr = steps.records is not None
    conv, sequences = steps.conv, steps.sequences
    # The next launch may start and load what this one does not write.
    launch_dependents()
    i_sequence, i_vector = tl.program_id(0).to(tl.int64), tl.program_id(1)
    written = tl.load(sequences.slot_out + i_sequence).to(tl.int64)
    if written < 0:
        return
    first = SIZES.first_value + (i_vector - 2 * SIZES.units) * SIZES.own
    size = SIZES.own
    if i_vector < 2 * SIZES.units:
        first = SIZES.first_write + (i_vector - SIZES.units) * SIZES.shared
        size = SIZES.shared
    if i_vector < SIZES.units:
        first = SIZES.first_read + i_vector * SIZES.shared
    o_c = tl.arange(0, triton.next_power_of_2(max(SIZES.shared, SIZES.own)))
    channel, is_channel = first + o_c, o_c < size
    stream = open_stream(inputs.mixed, steps, i_sequence, VERIFIES)
    source = tl.load(sequences.slot_in + i_sequence).to(tl.int64)
    p_conv = conv.base + source * conv.stride
    p_mixed = mixed + i_sequence * places * SIZES.channels + channel
    last, num_new = 0, 1
    if VERIFIES:
        num_new = tl.load(sequences.length + i_sequence)
        last = stream.num_folded + tl.minimum(num_new, 1) - 1
        for place in range(stream.num_folded + num_new):
            window = load_window(stream, p_conv, channel, is_channel, place, SIZES.taps, VERIFIES)
            p_place = p_mixed + place * SIZES.channels
            _store_convolved(window, p_place, weights, channel, is_channel, i_vector, SIZES)
    window = load_window(stream, p_conv, channel, is_channel, last, SIZES.taps, VERIFIES)
    if not VERIFIES:
        _store_convolved(window, p_mixed, weights, channel, is_channel, i_vector, SIZES)
    # All has been read before any is written: slot_in may be slot_out.
    tl.debug_barrier()
    keep_window(conv.base + written * conv.stride, window, channel, is_channel, SIZES.taps)
    if VERIFIES:
        record_drafts(stream, channel, is_channel, num_new)


@triton.jit
def _store_convolved(window, target, weights, channel, is_channel, i_vector, SIZES: tl.constexpr):
    b_x = convolve(window, weights.conv, weights.conv_bias, channel, is_channel, SIZES.taps)
    if SIZES.norms_heads:
        # Keys become unit vectors; queries are shorter by K ** -0.5.
        scale = tl.rsqrt(tl.sum(b_x * b_x, 0) + 1e-6)
        scale *= tl.where(i_vector < SIZES.units, SIZES.shared**-0.5, 1.0)
        b_x *= tl.where(i_vector < 2 * SIZES.units, scale, 1.0)
    tl.store(target, b_x, is_channel)


@triton.jit(do_not_specialize_on_alignment=["steps", "arrivals"])
def update_kernel(
    inputs,
    weights,
    steps,
    mixed,
    places,
    arrivals,
    output,
    SIZES: tl.constexpr,
    OPEN_HEAD: tl.constexpr,
    STRENGTHS: tl.constexpr,
    ADVANCE: tl.constexpr,
    READ: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Advances the states of HEADS heads of a sequence and reads them for new tokens."""
    VERIFIES: tl.constexpr = steps.records is not None
    states, sequences = steps.recurrent, steps.sequences
    i_head, i_sequence = tl.program_id(0) * HEADS, tl.program_id(1).to(tl.int64)
    WIDTH: tl.constexpr = SIZES.width
    o_s = tl.arange(0, triton.next_power_of_2(SIZES.shared))
    o_own = tl.arange(0, triton.next_power_of_2(HEADS * SIZES.own))
    is_s, is_own = o_s < SIZES.shared, o_own < HEADS * SIZES.own
    o_output = i_head * SIZES.own + o_own
    written = tl.load(sequences.slot_out + i_sequence).to(tl.int64)
    if written < 0:
        # Padding waits too: a launch of padding alone must not end before the launch ahead.
        wait_for_inputs()
        if not VERIFIES:
            zeros = tl.zeros(o_own.shape, output.base.dtype.element_ty)
            tl.store(output.base + i_sequence * WIDTH + o_output, zeros, is_own)
        return
    o_state, in_state = _find_states(i_head, o_s, o_own, is_s, is_own, SIZES)
    source = tl.load(sequences.slot_in + i_sequence).to(tl.int64)
    p_read, p_written = states.base + source * states.stride, states.base + written * states.stride
    b_state = tl.load(p_read + o_state, in_state, 0).to(tl.float32)
    head = OPEN_HEAD(weights, i_head, o_s, o_own, SIZES, HEADS)
    streams = Streams(
        open_stream(inputs.strengths, steps, i_sequence, VERIFIES),
        open_stream(inputs.decays, steps, i_sequence, VERIFIES),
    )
    i_unit = i_head // SIZES.group
    p_mixed = mixed + i_sequence * places * SIZES.channels
    p_gate = inputs.gate.base + o_output
    first, num_folded, num_new = i_sequence, 0, 1
    if VERIFIES:
        first = tl.load(sequences.begin + i_sequence).to(tl.int64)
        num_folded = tl.load(sequences.fold + i_sequence)
        num_new = tl.load(sequences.length + i_sequence)
    last = num_folded + tl.minimum(num_new, 1) - 1
    b_strength, b_decay = STRENGTHS(streams, 0, head, weights, SIZES, VERIFIES)
    if SIZES.norms_heads:
        b_norm = tl.load(weights.norm + o_own, is_own, 0)
        b_gate = tl.load(p_gate + first * inputs.gate.stride, is_own & (num_new > 0), 0)
    # The convolution's launch has ended from here on.
    wait_for_inputs()

    for place in range(num_folded + num_new):
        p_place = p_mixed + place * SIZES.channels
        vectors = _load_vectors(p_place, i_unit, o_s, is_s, o_output, is_own, SIZES)
        b_state = ADVANCE(b_state, vectors, b_strength, b_decay)
        if place >= num_folded:
            token = first + place - num_folded
            b_y = READ(b_state, vectors, head)
            at = token * WIDTH + o_output
            if SIZES.norms_heads:
                _finish_heads(b_y, b_norm, b_gate, weights, output, at, is_own, SIZES)
            else:
                tl.store(output.read + at, b_y, is_own)
        b_kept = b_state.to(states.base.dtype.element_ty)
        if place == last:
            # All threads have read the state before any writes it: slot_in may be slot_out.
            tl.debug_barrier()
            tl.store(p_written + o_state, b_kept, in_state)
        # Rounded as a step that ended here would find it in the pool.
        b_state = b_kept.to(tl.float32)
        if VERIFIES:
            following = tl.minimum(place + 1, num_folded + num_new - 1)
            b_strength, b_decay = STRENGTHS(streams, following, head, weights, SIZES, VERIFIES)
            if SIZES.norms_heads:
                following = tl.maximum(following - num_folded, 0)
                p_following = p_gate + (first + following) * inputs.gate.stride
                b_gate = tl.load(p_following, is_own & (num_new > 0), 0)
    if VERIFIES:
        # All threads have read the records before any overwrites them.
        tl.debug_barrier()
        _record(streams.strengths, i_head, num_new, HEADS, 1)
        if SIZES.decays > 0:
            _record(streams.decays, i_head, num_new, HEADS, SIZES.decays // SIZES.heads)
    elif not SIZES.norms_heads:
        p_arrivals = arrivals + i_sequence * SIZES.units + i_unit
        if _is_last(p_arrivals, SIZES.group // HEADS):
            _finish_unit(inputs.gate, output, weights, i_sequence, i_unit, SIZES)


@triton.jit
def _find_states(i_head, o_s, o_own, is_s, is_own, SIZES: tl.constexpr):
    """Returns offsets of some heads' states in a slot, ordered as in memory, and their mask."""
    if SIZES.norms_heads:
        o_state = o_s[:, None] * SIZES.own + o_own[None, :]
        in_state = is_s[:, None] & is_own[None, :]
    else:
        o_state = o_own[:, None] * SIZES.shared + o_s[None, :]
        in_state = is_own[:, None] & is_s[None, :]
    return o_state + i_head * (SIZES.shared * SIZES.own), in_state


@triton.jit
def _load_vectors(p_place, i_unit, o_s, is_s, o_output, is_own, SIZES: tl.constexpr):
    """Loads a token's convolved vectors for some heads of a unit."""
    p_shared = p_place + i_unit * SIZES.shared + o_s
    return Vectors(
        tl.load(p_shared + SIZES.first_read, is_s, 0),
        tl.load(p_shared + SIZES.first_write, is_s, 0),
        tl.load(p_place + SIZES.first_value + o_output, is_own, 0),
    )


@triton.jit
def _finish_heads(b_y, b_norm, b_gate, weights, output, at, is_own, SIZES: tl.constexpr):
    """Norms, gates and stores a token's output of heads that are normed one by one."""
    b_y = gated_norm(
        b_y[None, :], b_norm[None, :], b_gate[None, :], weights.norm_eps, SIZES.own, SIZES
    )
    tl.store(output.base + at[None, :], b_y.to(output.base.dtype.element_ty), is_own[None, :])


@triton.jit
def _is_last(p_arrivals, num_programs):
    """Counts this program as done; returns whether it is its unit's last, and then resets it."""
    tl.debug_barrier()
    is_last = tl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if is_last:
        tl.store(p_arrivals, 0)
    return is_last


@triton.jit
def _record(stream, i_head, num_new, HEADS: tl.constexpr, EACH: tl.constexpr):
    """Records EACH columns of the drafts for HEADS heads."""
    o_column = tl.arange(0, triton.next_power_of_2(HEADS * EACH))
    record_drafts(stream, i_head * EACH + o_column, o_column < HEADS * EACH, num_new)


@triton.jit
def _finish_unit(gate, output, weights, token, i_unit, SIZES: tl.constexpr):
    """Norms, gates and stores a token's output of all heads of a unit."""
    WIDTH: tl.constexpr = SIZES.group * SIZES.own
    column = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    is_real, at = column < WIDTH, i_unit * WIDTH + column
    b_weight = None
    if weights.norm is not None:
        b_weight = tl.load(weights.norm + at, is_real, 0)
    b_gate = tl.load(gate.base + token * gate.stride + at, is_real, 0)
    p_token = token * (SIZES.units * WIDTH) + at
    b_y = tl.load(output.read + p_token, is_real, 0)
    b_y = gated_norm(b_y, b_weight, b_gate, weights.norm_eps, WIDTH, SIZES)
    tl.store(output.base + p_token, b_y.to(output.base.dtype.element_ty), is_real)


@triton.jit(do_not_specialize_on_alignment=["steps"])
def finish_kernel(
    inputs,
    weights,
    steps,
    output,
    SIZES: tl.constexpr,
    MOST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Norms and gates a unit of one of a sequence's new tokens, MOST at most. Programs after those
    write COLUMNS columns of convolution states and records."""
    i_part, i_sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    conv, sequences = steps.conv, steps.sequences
    written = tl.load(sequences.slot_out + i_sequence).to(tl.int64)
    source = tl.load(sequences.slot_in + i_sequence).to(tl.int64)
    num_new = tl.load(sequences.length + i_sequence)
    token = tl.load(sequences.begin + i_sequence).to(tl.int64) + i_part % MOST
    mixed = open_stream(inputs.mixed, steps, i_sequence, True)
    strengths = open_stream(inputs.strengths, steps, i_sequence, True)
    wait_for_inputs()
    if written < 0:
        return
    if i_part < SIZES.units * MOST:
        if i_part % MOST < num_new:
            _finish_unit(inputs.gate, output, weights, token, i_part // MOST, SIZES)
        return
    column = (i_part - SIZES.units * MOST) * COLUMNS + tl.arange(0, COLUMNS)
    last = mixed.num_folded + tl.minimum(num_new, 1) - 1
    is_channel = column < SIZES.channels
    p_conv = conv.base + source * conv.stride
    window = load_window(mixed, p_conv, column, is_channel, last, SIZES.taps, True)
    # The window is read before any state is written: slot_in may be slot_out.
    tl.debug_barrier()
    keep_window(conv.base + written * conv.stride, window, column, is_channel, SIZES.taps)
    record_drafts(mixed, column, is_channel, num_new)
    record_drafts(strengths, column, column < SIZES.heads, num_new)
