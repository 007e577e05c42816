"""What Mamba2's recurrence reads: convolved x, B and C; time steps, and their decays added up.

Legend: T tokens, C channels, H heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.conv.triton_parts import (
    first_window,
    keep_inputs,
    load_rows,
    load_taps,
    slide,
)
from milepost.kernels.layout.chunks import UNSPECIALISED
from milepost.kernels.platform.launches import launch_dependents, wait_for_inputs
from milepost.kernels.platform.numerics import LOG2_E, silu
from milepost.kernels.recurrent.rules.mamba2 import time_step


@triton.jit(do_not_specialize_on_alignment=UNSPECIALISED)
def convolve(
    projected,
    projected_stride,
    weight,
    bias,
    pool,
    slot_stride,
    slot_in,
    slot_out,
    sequence_begin,
    tile_sequence,
    tile_begin,
    tile_export,
    export_end,
    export_slot,
    mixed,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BATCH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """ROWS tokens of some channels of a tile: convolution and SiLU into `mixed` [T, C]. The first
    rows also write the convolution states of the tile's exports, and in a sequence's first tile the
    final state: they alone read the old one."""
    launch_dependents()
    i_tile, i_part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    sequence = tl.load(tile_sequence + i_tile)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    taps = load_taps(weight, channel, is_channel, TAPS)
    b_bias = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        b_bias += tl.load(bias + channel, is_channel, 0).to(tl.float32)
    wait_for_inputs()
    if sequence < 0:
        return
    begin, end = tl.load(sequence_begin + sequence), tl.load(sequence_begin + sequence + 1)
    part_from = tl.load(tile_begin + i_tile) + i_part * ROWS
    if part_from >= end:
        return
    state = pool + tl.load(slot_in + sequence).to(tl.int64) * slot_stride
    part = begin, part_from
    window = first_window(projected, projected_stride, state, channel, is_channel, *part, TAPS)
    for first in range(part_from, tl.minimum(end, part_from + ROWS), BATCH):
        p_inputs = projected + tl.cast(first, tl.int64) * projected_stride + channel
        p_mixed = mixed + tl.cast(first, tl.int64) * CHANNELS + channel
        rows = load_rows(p_inputs, projected_stride, is_channel, end - first, BATCH)
        for row in tl.static_range(BATCH):
            x, window = slide(window, taps, rows[row].to(tl.float32), TAPS)
            is_row = is_channel & (first + row < end)
            b_mixed = silu(x + b_bias).to(mixed.dtype.element_ty)
            tl.store(p_mixed + row * CHANNELS, b_mixed, is_row)

    if i_part > 0:
        return
    args = projected, projected_stride, state, pool, slot_stride, channel, is_channel, begin
    for export in range(tl.load(tile_export + i_tile), tl.load(tile_export + i_tile + 1)):
        slot, stop = tl.load(export_slot + export), tl.load(export_end + export)
        keep_inputs(*args, stop, slot, TAPS, BLOCK_TAPS)
    if part_from == begin:
        keep_inputs(*args, end, tl.load(slot_out + sequence), TAPS, BLOCK_TAPS)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def discretise(
    projected,
    projected_stride,
    num_tokens,
    rate,
    dt_bias,
    dt_low,
    dt_high,
    chunk_begin,
    chunk_size,
    steps,
    decay_sums,
    to_end,
    decays,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of some heads of a chunk, all float32: time steps and their log decays (of base 2) added up
    from the chunk's begin, `steps` and `decay_sums` [H, T]; steps decayed up to the chunk's end,
    `to_end` [H, T], and the whole chunk's `decays` [N, H]."""
    launch_dependents()
    i_chunk = tl.program_id(1)
    size = tl.load(chunk_size + i_chunk)
    wait_for_inputs()
    if size <= 0:
        return
    token = tl.load(chunk_begin + i_chunk).to(tl.int64) + tl.arange(0, C)
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_head = head < HEADS
    is_real = (tl.arange(0, C) < size)[:, None] & is_head[None, :]
    inputs = tl.load(projected + token[:, None] * projected_stride + head[None, :], is_real, 0)
    bias = tl.load(dt_bias + head, is_head, 0)[None, :]
    b_steps = tl.where(is_real, time_step(inputs, bias, dt_low, dt_high), 0)
    b_rate = tl.load(rate + head, is_head, 0) * LOG2_E
    b_sums = tl.cumsum(b_steps * b_rate[None, :], 0)
    at = head.to(tl.int64)[None, :] * num_tokens + token[:, None]
    tl.store(steps + at, b_steps, is_real)
    tl.store(decay_sums + at, b_sums, is_real)
    # Tokens past the chunk's end decay nothing.
    total = tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], b_sums, 0), 0)
    tl.store(to_end + at, b_steps * tl.exp2(total[None, :] - b_sums), is_real)
    tl.store(decays + i_chunk * HEADS + head, tl.exp2(total), is_head)
