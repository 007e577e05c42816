"""The rows of a decoding sequence, and the short convolution over them.

    place     0 .. F - 1    F          F + 1 .. F + N - 1
    token     records       its own    drafts

If VERIFIES is false, a sequence has a single token, at place 0, and no records.

Legend: F folded and N new tokens, J taps, B channels of a program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from milepost.kernels.platform.numerics import silu


class TokenRows(NamedTuple):
    """Some columns of a sequence's tokens, recorded tokens first, then those of the step."""

    token: Any
    """Pointer to the step's first token."""
    stride: Any
    record: Any
    """Pointer to the first record; unused if nothing is recorded."""
    record_stride: Any
    num_folded: Any


@triton.jit
def open_stream(rows, steps, i_sequence, VERIFIES: tl.constexpr):
    """Returns the `TokenRows` of these columns."""
    if VERIFIES:
        sequences, records = steps.sequences, steps.records
        first = tl.load(sequences.begin + i_sequence).to(tl.int64)
        row = tl.load(sequences.row + i_sequence).to(tl.int64)
        record = records.base + row * records.row_stride + rows.recorded
        num_folded = tl.load(sequences.fold + i_sequence)
        token = rows.base + first * rows.stride
        stream = TokenRows(token, rows.stride, record, records.stride, num_folded)
    else:
        token = rows.base + i_sequence * rows.stride
        stream = TokenRows(token, rows.stride, token, 0, 0)
    return stream


@triton.jit
def load_place(stream, column, place, VERIFIES: tl.constexpr):
    """Returns columns of the token at a place; `column` may be one or a block, without padding."""
    if VERIFIES:
        # Two masked loads, since AMD's compiler cannot analyse a pointer that is one of two.
        is_new = place >= stream.num_folded
        p_new = stream.token + (place - stream.num_folded) * stream.stride + column
        x = tl.load(p_new, is_new, 0)
        x += tl.load(stream.record + place * stream.record_stride + column, not is_new, 0)
    else:
        x = tl.load(stream.token + column)
    return x


@triton.jit
def load_window(
    stream, state, channel, is_channel, place, TAPS: tl.constexpr, VERIFIES: tl.constexpr
):
    """Returns the inputs of the convolution up to a place, oldest first: [B, next power of 2 of J].

    They come from the convolution's `state`, from records, and from the step's tokens.
    """
    tap, at = tl.arange(0, triton.next_power_of_2(TAPS))[None, :], channel[:, None]
    is_tap = is_channel[:, None] & (tap < TAPS)
    source = place - (TAPS - 1) + tap
    is_new = is_tap & (source >= stream.num_folded)
    p_new = stream.token + (source - stream.num_folded) * stream.stride + at
    window = tl.load(p_new, is_new, 0)
    old = tl.load(state + at * (TAPS - 1) + TAPS - 1 + source, is_tap & (source < 0), 0)
    window = tl.where(source < 0, old.to(window.dtype), window)
    if VERIFIES:
        is_folded = is_tap & (source >= 0) & (source < stream.num_folded)
        recorded = tl.load(stream.record + source * stream.record_stride + at, is_folded, 0)
        window = tl.where(is_folded, recorded, window)
    return window


@triton.jit
def convolve(window, weight, bias, channel, is_channel, TAPS: tl.constexpr):
    """Returns the convolution of a window, through SiLU: float32 [B].

    Taps are added one after the other whatever the threads' layout, so that all kernels return the
    same bits.
    """
    tap = tl.arange(0, triton.next_power_of_2(TAPS))[None, :]
    is_tap = is_channel[:, None] & (tap < TAPS)
    taps = tl.load(weight + channel[:, None] * TAPS + tap, is_tap, 0)
    x = _at_tap(window, 0, TAPS) * _at_tap(taps, 0, TAPS)
    for i_tap in tl.static_range(1, TAPS):
        x = tl.fma(_at_tap(window, i_tap, TAPS), _at_tap(taps, i_tap, TAPS), x)
    if bias is not None:
        x += tl.load(bias + channel, is_channel, 0).to(tl.float32)
    return silu(x)


@triton.jit
def _at_tap(x, i_tap, TAPS: tl.constexpr):
    """Returns one column of `x` [B, next power of 2 of J] in float32, as a sum of one number and
    zeros."""
    tap = tl.arange(0, triton.next_power_of_2(TAPS))[None, :]
    return tl.sum(tl.where(tap == i_tap, x.to(tl.float32), 0.0), 1)


@triton.jit
def keep_window(state, window, channel, is_channel, TAPS: tl.constexpr):
    """Writes the inputs that the next token's window needs to `state`."""
    tap = tl.arange(0, triton.next_power_of_2(TAPS))[None, :]
    is_kept = is_channel[:, None] & (tap > 0) & (tap < TAPS)
    at = channel[:, None] * (TAPS - 1) + tap - 1
    tl.store(state + at, window.to(state.dtype.element_ty), is_kept)


@triton.jit
def record_drafts(stream, column, is_column, num_new):
    """Replaces the records by these columns of the step's drafts."""
    for draft in range(num_new - 1):
        x = tl.load(stream.token + (draft + 1) * stream.stride + column, is_column, 0)
        tl.store(stream.record + draft * stream.record_stride + column, x, is_column)
