"""The delta rule's states from chunk to chunk, in float32: a program takes some columns of a head's
state over all chunks of a sequence. It leaves the state before every chunk, and writes exports and
the final state.

Legend: C tokens in a chunk, K key_dim, W columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.recurrent.structures import ChunkTensors, Mixer, PrefillChunks, SlotStates

_COLUMNS = 32
"""Columns of the state in one program."""
_WARPS, _STAGES = 4, 3
"""Warps, and pipeline stages if shared memory has room for one more; else there are two stages."""


def run(
    mixer: Mixer, chunk: int, pool: SlotStates, chunks: PrefillChunks, tensors: ChunkTensors
) -> None:
    """Writes the states before every chunk to `tensors.h`, exports and final states to `pool`;
    `tensors.v` become what tokens add with the state before their chunk: u - w h."""
    sizes, values = mixer.sizes, tensors.v
    step = chunk * (2 * sizes.shared_tile + _COLUMNS) * values.element_size()
    has_room = probe(values.device).shared_bytes > (_STAGES + 1) * step
    num_stages = _STAGES if has_room else 2
    grid = cdiv(sizes.own, _COLUMNS), sizes.heads, len(chunks.slot_out)
    operands = values.shape[1], chunks, pool, tensors
    options = {"num_warps": _WARPS, "num_stages": num_stages, **OVERLAPPED}
    _chunk_fwd_h_kernel[grid](*operands, SIZES=sizes, C=chunk, BLOCK_W=_COLUMNS, **options)


class StateColumns(NamedTuple):
    """Some columns of a value head's state: rows [K], columns [W], and offsets in `h` and in a slot
    [K, W], each with a mask."""

    head: Any
    num_tokens: Any
    o_k: Any
    is_k: Any
    o_v: Any
    is_v: Any
    o_h: Any
    in_h: Any


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["chunks"])
def _chunk_fwd_h_kernel(
    num_tokens, chunks, pool, tensors, SIZES: tl.constexpr, C: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Takes BLOCK_W columns of a value head's state through all chunks of a sequence."""
    i_w, i_hv, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch_dependents()
    first, last = tl.load(chunks.first + i_n), tl.load(chunks.first + i_n + 1)
    if first == last:
        wait_for_inputs()
        return
    o_k, o_v = tl.arange(0, SIZES.shared_tile), i_w * BLOCK_W + tl.arange(0, BLOCK_W)
    is_k, is_v = o_k < SIZES.shared, o_v < SIZES.own
    in_h = is_k[:, None] & is_v[None, :]
    o_h = (i_hv * SIZES.shared + o_k[:, None]) * SIZES.own + o_v[None, :]
    own = StateColumns(i_hv, tl.cast(num_tokens, tl.int64), o_k, is_k, o_v, is_v, o_h, in_h)
    # States were written in an earlier step, so they are read before the launch ahead has ended.
    b_h = load_state(pool, chunks, i_n, o_h, in_h)
    wait_for_inputs()
    # Loaded a chunk ahead, since the compiler cannot prefetch tiles whose addresses wait for a
    # load.
    begin, size = tl.load(chunks.begin + first), tl.load(chunks.size + first)
    for i_t in range(first, last):
        b_h = _pass_chunk(b_h, tensors, own, i_t, begin, size, SIZES, C)
        export_state(pool, tl.load(chunks.export + i_t), o_h, in_h, b_h)
        following = tl.minimum(i_t + 1, last - 1)
        begin, size = tl.load(chunks.begin + following), tl.load(chunks.size + following)
    store_state(pool, chunks, i_n, o_h, in_h, b_h)


@triton.jit
def _pass_chunk(b_h, tensors, own, i_t, begin, size, SIZES: tl.constexpr, C: tl.constexpr):
    """Returns the state after a chunk. Stores the state before it, and what its tokens add."""
    KEY_DIM: tl.constexpr = SIZES.shared
    VALUE_DIM: tl.constexpr = SIZES.own
    o_t = tl.arange(0, C)
    in_chunk = o_t < size
    in_k = in_chunk[:, None] & own.is_k[None, :]
    in_v = in_chunk[:, None] & own.is_v[None, :]
    key_at = o_t[:, None] * KEY_DIM + own.o_k[None, :]
    v_begin = own.head * own.num_tokens + begin
    key_begin = (SIZES.units + own.head // SIZES.group) * own.num_tokens + begin
    b_w = tl.load(tensors.w + v_begin * KEY_DIM + key_at, in_k, 0)
    p_v = tensors.v + v_begin * VALUE_DIM + (o_t[:, None] * VALUE_DIM + own.o_v[None, :])
    b_u = tl.load(p_v, in_v, 0)
    b_k = tl.load(tensors.query_key + key_begin * KEY_DIM + key_at, in_k, 0)
    if SIZES.by_channel:
        p_decay = tensors.decay + (i_t * SIZES.heads + own.head) * KEY_DIM + own.o_k
        b_decay = tl.load(p_decay, own.is_k, 0)
    else:
        b_g = tl.load(tensors.decay + v_begin + o_t, in_chunk, 0)
        b_g_last = tl.load(tensors.decay + v_begin + size - 1)

    b_h0 = b_h.to(b_w.dtype)
    state_size = SIZES.heads * KEY_DIM * VALUE_DIM
    tl.store(tensors.h + tl.cast(i_t, tl.int64) * state_size + own.o_h, b_h0, own.in_h)
    b_wh = tl.dot(b_w, b_h0, input_precision="ieee")
    b_v = b_u.to(tl.float32) - b_wh
    tl.store(p_v, b_v.to(b_u.dtype), in_v)
    if SIZES.by_channel:
        b_h *= b_decay[:, None]
        b_vg = b_v.to(b_k.dtype)
    else:
        b_vg = (b_v * tl.exp(b_g_last - b_g)[:, None]).to(b_k.dtype)
        b_h *= tl.exp(b_g_last)
    b_h += tl.dot(tl.trans(b_k), b_vg, input_precision="ieee")
    return b_h


@triton.jit
def load_state(pool, chunks, i_n, o_state, in_state):
    """Returns a sequence's state at offsets `o_state` of its slot, in float32."""
    source = tl.load(chunks.slot_in + i_n).to(tl.int64) * pool.stride
    return tl.load(pool.base + source + o_state, in_state, 0).to(tl.float32)


@triton.jit
def store_state(pool, chunks, i_n, o_state, in_state, b_state):
    """Writes the final state after all threads have read the initial one, whose slot may be the
    same."""
    tl.debug_barrier()
    target = tl.load(chunks.slot_out + i_n).to(tl.int64) * pool.stride
    tl.store(pool.base + target + o_state, b_state.to(pool.base.dtype.element_ty), in_state)


@triton.jit
def export_state(pool, slot, o_state, in_state, b_state):
    """Writes the state after a chunk to `slot` unless that is negative."""
    if slot >= 0:
        exported = b_state.to(pool.base.dtype.element_ty)
        tl.store(pool.base + slot.to(tl.int64) * pool.stride + o_state, exported, in_state)
