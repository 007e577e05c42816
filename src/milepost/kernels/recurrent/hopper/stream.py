"""Reads and writes a sequence's tokens in Hopper's verify kernels, in Gluon: several tokens at a
time, with a channel per thread, so that a thread overwrites only entries that it has read."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.recurrent.hopper.states import STATE, STATE_SIZE

ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
"""Layout in shared memory of a vector with a number for each row of a state (STATE): [STATE_SIZE /
4, 4], the rows of a thread side by side."""
_BY_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        lane_bases=[[0, 0], [0, 0], [0, 0], [0, 1], [0, 2]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[STATE_SIZE // 4, 4],
    )
)


class TokenStream(NamedTuple):
    """Rows of a sequence's tokens: first the recorded ones, then the step's own. A place counts
    both."""

    new: Any
    new_stride: Any
    folded: Any
    folded_stride: Any
    num_folded: Any
    num_places: Any


@gluon.jit
def keep_rows(place, x):
    """Writes a vector [K] to shared memory for `load_rows`."""
    place.store(x.reshape([x.shape[0] // 4, 4]))


@gluon.jit
def load_rows(place):
    """Returns a vector [K, 1] that `keep_rows` put there."""
    x = place.load(_BY_THREAD)
    x = x.reshape([x.shape[0] * x.shape[1]])
    return gl.convert_layout(x, gl.SliceLayout(1, STATE), assert_trivial=True)[:, None]


@gluon.jit
def open_stream(rows, records, sequences, i_sequence):
    """Returns a sequence's `TokenStream`, its first new token, and the slot that it writes. A
    negative slot marks padding, which has no places."""
    num_folded = gl.load(sequences.fold + i_sequence)
    num_new = gl.load(sequences.length + i_sequence)
    first_token = gl.load(sequences.begin + i_sequence).to(gl.int64)
    target = gl.load(sequences.slot_out + i_sequence)
    new = rows.base + first_token * rows.stride
    num_places = gl.where(target >= 0, num_folded + num_new, 0)
    folded = records.base + gl.load(sequences.row + i_sequence).to(gl.int64) * records.row_stride
    stream = TokenStream(new, rows.stride, folded, records.stride, num_folded, num_places)
    return stream, first_token, target


@gluon.jit
def row_of(stream, place):
    """Returns a pointer to the row of the token at a place."""
    at = stream.new + (place - stream.num_folded) * stream.new_stride
    return gl.where(place < stream.num_folded, stream.folded + place * stream.folded_stride, at)


@gluon.jit
def load_places(stream, column, begin, STEP: gl.constexpr):
    """Returns columns of STEP tokens from a place on: a tuple of tensors, zeros after the last
    token."""
    rows = ()
    for ahead in gl.static_range(STEP):
        place, is_token = begin + ahead, begin + ahead < stream.num_places
        rows += (gl.load(row_of(stream, place) + column, mask=is_token, other=0.0),)
    return rows


@gluon.jit
def load_inputs(
    stream, state, channel, begin, IS_FIRST: gl.constexpr, TAPS: gl.constexpr, STEP: gl.constexpr
):
    """Returns the TAPS - 1 inputs before those tokens, from the convolution's `state` if IS_FIRST,
    and then what `load_places` returns."""
    rows = ()
    for tap in gl.static_range(TAPS - 1):
        if IS_FIRST:
            p_old = state + channel * (TAPS - 1) + tap
        else:
            p_old = row_of(stream, begin - (TAPS - 1) + tap) + channel
        rows += (gl.load(p_old).to(stream.new.dtype.element_ty),)
    return rows + load_places(stream, channel, begin, STEP)


@gluon.jit
def leave_inputs(inputs, stream, state, channel, begin, TAPS: gl.constexpr, STEP: gl.constexpr):
    """Writes the convolution's inputs for the next step: those up to the last committed token to
    `state`, those of drafts to the records. Records are read up to TAPS - 1 places before the last
    one written, and no draft takes such a place."""
    last = gl.minimum(stream.num_folded, stream.num_places - 1)
    places = ()
    for row in gl.static_range(TAPS - 1 + STEP):
        tap = begin + row - (TAPS - 1) - last + TAPS - 2
        is_kept = (stream.num_places > 0) & (tap >= 0) & (tap < TAPS - 1)
        old = inputs[row].to(state.dtype.element_ty)
        gl.store(state + channel * (TAPS - 1) + tap, old, mask=is_kept)
        if row >= TAPS - 1:
            places += (inputs[row],)
    leave_places(places, stream, channel, begin, STEP)


@gluon.jit
def leave_places(rows, stream, column, begin, STEP: gl.constexpr):
    """Replaces the records by these columns of the step's drafts."""
    for ahead in gl.static_range(STEP):
        draft = begin + ahead - stream.num_folded - 1
        is_draft = (draft >= 0) & (begin + ahead < stream.num_places)
        p_record = stream.folded + draft * stream.folded_stride + column
        gl.store(p_record, rows[ahead], mask=is_draft)


@gluon.jit
def leave_column(stream, column, draft):
    """Replaces the records by one column of the drafts, after all threads have read it: one `draft`
    per thread."""
    is_draft = draft < stream.num_places - stream.num_folded - 1
    p_new = stream.new + (draft + 1) * stream.new_stride + column
    x = gl.load(p_new, mask=is_draft, other=0.0)
    gl.store(stream.folded + draft * stream.folded_stride + column, x, mask=is_draft)


@gluon.jit
def keep_all(KEEP: gl.constexpr, tokens, which, FORM: gl.constexpr):
    """Writes vectors of all tokens to shared memory, some tokens at a time: calls KEEP(tokens,
    which, begin, IS_FIRST, FORM) for each place where some begin. `which` are channels or a
    group."""
    STEP: gl.constexpr = FORM.at_once
    KEEP(tokens, which, 0, True, FORM)
    if FORM.places > STEP:
        for begin in range(STEP, tokens.stream.num_places, STEP):
            KEEP(tokens, which, begin, False, FORM)


@gluon.jit
def bias_of(conv_bias, channel):
    """Returns the convolution's bias of some channels, or None."""
    bias = conv_bias
    if conv_bias is not None:
        bias = gl.load(conv_bias + channel).to(gl.float32)
    return bias
