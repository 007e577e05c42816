"""Short convolutions of many tokens a sequence, with SiLU, and states in and out.

A program computes some rows of a tile. The first rows of a tile also write the convolution states
of the tile's exports, and in a sequence's first tile the final state: they alone read the old one.

Legend: T tokens, C channels, J taps, U units, V heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.layout.chunks import TILE
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import silu
from milepost.kernels.platform.tensors import cdiv, next_power_of_2
from milepost.kernels.recurrent.structures import Mixer, PrefillTiles, SlotStates

_ROWS, _HEAD_ROWS = 16, 32
"""Rows of a tile per program, no fewer than the convolution has taps."""
_CHANNELS = 512
"""Channels of one program."""
_TILE, _BATCH = tl.constexpr(TILE), tl.constexpr(8)
"""Rows of a tile, and rows loaded at a time."""


def convolve(mixer: Mixer, pool: SlotStates, tiles: PrefillTiles) -> Tensor:
    """Returns all channels [T, C] after the convolution and SiLU; updates convolution states and
    exports."""
    sizes, like = mixer.sizes, mixer.inputs.mixed.base
    mixed: Tensor = like.new_empty(len(like), sizes.channels)
    grid = cdiv(sizes.channels, _CHANNELS), len(tiles.sequence) * (TILE // _ROWS)
    operands = mixer.inputs.mixed, len(like), mixer.weights, pool, tiles, mixed, None
    options = {"num_warps": 4, **OVERLAPPED}
    _conv_kernel[grid](*operands, SIZES=sizes, EACH=1, BLOCK=_CHANNELS, ROWS=_ROWS, **options)
    return mixed


def convolve_heads(
    mixer: Mixer, pool: SlotStates, tiles: PrefillTiles, query_key: Tensor, values: Tensor
) -> None:
    """Writes `query_key` [2 * U, T, K], as unit vectors, and `values` [V, T, W] for the delta rule;
    updates convolution states and exports."""
    sizes, rows = mixer.sizes, mixer.inputs.mixed
    block = next_power_of_2(max(sizes.shared, sizes.own))
    num_heads = max(2 * sizes.units, sizes.heads)
    each = min(max(1, _CHANNELS // block), next_power_of_2(num_heads))
    programs = cdiv(2 * sizes.units, each) + cdiv(sizes.heads, each)
    grid = programs, len(tiles.sequence) * (TILE // _HEAD_ROWS)
    operands = rows, len(rows.base), mixer.weights, pool, tiles, query_key, values
    options = {"num_warps": 4, **OVERLAPPED}
    _conv_kernel[grid](*operands, SIZES=sizes, EACH=each, BLOCK=block, ROWS=_HEAD_ROWS, **options)


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["tiles"])
def _conv_kernel(
    rows,
    num_tokens,
    weights,
    pool,
    tiles,
    output,
    values,
    SIZES: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Convolves ROWS tokens of some channels of a tile, with SiLU, into `output` [T, C]; or those
    of EACH heads, with L2 norm, into `output` [2 * U, T, K] or `values` [V, T, W]."""
    launch_dependents()
    TAPS: tl.constexpr = SIZES.taps
    PARTS: tl.constexpr = _TILE // ROWS
    tile, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    sequence = tl.load(tiles.sequence + tile)
    if SIZES.norms_heads:
        head, size, is_value, channel, is_channel = _find_heads(SIZES, EACH, BLOCK)
    else:
        channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_channel = channel < SIZES.channels
    taps = load_taps(weights.conv, channel, is_channel, TAPS)
    if not SIZES.norms_heads:
        b_bias = tl.zeros([BLOCK], tl.float32)
        if weights.conv_bias is not None:
            b_bias += tl.load(weights.conv_bias + channel, is_channel, 0).to(tl.float32)
    wait_for_inputs()
    if sequence < 0:
        return
    begin = tl.load(tiles.sequence_begin + sequence)
    end = tl.load(tiles.sequence_begin + sequence + 1)
    part_from = tl.load(tiles.begin + tile) + part * ROWS
    if part_from >= end:
        return
    state = pool.base + tl.load(tiles.slot_in + sequence).to(tl.int64) * pool.stride
    window = first_window(rows, state, channel, is_channel, begin, part_from, TAPS)
    p_output = output
    if SIZES.norms_heads:
        if is_value:
            p_output = values
        o_output = head.to(tl.int64)[:, None] * num_tokens * size + tl.arange(0, BLOCK)[None, :]
        head = tl.where(is_value, 2 * SIZES.units, head)[:, None]
    for first in range(part_from, tl.minimum(end, part_from + ROWS), _BATCH):
        p_inputs = rows.base + tl.cast(first, tl.int64) * rows.stride + channel
        p_mixed = output + tl.cast(first, tl.int64) * SIZES.channels + channel
        b_rows = load_rows(p_inputs, rows.stride, is_channel, end - first, _BATCH)
        for row in tl.static_range(_BATCH):
            x, window = slide(window, taps, b_rows[row].to(tl.float32), TAPS)
            p_row = p_mixed + row * SIZES.channels
            if SIZES.norms_heads:
                x = silu(x)
                x *= unit_scale(x, head, SIZES.units, SIZES.shared)
                p_row = p_output + (o_output + tl.cast(first + row, tl.int64) * size)
            else:
                x = silu(x + b_bias)
            is_real = is_channel & (row < end - first)
            tl.store(p_row, x.to(p_output.dtype.element_ty), is_real)
    if part == 0:
        flat, is_flat = tl.reshape(channel, [EACH * BLOCK]), tl.reshape(is_channel, [EACH * BLOCK])
        keep_states(rows, state, pool, tiles, tile, flat, is_flat, part_from, TAPS)


@triton.jit
def _find_heads(SIZES: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a program's heads, of queries and keys or of values: their numbers, their size,
    whether they are values, and their channels [EACH, BLOCK]."""
    NUM_KEYS: tl.constexpr = 2 * SIZES.units
    key_programs: tl.constexpr = (NUM_KEYS + EACH - 1) // EACH
    is_value = tl.program_id(0) >= key_programs
    head = (tl.program_id(0) - tl.where(is_value, key_programs, 0)) * EACH + tl.arange(0, EACH)
    size, num_heads = SIZES.shared, NUM_KEYS
    if is_value:
        size, num_heads = SIZES.own, SIZES.units * SIZES.group
    column = tl.arange(0, BLOCK)[None, :]
    channel = tl.where(is_value, NUM_KEYS * SIZES.shared, 0) + head[:, None] * size + column
    return head, size, is_value, channel, (head < num_heads)[:, None] & (column < size)


@triton.jit
def unit_scale(x, head, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr):
    """Returns the factor for rows of `x` to be unit vectors if `head` is a key's; a query's is
    shorter by KEY_DIM ** -0.5; a value stays as it is."""
    scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + 1e-6)
    scale *= tl.where(head < KEY_HEADS, KEY_DIM**-0.5, 1.0)
    return tl.where(head < 2 * KEY_HEADS, scale, 1.0)


@triton.jit
def first_window(rows, state, channel, is_channel, begin, part_from, TAPS: tl.constexpr):
    """Returns the TAPS - 1 inputs before token `part_from` of a sequence whose first is `begin`,
    oldest first, each of `channel`'s shape, float32; what precedes `begin` is in `state`."""
    window = ()
    is_first = part_from == begin
    p_row = rows.base + part_from.to(tl.int64) * rows.stride + channel
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(state + channel * (TAPS - 1) + tap, is_channel & is_first, 0)
        inputs = tl.load(p_row + (tap - (TAPS - 1)) * rows.stride, is_channel & ~is_first, 0)
        b_input = inputs.to(tl.float32) + old.to(tl.float32)
        window = window + (b_input,)  # noqa: RUF005  Triton unpacks no tuples
    return window


@triton.jit
def load_taps(weight, channel, is_channel, TAPS: tl.constexpr):
    """Returns the convolution's weights for each tap, of `channel`'s shape, float32."""
    taps = ()
    for tap in tl.static_range(TAPS):
        b_tap = tl.load(weight + channel * TAPS + tap, is_channel, 0).to(tl.float32)
        taps = taps + (b_tap,)  # noqa: RUF005
    return taps


@triton.jit
def load_rows(p_inputs, stride, is_channel, num_rows, BATCH: tl.constexpr):
    """Returns BATCH rows of inputs, zeros after the first `num_rows`. All are loaded before
    anything is stored, since the compiler assumes that stores may change later loads."""
    rows = ()
    for row in tl.static_range(BATCH):
        b_row = tl.load(p_inputs + row * stride, is_channel & (row < num_rows), 0)
        rows = rows + (b_row,)  # noqa: RUF005
    return rows


@triton.jit
def slide(window, taps, newest, TAPS: tl.constexpr):
    """Returns the convolution of `window` and the input after it; and the next window."""
    seen = window + (newest,)  # noqa: RUF005
    x = seen[0] * taps[0]
    following = ()
    for tap in tl.static_range(1, TAPS):
        x += seen[tap] * taps[tap]
        following = following + (seen[tap],)  # noqa: RUF005
    return x, following


@triton.jit
def keep_states(rows, state, pool, tiles, tile, channel, is_channel, part_from, TAPS: tl.constexpr):
    """Writes the states of a tile's exports, and the sequence's final state if the tile is its
    first."""
    sequence = tl.load(tiles.sequence + tile)
    begin = tl.load(tiles.sequence_begin + sequence)
    args = rows, state, pool, channel, is_channel, begin
    for export in range(tl.load(tiles.export + tile), tl.load(tiles.export + tile + 1)):
        slot, stop = tl.load(tiles.export_slot + export), tl.load(tiles.export_end + export)
        _keep_inputs(*args, stop, slot, TAPS)
    if part_from == begin:
        end = tl.load(tiles.sequence_begin + sequence + 1)
        _keep_inputs(*args, end, tl.load(tiles.slot_out + sequence), TAPS)


@triton.jit
def _keep_inputs(rows, state, pool, channel, is_channel, begin, stop, slot, TAPS: tl.constexpr):
    """Writes the last TAPS - 1 inputs before token `stop` to `slot`; those before token `begin` are
    in the state that was read."""
    tap = tl.arange(0, triton.next_power_of_2(TAPS))[None, :]
    source = stop - (TAPS - 1) + tap
    is_kept = is_channel[:, None] & (tap < TAPS - 1)
    at = source.to(tl.int64) * rows.stride + channel[:, None]
    inputs = tl.load(rows.base + at, is_kept & (source >= begin), 0)
    of_channel = channel[:, None] * (TAPS - 1)
    before = of_channel + source - begin + (TAPS - 1)
    inputs += tl.load(state + before, is_kept & (source < begin), 0).to(inputs.dtype)
    tl.debug_barrier()
    written = pool.base + slot.to(tl.int64) * pool.stride
    tl.store(written + of_channel + tap, inputs.to(pool.base.dtype.element_ty), is_kept)
