"""Short convolution of many tokens a sequence, with SiLU, L2 norms and states in and out.

Legend: T tokens, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.activations import silu
from milepost.kernels.chunks import TILE, UNSPECIALISED, ChunkLayout
from milepost.kernels.conv.triton_parts import convolve_rows, keep_inputs
from milepost.kernels.gated_delta.triton_parts import head_channels, unit_scale
from milepost.kernels.gated_delta.triton_shapes import PrefillShapes
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

_ROWS = 32
"""Of a tile in one program; no fewer than the convolution is wide."""


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
    num_heads = 2 * shapes.key_heads + shapes.value_heads
    _conv_kernel[(num_heads, len(layout.tile_sequence) * parts)](
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
        BLOCK_TAPS=triton.next_power_of_2(shapes.conv_width),
        BLOCK=triton.next_power_of_2(max(shapes.key_dim, shapes.value_dim)),
        ROWS=_ROWS,
        PARTS=parts,
        num_warps=4,
        **OVERLAPPED,
    )


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
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """ROWS tokens of one head of a tile: convolution, SiLU and L2 norm into `query_key`
    [2 * G, T, K] or `values` [V, T, W]. The first rows also write the convolution states of the
    tile's exports, and in a sequence's first tile the final state: they alone read the old one."""
    let_next_start()
    head, tile = tl.program_id(0), tl.program_id(1) // PARTS
    sequence = tl.load(tile_sequence + tile)
    wait_for_inputs()
    if sequence < 0:
        return
    begin, end = tl.load(sequence_begin + sequence), tl.load(sequence_begin + sequence + 1)
    part = tl.program_id(1) % PARTS
    part_from = tl.load(tile_begin + tile) + part * ROWS
    if part_from >= end:
        return
    first, size = head_channels(head, KEY_HEADS, KEY_DIM, VALUE_DIM)
    column = tl.arange(0, BLOCK)
    channel, is_channel = first + column, column < size
    state = pool + tl.load(slot_in + sequence).to(tl.int64) * slot_stride

    row = tl.arange(0, ROWS)
    in_part = (row < end - part_from)[:, None] & is_channel[None, :]
    # fmt: off
    x = convolve_rows(
        projected, projected_stride, weight, state, channel, is_channel, row, begin, end, part_from,
        TAPS, BLOCK, ROWS,
    )
    # fmt: on
    x = silu(x)
    x *= unit_scale(x, head, KEY_HEADS, KEY_DIM, 1)
    tokens = tl.cast(num_tokens, tl.int64)
    if head < 2 * KEY_HEADS:
        key_at = (head * tokens + part_from) * KEY_DIM + row[:, None] * KEY_DIM + column[None, :]
        tl.store(query_key + key_at, x.to(query_key.dtype.element_ty), in_part)
    else:
        value_from = ((head - 2 * KEY_HEADS) * tokens + part_from) * VALUE_DIM
        value_at = value_from + row[:, None] * VALUE_DIM + column[None, :]
        tl.store(values + value_at, x.to(values.dtype.element_ty), in_part)

    if part > 0:
        return
    args = projected, projected_stride, state, pool, slot_stride, channel, is_channel, begin
    for export in range(tl.load(tile_export + tile), tl.load(tile_export + tile + 1)):
        slot, stop = tl.load(export_slot + export), tl.load(export_end + export)
        keep_inputs(*args, stop, slot, TAPS, BLOCK_TAPS)
    if part_from == begin:
        keep_inputs(*args, end, tl.load(slot_out + sequence), TAPS, BLOCK_TAPS)
