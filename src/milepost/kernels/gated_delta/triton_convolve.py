"""Short convolution of many tokens a sequence, with SiLU, L2 norms and states in and out.

Legend: T tokens, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.conv.triton_parts import (
    first_window,
    keep_inputs,
    load_rows,
    load_taps,
    slide,
)
from milepost.kernels.gated_delta.triton_parts import unit_scale
from milepost.kernels.gated_delta.triton_shapes import PrefillShapes
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.layout.chunks import TILE, UNSPECIALISED, ChunkLayout
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import silu
from milepost.kernels.platform.tiles import cdiv, next_power_of_2

_ROWS = 32
"""Of a tile in one program; no fewer than the convolution is wide."""
_BATCH = 8
"""Of them are loaded at a time."""
_CHANNELS = 512
"""Of heads in one program."""


def convolve(
    projected: Tensor,
    weights: GatedDeltaWeights,
    layout: ChunkLayout,
    shapes: PrefillShapes,
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    query_key: Tensor,
    values: Tensor,
) -> None:
    """Write `query_key` [2 * G, T, K] and `values` [V, T, W], ready for the delta rule; states of
    exports and final ones go to `pool`."""
    parts = TILE // _ROWS
    block = next_power_of_2(max(shapes.key_dim, shapes.value_dim))
    num_heads = max(2 * shapes.key_heads, shapes.value_heads)
    each = min(max(1, _CHANNELS // block), next_power_of_2(num_heads))
    programs = cdiv(2 * shapes.key_heads, each) + cdiv(shapes.value_heads, each)
    _conv_kernel[(programs, len(layout.tile_sequence) * parts)](
        projected,
        projected.stride(0),
        len(projected),
        weights.conv,
        pool,
        pool.stride(0),
        slot_in,
        slot_out,
        layout.sequence_begin,
        layout.tile_sequence,
        layout.tile_begin,
        layout.tile_export,
        layout.export_end,
        layout.export_slot,
        query_key,
        values,
        **shapes.heads,
        TAPS=shapes.conv_width,
        BLOCK_TAPS=next_power_of_2(shapes.conv_width),
        VALUE_HEADS=shapes.value_heads,
        BLOCK=block,
        EACH=each,
        ROWS=_ROWS,
        BATCH=_BATCH,
        PARTS=parts,
        num_warps=4,
        **OVERLAPPED,
    )


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def _conv_kernel(
    projected,
    projected_stride,
    num_tokens,
    weight,
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
    query_key,
    values,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    BATCH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """ROWS tokens of EACH heads of a tile: convolution, SiLU and L2 norm into `query_key`
    [2 * G, T, K] or `values` [V, T, W]. The first rows also write the convolution states of the
    tile's exports, and in a sequence's first tile the final state: they alone read the old one."""
    launch_dependents()
    tile, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    sequence = tl.load(tile_sequence + tile)
    # Heads of queries and keys, or of values.
    key_programs: tl.constexpr = (2 * KEY_HEADS + EACH - 1) // EACH
    is_value = tl.program_id(0) >= key_programs
    own = (tl.program_id(0) - tl.where(is_value, key_programs, 0)) * EACH + tl.arange(0, EACH)
    size, num_heads = KEY_DIM, 2 * KEY_HEADS
    if is_value:
        size, num_heads = VALUE_DIM, VALUE_HEADS
    column = tl.arange(0, BLOCK)[None, :]
    channel = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM, 0) + own[:, None] * size + column
    is_channel = (own < num_heads)[:, None] & (column < size)
    taps = load_taps(weight, channel, is_channel, TAPS)
    wait_for_inputs()
    if sequence < 0:
        return
    begin, end = tl.load(sequence_begin + sequence), tl.load(sequence_begin + sequence + 1)
    part_from = tl.load(tile_begin + tile) + part * ROWS
    if part_from >= end:
        return
    state = pool + tl.load(slot_in + sequence).to(tl.int64) * slot_stride
    inputs = projected, projected_stride
    window = first_window(*inputs, state, channel, is_channel, begin, part_from, TAPS)
    p_output = query_key
    if is_value:
        p_output = values
    o_output = own.to(tl.int64)[:, None] * num_tokens * size + column
    head = tl.where(is_value, 2 * KEY_HEADS, own)[:, None]
    for first in range(part_from, tl.minimum(end, part_from + ROWS), BATCH):
        p_inputs = projected + tl.cast(first, tl.int64) * projected_stride + channel
        rows = load_rows(p_inputs, projected_stride, is_channel, end - first, BATCH)
        for row in tl.static_range(BATCH):
            x, window = slide(window, taps, rows[row].to(tl.float32), TAPS)
            x = silu(x)
            x *= unit_scale(x, head, KEY_HEADS, KEY_DIM, 1)
            at = o_output + tl.cast(first + row, tl.int64) * size
            is_real = is_channel & (row < end - first)
            tl.store(p_output + at, x.to(p_output.dtype.element_ty), is_real)

    if part > 0:
        return
    first_export, last_export = tl.load(tile_export + tile), tl.load(tile_export + tile + 1)
    flat, is_flat = tl.reshape(channel, [EACH * BLOCK]), tl.reshape(is_channel, [EACH * BLOCK])
    args = projected, projected_stride, state, pool, slot_stride, flat, is_flat, begin
    for export in range(first_export, last_export):
        slot, stop = tl.load(export_slot + export), tl.load(export_end + export)
        keep_inputs(*args, stop, slot, TAPS, BLOCK_TAPS)
    if part_from == begin:
        keep_inputs(*args, end, tl.load(slot_out + sequence), TAPS, BLOCK_TAPS)
