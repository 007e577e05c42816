"""What Hopper's verify kernels read of a sequence's tokens, and what they leave of them, in Gluon:
some tokens at once, a channel a thread. So nobody else reads what a thread overwrites.

`stream` are (new, new_stride, folded, folded_stride, num_folded, num_places): rows of the step's
own tokens, rows of the recorded ones before them, and how many there are. A place counts both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.recurrent.hopper.states import STATE, STATE_SIZE

ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
"""In shared memory, of a vector with a number for each row of a state in the layout STATE: as
[STATE_SIZE / 4, 4], the rows of a thread side by side."""
_BY_THREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        lane_bases=[[0, 0], [0, 0], [0, 0], [0, 1], [0, 2]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[STATE_SIZE // 4, 4],
    )
)


@gluon.jit
def keep_rows(place, x):
    """Put a vector where `load_rows` finds it."""
    place.store(x.reshape([x.shape[0] // 4, 4]))


@gluon.jit
def load_rows(place):
    """[K, 1]"""
    x = place.load(_BY_THREAD)
    x = x.reshape([x.shape[0] * x.shape[1]])
    return gl.convert_layout(x, gl.SliceLayout(1, STATE), assert_trivial=True)[:, None]


@gluon.jit
def open_stream(tokens, sequences, i_sequence):
    """A sequence's `stream`, the number of its first new token, and the slot that it writes: below
    0 it is padding, which has no places. `tokens` are the rows of all and those of all records,
    with their strides."""
    projected, projected_stride, records, row_stride, record_stride = tokens
    begin, length, fold, row, slot_out = sequences
    num_folded, num_new = gl.load(fold + i_sequence), gl.load(length + i_sequence)
    first_token, target = gl.load(begin + i_sequence).to(gl.int64), gl.load(slot_out + i_sequence)
    new = projected + first_token * projected_stride
    num_places = gl.where(target >= 0, num_folded + num_new, 0)
    folded = records + gl.load(row + i_sequence).to(gl.int64) * row_stride
    stream = new, projected_stride, folded, record_stride, num_folded, num_places
    return stream, first_token, target


@gluon.jit
def row_of(stream, place):
    """Where a token's row begins."""
    new, new_stride, folded, folded_stride, num_folded, _num_places = stream
    at = new + (place - num_folded) * new_stride
    return gl.where(place < num_folded, folded + place * folded_stride, at)


@gluon.jit
def load_places(stream, column, begin, STEP: gl.constexpr):
    """Columns of STEP tokens from a place on: a tuple of tensors, zeros behind the last token."""
    rows = ()
    for ahead in gl.static_range(STEP):
        place = begin + ahead
        rows += (gl.load(row_of(stream, place) + column, mask=place < stream[5], other=0.0),)
    return rows


@gluon.jit
def load_inputs(
    stream,
    state,
    channel,
    begin,
    IS_FIRST: gl.constexpr,
    TAPS: gl.constexpr,
    STEP: gl.constexpr,
):
    """As `load_places`, behind the TAPS - 1 inputs before them, which a convolution's `state` has
    kept before the first token."""
    rows = ()
    for tap in gl.static_range(TAPS - 1):
        if IS_FIRST:
            p_old = state + channel * (TAPS - 1) + tap
        else:
            p_old = row_of(stream, begin - (TAPS - 1) + tap) + channel
        rows += (gl.load(p_old).to(stream[0].dtype.element_ty),)
    return rows + load_places(stream, channel, begin, STEP)


@gluon.jit
def leave_inputs(inputs, stream, state, channel, begin, TAPS: gl.constexpr, STEP: gl.constexpr):
    """Leave what the next step reads of a convolution's inputs: those up to the last committed
    token in the `state` that is written, the drafts' in place of the records. These are read up to
    TAPS - 1 places behind what was left last, which is none that any draft takes."""
    last = gl.minimum(stream[4], stream[5] - 1)
    places = ()
    for row in gl.static_range(TAPS - 1 + STEP):
        tap = begin + row - (TAPS - 1) - last + TAPS - 2
        is_kept = (stream[5] > 0) & (tap >= 0) & (tap < TAPS - 1)
        old = inputs[row].to(state.dtype.element_ty)
        gl.store(state + channel * (TAPS - 1) + tap, old, mask=is_kept)
        if row >= TAPS - 1:
            places += (inputs[row],)
    leave_places(places, stream, channel, begin, STEP)


@gluon.jit
def leave_places(rows, stream, column, begin, STEP: gl.constexpr):
    """Put what columns of the step's drafts hold in place of the records."""
    _new, _new_stride, folded, folded_stride, num_folded, num_places = stream
    for ahead in gl.static_range(STEP):
        draft = begin + ahead - num_folded - 1
        is_draft = (draft >= 0) & (begin + ahead < num_places)
        gl.store(folded + draft * folded_stride + column, rows[ahead], mask=is_draft)


@gluon.jit
def leave_column(stream, column, draft):
    """As `leave_places`, of one column that all threads have read: a `draft` a thread."""
    new, new_stride, folded, folded_stride, num_folded, num_places = stream
    is_draft = draft < num_places - num_folded - 1
    x = gl.load(new + (draft + 1) * new_stride + column, mask=is_draft, other=0.0)
    gl.store(folded + draft * folded_stride + column, x, mask=is_draft)
