"""The gated delta rule's states from chunk to chunk, and what is read from them.

Legend: T tokens, N chunks, C tokens in a chunk, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.gated_delta.triton_parts import UNSPECIALISED, gated_norm, pairwise_decay
from milepost.kernels.overlap import let_next_start, wait_for_inputs


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def carry(
    num_tokens,
    sequence_chunk,
    chunk_begin,
    chunk_size,
    chunk_slot,
    slot_in,
    slot_out,
    pool,
    slot_stride,
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
    """BLOCK_W columns of a value head's state over all chunks of a sequence: `states` [N, V, K, W]
    before each chunk, `values` minus what the state erases of them, exports and the final state."""
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    let_next_start()
    first, last = tl.load(sequence_chunk + sequence), tl.load(sequence_chunk + sequence + 1)
    if first == last:
        wait_for_inputs()
        return
    row, key_column = tl.arange(0, C), tl.arange(0, BLOCK_K)
    value_column = block * BLOCK_W + tl.arange(0, BLOCK_W)
    is_key, is_value = key_column < KEY_DIM, value_column < VALUE_DIM
    in_state = is_key[:, None] & is_value[None, :]
    state_size = VALUE_HEADS * KEY_DIM * VALUE_DIM
    state_at = (head * KEY_DIM + key_column[:, None]) * VALUE_DIM + value_column[None, :]
    source = tl.load(slot_in + sequence).to(tl.int64) * slot_stride
    # What an earlier step wrote may be read before the kernels of this one have ended.
    state = tl.load(pool + source + state_at, in_state, 0).to(tl.float32)
    wait_for_inputs()
    tokens = tl.cast(num_tokens, tl.int64)
    key_row = (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * tokens
    key_at = row[:, None] * KEY_DIM + key_column[None, :]
    value_at = row[:, None] * VALUE_DIM + value_column[None, :]

    # Loaded a chunk ahead: addresses that wait for a load would keep the tiles from being fetched
    # early.
    begin, size = tl.load(chunk_begin + first), tl.load(chunk_size + first)
    for chunk in range(first, last):
        in_chunk = row < size
        in_keys = in_chunk[:, None] & is_key[None, :]
        in_values = in_chunk[:, None] & is_value[None, :]
        head_begin = head * tokens + begin
        erased = tl.load(erase + head_begin * KEY_DIM + key_at, in_keys, 0)
        values_at = values + head_begin * VALUE_DIM + value_at
        value = tl.load(values_at, in_values, 0)
        key = tl.load(query_key + (key_row + begin) * KEY_DIM + key_at, in_keys, 0)
        decay = tl.load(decay_sums + head_begin + row, in_chunk, 0)
        total = tl.load(decay_sums + head_begin + size - 1)

        before = state.to(erased.dtype)
        tl.store(states + tl.cast(chunk, tl.int64) * state_size + state_at, before, in_state)
        lost = tl.dot(erased, before, input_precision="ieee")
        new_values = value.to(tl.float32) - lost
        tl.store(values_at, new_values.to(value.dtype), in_values)
        decayed = (new_values * tl.exp(total - decay)[:, None]).to(key.dtype)
        state = state * tl.exp(total) + tl.dot(tl.trans(key), decayed, input_precision="ieee")
        slot = tl.load(chunk_slot + chunk).to(tl.int64)
        if slot >= 0:
            exported = state.to(pool.dtype.element_ty)
            tl.store(pool + slot * slot_stride + state_at, exported, in_state)
        following = tl.minimum(chunk + 1, last - 1)
        begin, size = tl.load(chunk_begin + following), tl.load(chunk_size + following)

    tl.debug_barrier()
    target = tl.load(slot_out + sequence).to(tl.int64) * slot_stride
    tl.store(pool + target + state_at, state.to(pool.dtype.element_ty), in_state)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def read(
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
    wait_for_inputs()
    if size == 0:
        return
    begin = tl.load(chunk_begin + chunk).to(tl.int64)
    row = tl.arange(0, C)
    in_chunk = row < tl.abs(size)
    value_column, key_column = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_K)
    is_value, is_key = value_column < VALUE_DIM, key_column < KEY_DIM
    in_values = in_chunk[:, None] & is_value[None, :]
    first_output = output + (begin * VALUE_HEADS + head) * VALUE_DIM
    output_at = first_output + row[:, None] * (VALUE_HEADS * VALUE_DIM) + value_column[None, :]
    if size < 0:
        tl.store(output_at, tl.zeros([C, BLOCK_W], output.dtype.element_ty), in_values)
        return

    tokens = tl.cast(num_tokens, tl.int64)
    query_begin = (head // (VALUE_HEADS // KEY_HEADS)) * tokens + begin
    in_keys = in_chunk[:, None] & is_key[None, :]
    query_at = query_key + query_begin * KEY_DIM + row[:, None] * KEY_DIM + key_column[None, :]
    query = tl.load(query_at, in_keys, 0)
    key = tl.load(query_at + KEY_HEADS * tokens * KEY_DIM, in_keys, 0)
    head_begin = head * tokens + begin
    decay = tl.load(decay_sums + head_begin + row, in_chunk, 0)
    first_state = states + (chunk.to(tl.int64) * VALUE_HEADS + head) * (VALUE_DIM * KEY_DIM)
    state_at = key_column[:, None] * VALUE_DIM + value_column[None, :]
    state = tl.load(first_state + state_at, is_key[:, None] & is_value[None, :], 0)

    x = tl.dot(query, state, input_precision="ieee") * tl.exp(decay)[:, None]
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    scores = (scores * pairwise_decay(decay, row, 0)).to(key.dtype)
    value_at = row[:, None] * VALUE_DIM + value_column[None, :]
    value = tl.load(values + head_begin * VALUE_DIM + value_at, in_values, 0)
    x += tl.dot(scores, value, input_precision="ieee")

    weight = tl.load(norm_weight + value_column, is_value, 0)[None, :]
    gates = projected + begin * projected_stride + channels + head * VALUE_DIM
    gate_at = row[:, None] * projected_stride + value_column[None, :]
    gate = tl.load(gates + gate_at, in_values, 0)
    x = gated_norm(x, weight, gate, norm_eps, VALUE_DIM, 1)
    tl.store(output_at, x.to(output.dtype.element_ty), in_values)
