"""SSD's states from chunk to chunk, and what is read from them.

Legend: T tokens, N chunks, C tokens in a chunk, H heads, P head_dim, G groups, K state_size; I = H
* P and M = I + 2 * G * K channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.layout.chunks import UNSPECIALISED
from milepost.kernels.platform.launches import launch_dependents, quick, wait_for_inputs
from milepost.kernels.recurrent.portable.chunks import load_state, store_state


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def chunk_fwd_h_kernel(
    num_tokens,
    sequence_chunk,
    chunk_begin,
    chunk_size,
    chunk_slot,
    slot_in,
    slot_out,
    pool,
    slot_stride,
    mixed,
    to_end,
    decays,
    states,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_K columns of a head's state over all chunks of a sequence: `states` [N, H, P, K] before
    each chunk, exports and the final state."""
    i_block, i_head, i_sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch_dependents()
    first, last = tl.load(sequence_chunk + i_sequence), tl.load(sequence_chunk + i_sequence + 1)
    if first == last:
        wait_for_inputs()
        return
    row, o_p = tl.arange(0, C), tl.arange(0, BLOCK_P)
    o_k = i_block * BLOCK_K + tl.arange(0, BLOCK_K)
    is_p, is_k = o_p < HEAD_DIM, o_k < STATE_SIZE
    in_state = is_p[:, None] & is_k[None, :]
    o_state = (i_head * HEAD_DIM + o_p[:, None]) * STATE_SIZE + o_k[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_state = load_state(pool, slot_stride, slot_in, i_sequence, o_state, in_state)
    wait_for_inputs()
    width = HEADS * HEAD_DIM + 2 * GROUPS * STATE_SIZE
    p_x = mixed + i_head * HEAD_DIM + row[:, None] * width + o_p[None, :]
    p_b = mixed + HEADS * HEAD_DIM + i_head // (HEADS // GROUPS) * STATE_SIZE
    p_b += row[:, None] * width + o_k[None, :]
    head_begin = i_head.to(tl.int64) * num_tokens

    # Loaded a chunk ahead: addresses that wait for a load would keep the tiles from being fetched
    # early.
    begin, size = tl.load(chunk_begin + first), tl.load(chunk_size + first)
    slot, decay = tl.load(chunk_slot + first), tl.load(decays + first * HEADS + i_head)
    for chunk in range(first, last):
        in_chunk, at = row < size, begin.to(tl.int64) * width
        b_x = tl.load(p_x + at, in_chunk[:, None] & is_p[None, :], 0)
        b_b = tl.load(p_b + at, in_chunk[:, None] & is_k[None, :], 0)
        weight = tl.load(to_end + head_begin + begin + row, in_chunk, 0)
        following = tl.minimum(chunk + 1, last - 1)
        begin, size = tl.load(chunk_begin + following), tl.load(chunk_size + following)
        next_slot = tl.load(chunk_slot + following)
        next_decay = tl.load(decays + following * HEADS + i_head)
        p_before = states + tl.cast(chunk, tl.int64) * (HEADS * HEAD_DIM * STATE_SIZE) + o_state
        tl.store(p_before, b_state.to(states.dtype.element_ty), in_state)
        b_x = (b_x.to(tl.float32) * weight[:, None]).to(b_b.dtype)
        b_state *= decay
        b_state += tl.dot(tl.trans(b_x), b_b, input_precision="ieee")
        if slot >= 0:
            exported = b_state.to(pool.dtype.element_ty)
            tl.store(pool + slot.to(tl.int64) * slot_stride + o_state, exported, in_state)
        slot, decay = next_slot, next_decay

    store_state(pool, slot_stride, slot_out, i_sequence, o_state, in_state, b_state)


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def chunk_fwd_o_kernel(
    num_tokens,
    skip,
    chunk_begin,
    chunk_size,
    mixed,
    steps,
    decay_sums,
    states,
    y,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """ROWS tokens of EACH heads of a group and chunk: what C reads from the states before the chunk
    and from the chunk's own tokens, COLUMNS at a time, and D * x, into `y` [T, I]. C times B is the
    group's; how many heads share them changes no bit."""
    first = tl.program_id(0) * EACH
    PARTS: tl.constexpr = (C + ROWS - 1) // ROWS
    i_chunk, i_part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    size = tl.load(chunk_size + i_chunk)
    wait_for_inputs()
    if i_part * ROWS >= size:
        return
    begin = tl.load(chunk_begin + i_chunk).to(tl.int64)
    o_p, o_k = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    is_p, is_k = o_p < HEAD_DIM, o_k < STATE_SIZE
    width = HEADS * HEAD_DIM + 2 * GROUPS * STATE_SIZE
    p_b = mixed + begin * width + HEADS * HEAD_DIM + first // (HEADS // GROUPS) * STATE_SIZE
    p_b += o_k[None, :]
    i_row, column = i_part * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    # Of later tokens than these rows nothing is read.
    is_row, stop = i_row < size, tl.minimum(size, (i_part + 1) * ROWS)
    p_c = p_b + GROUPS * STATE_SIZE + i_row[:, None] * width
    b_c = tl.load(p_c, is_row[:, None] & is_k[None, :], 0)
    whole = _scores(b_c, p_b, i_row, column, stop, is_k, width) if COLUMNS >= C else 0.0
    for i_head in range(first, first + EACH):
        head_begin = tl.cast(i_head, tl.int64) * num_tokens + begin
        b_sums = tl.load(decay_sums + head_begin + i_row, is_row, 0)
        p_state = states + (i_chunk.to(tl.int64) * HEADS + i_head) * (HEAD_DIM * STATE_SIZE)
        p_state += o_p[:, None] * STATE_SIZE + o_k[None, :]
        b_state = tl.load(p_state, is_p[:, None] & is_k[None, :], 0)
        p_x = mixed + begin * width + i_head * HEAD_DIM + o_p[None, :]
        p_steps, p_sums = steps + head_begin, decay_sums + head_begin
        b_y = tl.dot(b_c, tl.trans(b_state), input_precision="ieee") * tl.exp2(b_sums)[:, None]
        of_tokens = b_sums, p_x, p_steps, p_sums
        if COLUMNS >= C:
            b_y = _read_tokens(b_y, whole, *of_tokens, column, stop, is_p, width)
        else:
            for part in range(i_part * ROWS // COLUMNS + 1):
                j_row = part * COLUMNS + column
                scores = _scores(b_c, p_b, i_row, j_row, stop, is_k, width)
                b_y = _read_tokens(b_y, scores, *of_tokens, j_row, stop, is_p, width)
        in_y = is_row[:, None] & is_p[None, :]
        b_own = tl.load(p_x + i_row[:, None] * width, in_y, 0)
        b_y += tl.load(skip + i_head) * b_own.to(tl.float32)
        p_y = y + (begin + i_row[:, None]) * (HEADS * HEAD_DIM) + i_head * HEAD_DIM + o_p[None, :]
        tl.store(p_y, b_y.to(y.dtype.element_ty), in_y)


@triton.jit
def _scores(b_c, p_b, i_row, j_row, stop, is_k, width):
    """C times B transposed, [ROWS, COLUMNS], zero for later tokens."""
    in_b = (j_row < stop)[:, None] & is_k[None, :]
    b_b = tl.load(p_b + j_row[:, None] * width, in_b, 0)
    scores = tl.dot(b_c, tl.trans(b_b), input_precision="ieee")
    return tl.where(i_row[:, None] >= j_row[None, :], scores, 0)


@triton.jit
def _read_tokens(b_y, scores, b_sums, p_x, p_steps, p_sums, j_row, stop, is_p, width):
    """`b_y` [ROWS, P] and what it reads of some tokens of a head."""
    is_token = j_row < stop
    b_x = tl.load(p_x + j_row[:, None] * width, is_token[:, None] & is_p[None, :], 0)
    sums = tl.load(p_sums + j_row, is_token, 0)
    step = tl.load(p_steps + j_row, is_token, 0)
    # Of later tokens it would be no decay, perhaps no number; their scores are zero.
    decay = tl.minimum(b_sums[:, None] - sums[None, :], 0, propagate_nan=tl.PropagateNan.ALL)
    weight = scores * (tl.exp2(decay) * step[None, :])
    return tl.dot(weight.to(b_x.dtype), b_x, b_y, input_precision="ieee")
