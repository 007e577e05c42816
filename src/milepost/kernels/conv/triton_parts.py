"""A short convolution's rows and states, for the Triton kernels that have one.

Legend: C channels, J taps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.activations import silu


@triton.jit
def convolve_rows(
    projected,
    projected_stride,
    weight,
    state,
    channel,
    is_channel,
    row,
    begin,
    end,
    part_from,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """[ROWS, BLOCK] float32, the convolution of tokens from `part_from` on, at most up to `end`, of
    a sequence whose first is `begin`; what precedes that is in `state`."""
    x = tl.zeros([ROWS, BLOCK], tl.float32)
    if part_from == begin:
        # The oldest inputs go first, as they do where all inputs are tokens: equal bits.
        for tap in tl.static_range(TAPS - 1):
            inputs = tl.zeros([ROWS, BLOCK], tl.float32)
            for kept in tl.static_range(TAPS - 1):
                old = tl.load(state + channel * (TAPS - 1) + kept, is_channel, 0).to(tl.float32)
                inputs = tl.where((row == kept - tap)[:, None], old[None, :], inputs)
            taps = tl.load(weight + channel * TAPS + tap, is_channel, 0).to(tl.float32)
            x += inputs * taps[None, :]
    in_rows = (row < end - part_from)[:, None] & is_channel[None, :]
    first_row = projected + part_from.to(tl.int64) * projected_stride
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1) + tap
        at = source[:, None] * projected_stride + channel[None, :]
        inputs = tl.load(first_row + at, in_rows & (source >= begin - part_from)[:, None], 0)
        taps = tl.load(weight + channel * TAPS + tap, is_channel, 0).to(tl.float32)
        x += inputs.to(tl.float32) * taps[None, :]
    return x


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
    inputs that it saw, [channels, taps]."""
    tap = tl.arange(0, BLOCK_TAPS)[None, :]
    o_channel = channel[:, None]
    was_kept = is_channel[:, None] & (tap < TAPS - 1)
    window = tl.load(state + o_channel * (TAPS - 1) + tap, was_kept, 0)
    newest = tl.load(token + channel, is_channel, 0)
    window = tl.where(tap == TAPS - 1, newest[:, None], window.to(newest.dtype))
    taps = tl.load(weight + o_channel * TAPS + tap, is_channel[:, None] & (tap < TAPS), 0)
    x = tl.sum(window.to(tl.float32) * taps.to(tl.float32), 1)
    if bias is not None:
        x += tl.load(bias + channel, is_channel, 0).to(tl.float32)
    return silu(x), window


@triton.jit
def keep_window(state, window, channel, is_channel, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr):
    """Write the inputs that the next token sees."""
    tap = tl.arange(0, BLOCK_TAPS)[None, :]
    is_kept = is_channel[:, None] & (tap > 0) & (tap < TAPS)
    at = channel[:, None] * (TAPS - 1) + tap - 1
    tl.store(state + at, window.to(state.dtype.element_ty), is_kept)
