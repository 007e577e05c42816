"""KDA's states, from chunk to chunk of a sequence.

Legend: T tokens, N chunks, C tokens in a chunk, H heads, K head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.chunks import UNSPECIALISED, ChunkLayout
from milepost.kernels.gated_delta.triton_shapes import PrefillShapes
from milepost.kernels.kda.triton_intra import Chunks
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

_COLUMNS = 32
"""Of a state in one program."""


def chunk_h(
    layout: ChunkLayout,
    shapes: PrefillShapes,
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    chunks: Chunks,
    h: Tensor,
) -> None:
    """Write the states before every chunk to `h` [N, H, K, K], exports and final states to `pool`;
    `chunks.values` become what tokens add with the state before their chunk: u - w h."""
    grid = (triton.cdiv(shapes.value_dim, _COLUMNS), shapes.value_heads, len(slot_out))
    _chunk_h_kernel[grid](
        chunks.values.shape[1],
        layout.sequence_chunk,
        layout.chunk_begin,
        layout.chunk_size,
        layout.chunk_slot,
        slot_in,
        slot_out,
        pool,
        pool.stride(0),
        chunks.query_key,
        chunks.values,
        chunks.w,
        chunks.decay,
        h,
        HEADS=shapes.value_heads,
        HEAD_DIM=shapes.key_dim,
        C=shapes.chunk,
        BLOCK_K=shapes.blocks["BLOCK_K"],
        COLUMNS=_COLUMNS,
        num_warps=4,
        num_stages=2,
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def _chunk_h_kernel(
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
    w,
    decay,
    h,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of a head's state over all chunks of a sequence."""
    i_w, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    let_next_start()
    first, last = tl.load(sequence_chunk + i_n), tl.load(sequence_chunk + i_n + 1)
    if first == last:
        wait_for_inputs()
        return
    o_t, o_k = tl.arange(0, C), tl.arange(0, BLOCK_K)
    o_v = i_w * COLUMNS + tl.arange(0, COLUMNS)
    is_k, is_v = o_k < HEAD_DIM, o_v < HEAD_DIM
    in_h = is_k[:, None] & is_v[None, :]
    state_size = HEADS * HEAD_DIM * HEAD_DIM
    o_h = (i_h * HEAD_DIM + o_k[:, None]) * HEAD_DIM + o_v[None, :]
    source = tl.load(slot_in + i_n).to(tl.int64) * slot_stride
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_h = tl.load(pool + source + o_h, in_h, 0).to(tl.float32)
    wait_for_inputs()
    tokens = tl.cast(num_tokens, tl.int64)
    o_key = o_t[:, None] * HEAD_DIM + o_k[None, :]
    o_value = o_t[:, None] * HEAD_DIM + o_v[None, :]

    # Loaded a chunk ahead: addresses that wait for a load would keep the tiles from being fetched
    # early.
    begin, size = tl.load(chunk_begin + first), tl.load(chunk_size + first)
    for i_t in range(first, last):
        in_chunk = o_t < size
        in_k = in_chunk[:, None] & is_k[None, :]
        in_v = in_chunk[:, None] & is_v[None, :]
        at = (i_h * tokens + begin) * HEAD_DIM
        b_w = tl.load(w + at + o_key, in_k, 0)
        p_v = values + at + o_value
        b_u = tl.load(p_v, in_v, 0)
        b_k = tl.load(query_key + HEADS * tokens * HEAD_DIM + at + o_key, in_k, 0)
        b_decay = tl.load(decay + (i_t * HEADS + i_h) * HEAD_DIM + o_k, is_k, 0)

        b_h0 = b_h.to(b_w.dtype)
        tl.store(h + tl.cast(i_t, tl.int64) * state_size + o_h, b_h0, in_h)
        b_v = b_u.to(tl.float32) - tl.dot(b_w, b_h0, input_precision="ieee")
        tl.store(p_v, b_v.to(b_u.dtype), in_v)
        added = tl.dot(tl.trans(b_k), b_v.to(b_k.dtype), input_precision="ieee")
        b_h = b_h * b_decay[:, None] + added
        slot = tl.load(chunk_slot + i_t).to(tl.int64)
        if slot >= 0:
            exported = b_h.to(pool.dtype.element_ty)
            tl.store(pool + slot * slot_stride + o_h, exported, in_h)
        following = tl.minimum(i_t + 1, last - 1)
        begin, size = tl.load(chunk_begin + following), tl.load(chunk_size + following)

    tl.debug_barrier()
    target = tl.load(slot_out + i_n).to(tl.int64) * slot_stride
    tl.store(pool + target + o_h, b_h.to(pool.dtype.element_ty), in_h)
