"""A short convolution's rows and states, for the Triton kernels that prefill.

Legend: C channels, J taps.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
