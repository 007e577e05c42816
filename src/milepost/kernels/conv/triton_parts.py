"""A short convolution's rows and states, for the Triton kernels that have one.

Legend: C channels, J taps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.activations import silu


@triton.jit
def first_window(
    projected,
    projected_stride,
    state,
    channel,
    is_channel,
    begin,
    part_from,
    TAPS: tl.constexpr,
):
    """The TAPS - 1 inputs before token `part_from` of a sequence whose first is `begin`, oldest
    first, each of `channel`'s shape, float32; what precedes `begin` is in `state`."""
    window = ()
    is_first = part_from == begin
    row = projected + part_from.to(tl.int64) * projected_stride + channel
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(state + channel * (TAPS - 1) + tap, is_channel & is_first, 0)
        inputs = tl.load(row + (tap - (TAPS - 1)) * projected_stride, is_channel & ~is_first, 0)
        b_input = inputs.to(tl.float32) + old.to(tl.float32)
        window = window + (b_input,)  # noqa: RUF005  Triton unpacks no tuples
    return window


@triton.jit
def load_taps(weight, channel, is_channel, TAPS: tl.constexpr):
    """The convolution's weights for each tap, of `channel`'s shape, float32."""
    taps = ()
    for tap in tl.static_range(TAPS):
        b_tap = tl.load(weight + channel * TAPS + tap, is_channel, 0).to(tl.float32)
        taps = taps + (b_tap,)  # noqa: RUF005
    return taps


@triton.jit
def load_rows(p_inputs, stride, is_channel, num_rows, BATCH: tl.constexpr):
    """BATCH rows of inputs, of which there are `num_rows`. All are loaded before anything is
    stored: for all the compiler knows that might change what later ones read."""
    rows = ()
    for row in tl.static_range(BATCH):
        b_row = tl.load(p_inputs + row * stride, is_channel & (row < num_rows), 0)
        rows = rows + (b_row,)  # noqa: RUF005
    return rows


@triton.jit
def slide(window, taps, newest, TAPS: tl.constexpr):
    """What the convolution makes of `window` and the input behind it; and the next window."""
    seen = window + (newest,)  # noqa: RUF005
    x = seen[0] * taps[0]
    following = ()
    for tap in tl.static_range(1, TAPS):
        x += seen[tap] * taps[tap]
        following = following + (seen[tap],)  # noqa: RUF005
    return x, following


@triton.jit
def keep_inputs(
    projected,
    projected_stride,
    state,
    pool,
    slot_stride,
    channel,
    is_channel,
    begin,
    stop,
    slot,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """Write the last TAPS - 1 inputs before token `stop` to `slot`; those before token `begin` are
    in the state that was read."""
    tap = tl.arange(0, BLOCK_TAPS)[None, :]
    source = stop - (TAPS - 1) + tap
    is_kept = is_channel[:, None] & (tap < TAPS - 1)
    at = source.to(tl.int64) * projected_stride + channel[:, None]
    inputs = tl.load(projected + at, is_kept & (source >= begin), 0)
    of_channel = channel[:, None] * (TAPS - 1)
    before = of_channel + source - begin + (TAPS - 1)
    inputs += tl.load(state + before, is_kept & (source < begin), 0).to(inputs.dtype)
    tl.debug_barrier()
    written = pool + slot.to(tl.int64) * slot_stride
    tl.store(written + of_channel + tap, inputs.to(pool.dtype.element_ty), is_kept)


@triton.jit
def convolve_one(
    state,
    token,
    weight,
    bias,
    channel,
    is_channel,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """Of some channels: what the convolution and SiLU make of the newest input, float32; and the
    inputs that it saw, [BLOCK, BLOCK_TAPS]."""
    tap = tl.arange(0, BLOCK_TAPS)[None, :]
    o_channel = channel[:, None]
    was_kept = is_channel[:, None] & (tap < TAPS - 1)
    window = tl.load(state + o_channel * (TAPS - 1) + tap, was_kept, 0)
    newest = tl.load(token + channel, is_channel, 0)
    window = tl.where(tap == TAPS - 1, newest[:, None], window.to(newest.dtype))
    return _convolve_window(window, weight, bias, channel, is_channel, TAPS, BLOCK_TAPS), window


@triton.jit
def _convolve_window(
    window, weight, bias, channel, is_channel, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr
):
    """Convolution and SiLU, float32. Products are added one after the other in any kernel, however
    its threads hold them: states behind them are the same."""
    tap = tl.arange(0, BLOCK_TAPS)[None, :]
    taps = tl.load(weight + channel[:, None] * TAPS + tap, is_channel[:, None] & (tap < TAPS), 0)
    x = _at_tap(window, 0, BLOCK_TAPS) * _at_tap(taps, 0, BLOCK_TAPS)
    for i_tap in tl.static_range(1, TAPS):
        x = tl.fma(_at_tap(window, i_tap, BLOCK_TAPS), _at_tap(taps, i_tap, BLOCK_TAPS), x)
    if bias is not None:
        x += tl.load(bias + channel, is_channel, 0).to(tl.float32)
    return silu(x)


@triton.jit
def _at_tap(x, i_tap, BLOCK_TAPS: tl.constexpr):
    """A column of [BLOCK, BLOCK_TAPS], float32: a sum of one number and zeros."""
    tap = tl.arange(0, BLOCK_TAPS)[None, :]
    return tl.sum(tl.where(tap == i_tap, x.to(tl.float32), 0.0), 1)


@triton.jit
def open_stream(tokens, state, sequence):
    """Where a step that verifies finds a sequence's tokens: what the functions below call a
    `stream`, and how many new ones there are. `tokens` are the rows of all and those of all
    records, with their strides, `state` the sequence's own."""
    projected, projected_stride, records, row_stride, record_stride = tokens
    begin, length, fold, row, i_sequence = sequence
    first = projected + tl.load(begin + i_sequence).to(tl.int64) * projected_stride
    recorded = records + tl.load(row + i_sequence).to(tl.int64) * row_stride
    num_folded = tl.load(fold + i_sequence)
    stream = first, projected_stride, recorded, record_stride, state, num_folded
    return stream, tl.load(length + i_sequence)


@triton.jit
def stream_window(stream, channel, is_channel, place, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr):
    """[BLOCK, BLOCK_TAPS], the inputs up to a place of a step that verifies, oldest first: of the
    state, of records, of the step's tokens."""
    tokens, projected_stride, row, record_stride, state, num_folded = stream
    tap = tl.arange(0, BLOCK_TAPS)[None, :]
    source, at = place - (TAPS - 1) + tap, channel[:, None]
    held = is_channel[:, None] & (tap < TAPS)
    new = held & (source >= num_folded)
    window = tl.load(tokens + (source - num_folded) * projected_stride + at, new, 0)
    folded = held & (source >= 0) & (source < num_folded)
    recorded = tl.load(row + source * record_stride + at, folded, 0)
    old = tl.load(state + at * (TAPS - 1) + TAPS - 1 + source, held & (source < 0), 0)
    return tl.where(new, window, tl.where(folded, recorded, old.to(window.dtype)))


@triton.jit
def convolve_place(
    stream,
    weight,
    bias,
    channel,
    is_channel,
    place,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """As `convolve_one`, of the input at a place."""
    window = stream_window(stream, channel, is_channel, place, TAPS, BLOCK_TAPS)
    return _convolve_window(window, weight, bias, channel, is_channel, TAPS, BLOCK_TAPS)


@triton.jit
def load_recorded(stream, column, is_column, place):
    """What is recorded of a draft and no input of the convolution, at a place: from records or from
    the step's tokens. Either of two pointers is no pointer that AMD's compiler follows."""
    tokens, stride, row, record_stride, _, num_folded = stream
    new = is_column & (place >= num_folded)
    found = tl.load(tokens + (place - num_folded) * stride + column, new, 0)
    return found + tl.load(
        row + place * record_stride + column, is_column & (place < num_folded), 0
    )


@triton.jit
def record_drafts(stream, column, is_column, num_new):
    """Put what columns of the step's drafts hold in place of what is recorded."""
    tokens, stride, row, record_stride, _, _ = stream
    for draft in range(num_new - 1):
        inputs = tl.load(tokens + (draft + 1) * stride + column, is_column, 0)
        tl.store(row + draft * record_stride + column, inputs, is_column)


@triton.jit
def keep_window(state, window, channel, is_channel, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr):
    """Write the inputs that the next token sees."""
    tap = tl.arange(0, BLOCK_TAPS)[None, :]
    is_kept = is_channel[:, None] & (tap > 0) & (tap < TAPS)
    at = channel[:, None] * (TAPS - 1) + tap - 1
    tl.store(state + at, window.to(state.dtype.element_ty), is_kept)


@triton.jit
def move_on(
    stream,
    target,
    column,
    is_column,
    is_channel,
    place,
    num_new,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
):
    """Leave what the next step reads of a sequence's columns: of those that are channels the inputs
    up to a place, in the state `target`; then `record_drafts`."""
    window = stream_window(stream, column, is_channel, place, TAPS, BLOCK_TAPS)
    # Both are read before either is written: slot_in may be slot_out.
    tl.debug_barrier()
    keep_window(target, window, column, is_channel, TAPS, BLOCK_TAPS)
    record_drafts(stream, column, is_column, num_new)
