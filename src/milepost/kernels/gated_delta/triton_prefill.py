"""Gated DeltaNet's token mixer for many tokens a sequence, in four launches.

1. `_convolve`: a head of a tile in each program; queries, keys and values, ready for the rule.
2. `_solve`: a value head of a chunk; what doesn't depend on the state (Yang et al., Gated Delta
   Networks, arXiv 2412.06464, section 3.3): new values as if the state were zero, and what each
   token erases from the state.
3. `_carry`: some columns of a value head's state, from chunk to chunk of a sequence, in float32;
   leaves the state before every chunk, corrects the new values, writes exports and final states.
4. `_read`: a value head of a chunk; outputs from states and new values, then the gated norm.

A chunk's arithmetic depends on nothing but its tokens and the state before it: that is what makes
an export equal, bit for bit, the state that a prefill ending there leaves.

Legend: T tokens, S sequences, L tiles, N chunks, C = CHUNK tokens in a chunk, G key heads, V value
heads, K key_dim, W value_dim, J taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.gated_delta.chunks import CHUNK
from milepost.kernels.gated_delta.tiles import FusedLayout
from milepost.kernels.gated_delta.triton_parts import (
    gated_norm,
    head_channels,
    log_decay,
    sigmoid,
    silu,
    unit_scale,
)
from milepost.kernels.gated_delta.weights import MixerWeights

_CARRIED_COLUMNS = 32
"""Columns of the state in one program of `_carry`."""
_CONVOLVE = {"num_warps": 4}
_SOLVE = {"num_warps": 4}
_CARRY = {"num_warps": 4}
_READ = {"num_warps": 4}


def prefill(
    projected: Tensor,
    weights: MixerWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: FusedLayout,
) -> Tensor:
    """See `fused.prefill`."""
    num_tokens = len(projected)
    _, value_heads, key_dim, value_dim = recurrent_pool.shape
    channels, num_taps = weights.conv.shape
    key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
    num_chunks, num_sequences = len(layout.chunk_size), len(slot_out)
    pad = triton.next_power_of_2
    sizes = {"KEY_HEADS": key_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    # The matrix units take 16 columns at least.
    blocks = {
        "VALUE_HEADS": value_heads,
        "C": CHUNK,
        "BLOCK_K": max(16, pad(key_dim)),
        "BLOCK_W": max(16, pad(value_dim)),
    }

    query_key = projected.new_empty(2 * key_heads, num_tokens, key_dim)
    values = projected.new_empty(value_heads, num_tokens, value_dim)
    erase = projected.new_empty(value_heads, num_tokens, key_dim)
    decay_sums = projected.new_empty(value_heads, num_tokens, dtype=torch.float32)
    states = projected.new_empty(num_chunks, value_heads, value_dim, key_dim)
    output = projected.new_empty(num_tokens, value_heads * value_dim)

    _convolve[(2 * key_heads + value_heads, len(layout.tile_sequence))](
        projected,
        projected.stride(0),
        num_tokens,
        weights.conv,
        conv_pool,
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
        channels,
        **sizes,
        TAPS=num_taps,
        BLOCK_TAPS=pad(num_taps),
        BLOCK=pad(max(key_dim, value_dim)),
        TILE=CHUNK,
        **_CONVOLVE,
    )
    _solve[(value_heads, num_chunks)](
        projected,
        projected.stride(0),
        num_tokens,
        channels,
        weights.decay_rate,
        weights.decay_bias,
        layout.chunk_begin,
        layout.chunk_size,
        query_key,
        values,
        erase,
        decay_sums,
        **sizes,
        **blocks,
        **_SOLVE,
    )
    columns = min(_CARRIED_COLUMNS, blocks["BLOCK_W"])
    _carry[(triton.cdiv(value_dim, columns), value_heads, num_sequences)](
        num_tokens,
        layout.sequence_chunk,
        layout.chunk_begin,
        layout.chunk_size,
        layout.chunk_slot,
        slot_in,
        slot_out,
        recurrent_pool,
        query_key,
        values,
        erase,
        decay_sums,
        states,
        **sizes,
        **(blocks | {"BLOCK_W": columns}),
        **_CARRY,
    )
    _read[(value_heads, num_chunks)](
        projected,
        projected.stride(0),
        num_tokens,
        channels,
        weights.norm,
        weights.norm_eps,
        layout.chunk_begin,
        layout.chunk_size,
        query_key,
        values,
        decay_sums,
        states,
        output,
        **sizes,
        **blocks,
        **_READ,
    )
    return output


@triton.jit
def _convolve(
    projected,
    projected_stride,
    num_tokens,
    weight,
    pool,
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
    channels,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One head of a tile: convolution, SiLU and L2 norm into `query_key` [2 * G, T, K] or `values`
    [V, T, W], and the convolution states of the exports in it. A sequence's first tile also writes
    the final state, for it alone reads the one before."""
    head, tile = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequence + tile)
    if sequence < 0:
        return
    begin, end = tl.load(sequence_begin + sequence), tl.load(sequence_begin + sequence + 1)
    tile_from = tl.load(tile_begin + tile)
    first, size = head_channels(head, KEY_HEADS, KEY_DIM, VALUE_DIM)
    column = tl.arange(0, BLOCK)
    channel, is_channel = first + column, column < size
    state = pool + tl.load(slot_in + sequence).to(tl.int64) * channels * (TAPS - 1)

    row = tl.arange(0, TILE)
    in_tile = (row < end - tile_from)[:, None] & is_channel[None, :]
    x = tl.zeros([TILE, BLOCK], tl.float32)
    if tile_from == begin:
        # The oldest inputs go first, as they do where all inputs are tokens: equal bits.
        for tap in tl.static_range(TAPS - 1):
            inputs = tl.zeros([TILE, BLOCK], tl.float32)
            for kept in tl.static_range(TAPS - 1):
                old = tl.load(state + channel * (TAPS - 1) + kept, is_channel, 0).to(tl.float32)
                inputs = tl.where((row == kept - tap)[:, None], old[None, :], inputs)
            taps = tl.load(weight + channel * TAPS + tap, is_channel, 0).to(tl.float32)
            x += inputs * taps[None, :]
    first_row = projected + tile_from.to(tl.int64) * projected_stride
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1) + tap
        at = source[:, None] * projected_stride + channel[None, :]
        inputs = tl.load(first_row + at, in_tile & (source >= begin - tile_from)[:, None], 0)
        taps = tl.load(weight + channel * TAPS + tap, is_channel, 0).to(tl.float32)
        x += inputs.to(tl.float32) * taps[None, :]
    x = silu(x)
    x *= unit_scale(x, head, KEY_HEADS, KEY_DIM, 1)
    tokens = tl.cast(num_tokens, tl.int64)
    if head < 2 * KEY_HEADS:
        key_at = (head * tokens + tile_from) * KEY_DIM + row[:, None] * KEY_DIM + column[None, :]
        tl.store(query_key + key_at, x.to(query_key.dtype.element_ty), in_tile)
    else:
        value_from = ((head - 2 * KEY_HEADS) * tokens + tile_from) * VALUE_DIM
        value_at = value_from + row[:, None] * VALUE_DIM + column[None, :]
        tl.store(values + value_at, x.to(values.dtype.element_ty), in_tile)

    args = projected, projected_stride, state, pool, channels, channel, is_channel, begin
    for export in range(tl.load(tile_export + tile), tl.load(tile_export + tile + 1)):
        slot, stop = tl.load(export_slot + export), tl.load(export_end + export)
        _keep_inputs(*args, stop, slot, TAPS, BLOCK_TAPS)
    if tile_from == begin:
        _keep_inputs(*args, end, tl.load(slot_out + sequence), TAPS, BLOCK_TAPS)


@triton.jit
def _keep_inputs(
    projected,
    projected_stride,
    state,
    pool,
    channels,
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
    written = pool + slot.to(tl.int64) * channels * (TAPS - 1)
    tl.store(written + of_channel + tap, inputs.to(pool.dtype.element_ty), is_kept)


@triton.jit
def _solve(
    projected,
    projected_stride,
    num_tokens,
    channels,
    decay_rate,
    decay_bias,
    chunk_begin,
    chunk_size,
    query_key,
    values,
    erase,
    decay_sums,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One value head of a chunk: `values` become new values [V, T, W] as if the state before were
    zero; `erase` [V, T, K] times that state is what they then lose; `decay_sums` [V, T]."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    size = tl.load(chunk_size + chunk)
    if size <= 0:
        return
    begin = tl.load(chunk_begin + chunk).to(tl.int64)
    row = tl.arange(0, C)
    in_chunk = row < size
    gates_at = (begin + row) * projected_stride + channels + VALUE_HEADS * VALUE_DIM + head
    beta = sigmoid(tl.load(projected + gates_at, in_chunk, 0))
    rate, bias = tl.load(decay_rate + head), tl.load(decay_bias + head)
    inputs = tl.load(projected + gates_at + VALUE_HEADS, in_chunk, 0)
    decay = tl.cumsum(tl.where(in_chunk, log_decay(rate, bias, inputs), 0))
    head_row = head * tl.cast(num_tokens, tl.int64) + begin + row
    tl.store(decay_sums + head_row, decay, in_chunk)

    key_head = KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)
    key_row = key_head * tl.cast(num_tokens, tl.int64) + begin + row
    key_column, value_column = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_W)[None, :]
    in_keys = in_chunk[:, None] & (key_column < KEY_DIM)
    in_values = in_chunk[:, None] & (value_column < VALUE_DIM)
    key = tl.load(query_key + key_row[:, None] * KEY_DIM + key_column, in_keys, 0)

    products = tl.dot(key, tl.trans(key), input_precision="ieee")
    system = products * _pairwise_decay(decay, row, 1) * beta[:, None]
    inverse = _invert(system, row, C)
    value_at = head_row[:, None] * VALUE_DIM + value_column
    value = tl.load(values + value_at, in_values, 0)
    # The factors of the right sides' rows stand in the inverse's columns.
    by_value = (inverse * beta[None, :]).to(value.dtype)
    by_key = (inverse * (beta * tl.exp(decay))[None, :]).to(key.dtype)
    new_values = tl.dot(by_value, value, input_precision="ieee")
    tl.store(values + value_at, new_values.to(value.dtype), in_values)
    erased = tl.dot(by_key, key, input_precision="ieee")
    tl.store(erase + head_row[:, None] * KEY_DIM + key_column, erased.to(key.dtype), in_keys)


@triton.jit
def _pairwise_decay(decay, row, BELOW: tl.constexpr):
    """[C, C], decay from token j to token i where i >= j + BELOW, else 0."""
    is_later = row[:, None] >= row[None, :] + BELOW
    between = tl.where(is_later, decay[:, None] - decay[None, :], 0)
    return tl.where(is_later, tl.exp(between), 0)


@triton.jit
def _invert(lower, row, C: tl.constexpr):
    """Inverse of 1 + `lower` [C, C], strictly lower triangular, float32.

    Inverses of diagonal blocks grow to twice their size at each step: [[A, 0], [B, D]] has the
    inverse [[A', 0], [-D' B A', D']]. Unlike a product of powers of `lower` it never forms numbers
    that dwarf the result. Blocks up to 16 are a batch of small products.
    """
    tl.static_assert(C == 64)
    small = tl.arange(0, 16)
    block = tl.arange(0, 4)
    is_diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    blocks = tl.reshape(lower, [4, 16, 4, 16])
    blocks = tl.sum(tl.where(is_diagonal, blocks, 0), 2)
    # Tokens i and j are in one block of size 2 n, but not of size n, iff i ^ j is in [n, 2 n).
    apart = (small[:, None] ^ small[None, :])[None, :, :]
    inverses = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, blocks, 0)
    for power in tl.static_range(1, 4):
        off = tl.where((apart >> power) == 1, blocks, 0)
        moved = tl.dot(off, inverses, input_precision="tf32x3")
        inverses -= tl.dot(inverses, moved, input_precision="tf32x3")

    spread = tl.where(is_diagonal, tl.expand_dims(inverses, 2), 0)
    inverse = tl.reshape(spread, [C, C])
    apart = row[:, None] ^ row[None, :]
    for power in tl.static_range(4, 6):
        off = tl.where((apart >> power) == 1, lower, 0)
        moved = tl.dot(off, inverse, input_precision="tf32x3")
        inverse -= tl.dot(inverse, moved, input_precision="tf32x3")
    return inverse


@triton.jit
def _carry(
    num_tokens,
    sequence_chunk,
    chunk_begin,
    chunk_size,
    chunk_slot,
    slot_in,
    slot_out,
    pool,
    query_key,
    values,
    erase,
    decay_sums,
    states,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """BLOCK_W columns of a value head's state over all chunks of a sequence: `states` [N, V, W, K]
    before each chunk, `values` minus what the state erases of them, exports and the final state.

    The state is held transposed, [W, K], so that it stands left in its matrix product."""
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(sequence_chunk + sequence), tl.load(sequence_chunk + sequence + 1)
    if first == last:
        return
    row, key_column = tl.arange(0, C), tl.arange(0, BLOCK_K)
    value_column = block * BLOCK_W + tl.arange(0, BLOCK_W)
    is_key, is_value = key_column < KEY_DIM, value_column < VALUE_DIM
    in_state = is_value[:, None] & is_key[None, :]
    slot_size = VALUE_HEADS * KEY_DIM * VALUE_DIM
    pool_at = (head * KEY_DIM + key_column[None, :]) * VALUE_DIM + value_column[:, None]
    states_at = (head * VALUE_DIM + value_column[:, None]) * KEY_DIM + key_column[None, :]
    read = tl.load(slot_in + sequence).to(tl.int64) * slot_size
    state = tl.load(pool + read + pool_at, in_state, 0).to(tl.float32)
    tokens = tl.cast(num_tokens, tl.int64)
    key_row = (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * tokens

    for chunk in range(first, last):
        begin, size = tl.load(chunk_begin + chunk), tl.load(chunk_size + chunk)
        token, in_chunk = begin + row, row < size
        in_keys = in_chunk[:, None] & is_key[None, :]
        in_values = is_value[:, None] & in_chunk[None, :]
        head_row = head * tokens + token
        erased_at = head_row[:, None] * KEY_DIM + key_column[None, :]
        erased = tl.load(erase + erased_at, in_keys, 0)
        value_at = head_row[None, :] * VALUE_DIM + value_column[:, None]
        value = tl.load(values + value_at, in_values, 0)
        key_at = (key_row + token)[:, None] * KEY_DIM + key_column[None, :]
        key = tl.load(query_key + key_at, in_keys, 0)
        decay = tl.load(decay_sums + head_row, in_chunk, 0)
        total = tl.load(decay_sums + head * tokens + begin + size - 1)

        before = state.to(erased.dtype)
        tl.store(states + tl.cast(chunk, tl.int64) * slot_size + states_at, before, in_state)
        lost = tl.dot(before, tl.trans(erased), input_precision="ieee")
        new_values = value.to(tl.float32) - lost
        tl.store(values + value_at, new_values.to(value.dtype), in_values)
        decayed = (new_values * tl.exp(total - decay)[None, :]).to(key.dtype)
        state = state * tl.exp(total) + tl.dot(decayed, key, input_precision="ieee")
        slot = tl.load(chunk_slot + chunk).to(tl.int64)
        if slot >= 0:
            exported = state.to(pool.dtype.element_ty)
            tl.store(pool + slot * slot_size + pool_at, exported, in_state)

    tl.debug_barrier()
    written = tl.load(slot_out + sequence).to(tl.int64) * slot_size
    tl.store(pool + written + pool_at, state.to(pool.dtype.element_ty), in_state)


@triton.jit
def _read(
    projected,
    projected_stride,
    num_tokens,
    channels,
    norm_weight,
    norm_eps,
    chunk_begin,
    chunk_size,
    query_key,
    values,
    decay_sums,
    states,
    output,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One value head of a chunk: what queries read from the state before the chunk and from the
    chunk's own new values, through the gated norm into `output` [T, V * W]."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    size = tl.load(chunk_size + chunk)
    if size == 0:
        return
    token = tl.load(chunk_begin + chunk).to(tl.int64) + tl.arange(0, C)
    row = tl.arange(0, C)
    in_chunk = row < tl.abs(size)
    value_column, key_column = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_K)
    is_value, is_key = value_column < VALUE_DIM, key_column < KEY_DIM
    in_values = in_chunk[:, None] & is_value[None, :]
    gate_column = head * VALUE_DIM + value_column
    output_at = token[:, None] * (VALUE_HEADS * VALUE_DIM) + gate_column[None, :]
    if size < 0:
        zeros = tl.zeros([C, BLOCK_W], output.dtype.element_ty)
        tl.store(output + output_at, zeros, in_values)
        return

    tokens = tl.cast(num_tokens, tl.int64)
    query_row = (head // (VALUE_HEADS // KEY_HEADS)) * tokens + token
    in_keys = in_chunk[:, None] & is_key[None, :]
    query_at = query_row[:, None] * KEY_DIM + key_column[None, :]
    query = tl.load(query_key + query_at, in_keys, 0)
    key = tl.load(query_key + KEY_HEADS * tokens * KEY_DIM + query_at, in_keys, 0)
    decay = tl.load(decay_sums + head * tokens + token, in_chunk, 0)
    state_row = (chunk.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + value_column
    state_at = state_row[:, None] * KEY_DIM + key_column[None, :]
    state = tl.load(states + state_at, is_value[:, None] & is_key[None, :], 0)
    value_at = (head * tokens + token)[:, None] * VALUE_DIM + value_column[None, :]
    value = tl.load(values + value_at, in_values, 0)

    x = tl.dot(query, tl.trans(state), input_precision="ieee") * tl.exp(decay)[:, None]
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    scores = (scores * _pairwise_decay(decay, row, 0)).to(value.dtype)
    x += tl.dot(scores, value, input_precision="ieee")

    weight = tl.load(norm_weight + value_column, is_value, 0)[None, :]
    gate_at = token[:, None] * projected_stride + channels + gate_column[None, :]
    gate = tl.load(projected + gate_at, in_values, 0)
    x = gated_norm(x, weight, gate, norm_eps, VALUE_DIM, 1)
    tl.store(output + output_at, x.to(output.dtype.element_ty), in_values)
