"""The gated delta rule's states from chunk to chunk, also where each channel of a key decays by
itself.

Legend: T tokens, N chunks, C tokens in a chunk, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.gated_delta.triton_shapes import PrefillShapes
from milepost.kernels.layout.chunks import UNSPECIALISED, ChunkLayout
from milepost.kernels.platform.device import probe, runs_gluon
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tiles import cdiv
from milepost.kernels.recurrent.portable.chunks import export_state, load_state, store_state

_COLUMNS = 32
"""Of the state in one program."""
_WARPS, _STAGES = 4, (2, 3)
"""The latter for decays by channel where it has room (on an H200 244 and 215 us a layer of KDA)."""


def chunk_fwd_h(
    layout: ChunkLayout,
    shapes: PrefillShapes,
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    query_key: Tensor,
    values: Tensor,
    w: Tensor,
    decay: Tensor,
    h: Tensor,
) -> None:
    """Write the states before every chunk to `h` [N, V, K, W], exports and final states to `pool`;
    `values` become what tokens add with the state before their chunk: u - w h.

    `decay` is [V, T], sums of log decays from the chunk's begin; or, by channel, [N, V, K], over
    the whole chunk, and keys are decayed to its end already.
    """
    if runs_gluon(values):
        from milepost.kernels.gated_delta import triton_hopper_chunk_h as hopper

        if hopper.suits(shapes, values):
            hopper.chunk_fwd_h(
                layout, shapes, pool, slot_in, slot_out, query_key, values, w, decay, h
            )
            return
    num_columns = min(_COLUMNS, shapes.blocks["BLOCK_W"])
    grid = (cdiv(shapes.value_dim, num_columns), shapes.value_heads, len(slot_out))
    by_channel = decay.dim() == 3
    step = shapes.chunk * (2 * shapes.blocks["BLOCK_K"] + num_columns) * values.element_size()
    has_room = probe(values.device).shared_bytes > (_STAGES[1] + 1) * step
    _chunk_fwd_h_kernel[grid](
        values.shape[1],
        layout.sequence_chunk,
        layout.chunk_begin,
        layout.chunk_size,
        layout.chunk_slot,
        slot_in,
        slot_out,
        pool,
        pool.stride(0),
        query_key,
        values,
        w,
        decay,
        h,
        BY_CHANNEL=by_channel,
        **shapes.heads,
        **(shapes.blocks | {"BLOCK_W": num_columns}),
        num_warps=_WARPS,
        num_stages=_STAGES[by_channel and has_room],
        **OVERLAPPED,
    )


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def _chunk_fwd_h_kernel(
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
    BY_CHANNEL: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """BLOCK_W columns of a value head's state over all chunks of a sequence."""
    i_w, i_hv, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch_dependents()
    first, last = tl.load(sequence_chunk + i_n), tl.load(sequence_chunk + i_n + 1)
    if first == last:
        wait_for_inputs()
        return
    o_t, o_k = tl.arange(0, C), tl.arange(0, BLOCK_K)
    o_v = i_w * BLOCK_W + tl.arange(0, BLOCK_W)
    is_k, is_v = o_k < KEY_DIM, o_v < VALUE_DIM
    in_h = is_k[:, None] & is_v[None, :]
    state_size = VALUE_HEADS * KEY_DIM * VALUE_DIM
    o_h = (i_hv * KEY_DIM + o_k[:, None]) * VALUE_DIM + o_v[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_h = load_state(pool, slot_stride, slot_in, i_n, o_h, in_h)
    wait_for_inputs()
    tokens = tl.cast(num_tokens, tl.int64)
    key_row = (KEY_HEADS + i_hv // (VALUE_HEADS // KEY_HEADS)) * tokens
    key_at = o_t[:, None] * KEY_DIM + o_k[None, :]
    value_at = o_t[:, None] * VALUE_DIM + o_v[None, :]

    # Loaded a chunk ahead: addresses that wait for a load would keep the tiles from being fetched
    # early.
    begin, size = tl.load(chunk_begin + first), tl.load(chunk_size + first)
    for i_t in range(first, last):
        in_chunk = o_t < size
        in_k = in_chunk[:, None] & is_k[None, :]
        in_v = in_chunk[:, None] & is_v[None, :]
        v_begin = i_hv * tokens + begin
        b_w = tl.load(w + v_begin * KEY_DIM + key_at, in_k, 0)
        p_v = values + v_begin * VALUE_DIM + value_at
        b_u = tl.load(p_v, in_v, 0)
        b_k = tl.load(query_key + (key_row + begin) * KEY_DIM + key_at, in_k, 0)
        if BY_CHANNEL:
            b_decay = tl.load(decay + (i_t * VALUE_HEADS + i_hv) * KEY_DIM + o_k, is_k, 0)
        else:
            b_g = tl.load(decay + v_begin + o_t, in_chunk, 0)
            b_g_last = tl.load(decay + v_begin + size - 1)

        b_h0 = b_h.to(b_w.dtype)
        tl.store(h + tl.cast(i_t, tl.int64) * state_size + o_h, b_h0, in_h)
        b_wh = tl.dot(b_w, b_h0, input_precision="ieee")
        b_v = b_u.to(tl.float32) - b_wh
        tl.store(p_v, b_v.to(b_u.dtype), in_v)
        if BY_CHANNEL:
            b_h *= b_decay[:, None]
            b_vg = b_v.to(b_k.dtype)
        else:
            b_vg = (b_v * tl.exp(b_g_last - b_g)[:, None]).to(b_k.dtype)
            b_h *= tl.exp(b_g_last)
        b_h += tl.dot(tl.trans(b_k), b_vg, input_precision="ieee")
        export_state(pool, slot_stride, chunk_slot, i_t, o_h, in_h, b_h)
        following = tl.minimum(i_t + 1, last - 1)
        begin, size = tl.load(chunk_begin + following), tl.load(chunk_size + following)

    store_state(pool, slot_stride, slot_out, i_n, o_h, in_h, b_h)
