"""Two launches of the delta rule's prefills, also where each channel of a key decays by itself.

1. States from chunk to chunk: a program takes some columns of a head's state over all chunks of a
   sequence, in float32; it leaves the state before every chunk, and writes exports and the final
   state.
2. Outputs: what queries read from the state before their chunk, and from the chunk's own tokens.
   KDA's products of queries and keys have been decayed before.

Legend: T tokens, N chunks, C tokens in a chunk, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.layout.emit import Fp8Rows
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import encode, scale_of
from milepost.kernels.platform.tensors import LEAST_SCALE
from milepost.kernels.platform.tiles import cdiv
from milepost.kernels.recurrent.structures import (
    ChunkTensors,
    Mixer,
    MixerSizes,
    PrefillChunks,
    RoundedOutput,
    SlotStates,
)

_COLUMNS = 32
"""Columns of the state in one program."""
_WARPS, _STAGES = 4, (2, 3)
"""The latter for decays by channel where it has room (on an H200 244 and 215 us a layer of KDA)."""


def chunk_fwd_h(
    mixer: Mixer, chunk: int, pool: SlotStates, chunks: PrefillChunks, tensors: ChunkTensors
) -> None:
    """Write the states before every chunk to `tensors.h`, exports and final states to `pool`;
    `tensors.v` become what tokens add with the state before their chunk: u - w h."""
    sizes, values = mixer.sizes, tensors.v
    step = chunk * (2 * sizes.shared_tile + _COLUMNS) * values.element_size()
    has_room = probe(values.device).shared_bytes > (_STAGES[1] + 1) * step
    num_stages = _STAGES[sizes.by_channel and has_room]
    grid = cdiv(sizes.own, _COLUMNS), sizes.heads, len(chunks.slot_out)
    operands = values.shape[1], chunks, pool, tensors
    options = {"num_warps": _WARPS, "num_stages": num_stages, **OVERLAPPED}
    _chunk_fwd_h_kernel[grid](*operands, SIZES=sizes, C=chunk, BLOCK_W=_COLUMNS, **options)


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["chunks"])
def _chunk_fwd_h_kernel(
    num_tokens, chunks, pool, tensors, SIZES: tl.constexpr, C: tl.constexpr, BLOCK_W: tl.constexpr
):
    """BLOCK_W columns of a value head's state."""
    KEY_DIM: tl.constexpr = SIZES.shared
    VALUE_DIM: tl.constexpr = SIZES.own
    i_w, i_hv, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch_dependents()
    first, last = tl.load(chunks.first + i_n), tl.load(chunks.first + i_n + 1)
    if first == last:
        wait_for_inputs()
        return
    o_t, o_k = tl.arange(0, C), tl.arange(0, SIZES.shared_tile)
    o_v = i_w * BLOCK_W + tl.arange(0, BLOCK_W)
    is_k, is_v = o_k < KEY_DIM, o_v < VALUE_DIM
    in_h = is_k[:, None] & is_v[None, :]
    state_size = SIZES.heads * KEY_DIM * VALUE_DIM
    o_h = (i_hv * KEY_DIM + o_k[:, None]) * VALUE_DIM + o_v[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_h = load_state(pool, chunks, i_n, o_h, in_h)
    wait_for_inputs()
    tokens = tl.cast(num_tokens, tl.int64)
    key_row = (SIZES.units + i_hv // SIZES.group) * tokens
    key_at = o_t[:, None] * KEY_DIM + o_k[None, :]
    value_at = o_t[:, None] * VALUE_DIM + o_v[None, :]

    # Loaded a chunk ahead: addresses that wait for a load would keep the tiles from being fetched
    # early.
    begin, size = tl.load(chunks.begin + first), tl.load(chunks.size + first)
    for i_t in range(first, last):
        in_chunk = o_t < size
        in_k = in_chunk[:, None] & is_k[None, :]
        in_v = in_chunk[:, None] & is_v[None, :]
        v_begin = i_hv * tokens + begin
        b_w = tl.load(tensors.w + v_begin * KEY_DIM + key_at, in_k, 0)
        p_v = tensors.v + v_begin * VALUE_DIM + value_at
        b_u = tl.load(p_v, in_v, 0)
        b_k = tl.load(tensors.query_key + (key_row + begin) * KEY_DIM + key_at, in_k, 0)
        if SIZES.by_channel:
            p_decay = tensors.decay + (i_t * SIZES.heads + i_hv) * KEY_DIM + o_k
            b_decay = tl.load(p_decay, is_k, 0)
        else:
            b_g = tl.load(tensors.decay + v_begin + o_t, in_chunk, 0)
            b_g_last = tl.load(tensors.decay + v_begin + size - 1)

        b_h0 = b_h.to(b_w.dtype)
        tl.store(tensors.h + tl.cast(i_t, tl.int64) * state_size + o_h, b_h0, in_h)
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
        export_state(pool, tl.load(chunks.export + i_t), o_h, in_h, b_h)
        following = tl.minimum(i_t + 1, last - 1)
        begin, size = tl.load(chunks.begin + following), tl.load(chunks.size + following)

    store_state(pool, chunks, i_n, o_h, in_h, b_h)


@triton.jit
def load_state(pool, chunks, i_n, o_state, in_state):
    """A sequence's state in float32; `o_state` are its numbers' places."""
    source = tl.load(chunks.slot_in + i_n).to(tl.int64) * pool.stride
    return tl.load(pool.base + source + o_state, in_state, 0).to(tl.float32)


@triton.jit
def store_state(pool, chunks, i_n, o_state, in_state, b_state):
    """Write the final state once nobody reads the slot that it came from: it may be the same."""
    tl.debug_barrier()
    target = tl.load(chunks.slot_out + i_n).to(tl.int64) * pool.stride
    tl.store(pool.base + target + o_state, b_state.to(pool.base.dtype.element_ty), in_state)


@triton.jit
def export_state(pool, slot, o_state, in_state, b_state):
    """Write the state after a chunk to `slot`, if that is one."""
    if slot >= 0:
        exported = b_state.to(pool.base.dtype.element_ty)
        tl.store(pool.base + slot.to(tl.int64) * pool.stride + o_state, exported, in_state)


_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


def chunk_fwd_o(
    mixer: Mixer,
    chunk: int,
    chunks: PrefillChunks,
    tensors: ChunkTensors,
    output: Tensor,
    fp8: Fp8Rows | None,
) -> None:
    """Write `output` [T, V * W] through the gated norm, and to `fp8` if there is that."""
    sizes, rounded, scales_stride = mixer.sizes, None, 0
    if fp8 is not None:
        rounded = RoundedOutput(fp8.values.view(torch.uint8), fp8.scales)
        scales_stride = fp8.scales.stride(0)
    read = mixer.inputs.gate, mixer.weights, chunks, tensors
    options = {"num_warps": delta_warps(sizes, output), **OVERLAPPED}
    _chunk_fwd_o_kernel[(sizes.heads, len(chunks.size))](
        *(len(output), *read, output, rounded, scales_stride),
        SIZES=sizes,
        FINISH=mixer.rule.finish,
        C=chunk,
        KEEPS_ROWS=fp8 is None or not fp8.is_alone,
        NATIVE=probe(output.device).has_fp8,
        **options,
    )


def delta_warps(sizes: MixerSizes, like: Tensor) -> int:
    """Warps of a program with a head's keys and values. Products in float32 are unrolled: for wide
    heads a program of fewer threads has so much code in each that it takes minutes to compile."""
    is_wide = sizes.shared_tile * sizes.own_tile > 128 * 128
    return 16 if is_wide and like.element_size() == 4 else 4


@quick
@triton.jit(
    do_not_specialize=["num_tokens", "scales_stride"], do_not_specialize_on_alignment=["chunks"]
)
def _chunk_fwd_o_kernel(
    num_tokens,
    gate,
    weights,
    chunks,
    tensors,
    output,
    rounded,
    scales_stride,
    SIZES: tl.constexpr,
    FINISH: tl.constexpr,
    C: tl.constexpr,
    KEEPS_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One value head of a chunk: what queries read from the state before the chunk and from the
    chunk's own new values, through the gated norm into `output` [T, V * W], or to float8."""
    KEY_DIM: tl.constexpr = SIZES.shared
    VALUE_DIM: tl.constexpr = SIZES.own
    BLOCK_W: tl.constexpr = SIZES.own_tile
    i_hv, i_t = tl.program_id(0), tl.program_id(1)
    size = tl.load(chunks.size + i_t)
    wait_for_inputs()
    if size == 0:
        return
    begin = tl.load(chunks.begin + i_t).to(tl.int64)
    o_t = tl.arange(0, C)
    in_chunk = o_t < tl.abs(size)
    o_v, o_k = tl.arange(0, BLOCK_W), tl.arange(0, SIZES.shared_tile)
    is_v, is_k = o_v < VALUE_DIM, o_k < KEY_DIM
    in_v = in_chunk[:, None] & is_v[None, :]
    first = (begin * SIZES.heads + i_hv) * VALUE_DIM
    at = first + o_t[:, None] * SIZES.width + o_v[None, :]
    if size < 0:
        if KEEPS_ROWS:
            tl.store(output + at, tl.zeros([C, BLOCK_W], output.dtype.element_ty), in_v)
        if rounded is not None:  # by their bits: see `hopper.chunk_o`
            tl.store(rounded.base + at, tl.zeros([C, BLOCK_W], tl.uint8), in_v)
            least = tl.full([C], _LEAST_SCALE, tl.float32)
            tl.store(rounded.scales + i_hv * scales_stride + begin + o_t, least, in_chunk)
        return

    tokens = tl.cast(num_tokens, tl.int64)
    query_begin = (i_hv // SIZES.group) * tokens + begin
    in_k = in_chunk[:, None] & is_k[None, :]
    p_q = tensors.query_key + query_begin * KEY_DIM + o_t[:, None] * KEY_DIM + o_k[None, :]
    b_q = tl.load(p_q, in_k, 0)
    v_begin = i_hv * tokens + begin
    if not SIZES.by_channel:
        b_k = tl.load(p_q + SIZES.units * tokens * KEY_DIM, in_k, 0)
        b_g = tl.load(tensors.decay + v_begin + o_t, in_chunk, 0)
    p_h = tensors.h + (i_t.to(tl.int64) * SIZES.heads + i_hv) * (VALUE_DIM * KEY_DIM)
    o_h = o_k[:, None] * VALUE_DIM + o_v[None, :]
    b_h = tl.load(p_h + o_h, is_k[:, None] & is_v[None, :], 0)

    b_o = tl.dot(b_q, b_h, input_precision="ieee")
    if SIZES.by_channel:
        p_a = tensors.scores + (v_begin + o_t)[:, None] * C + o_t[None, :]
        b_a = tl.load(p_a, in_chunk[:, None] & (o_t < C)[None, :], 0)
    else:
        b_o *= tl.exp(b_g)[:, None]
        b_a = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_a = (b_a * pairwise_decay(b_g, o_t, 0)).to(b_k.dtype)
    value_at = o_t[:, None] * VALUE_DIM + o_v[None, :]
    b_v = tl.load(tensors.v + v_begin * VALUE_DIM + value_at, in_v, 0)
    b_o += tl.dot(b_a, b_v, input_precision="ieee")

    b_weight = tl.load(weights.norm + o_v, is_v, 0)[None, :]
    p_gate = gate.base + begin * gate.stride + i_hv * VALUE_DIM
    b_gate = tl.load(p_gate + o_t[:, None] * gate.stride + o_v[None, :], in_v, 0)
    b_o = FINISH(b_o, b_weight, b_gate, weights.norm_eps, VALUE_DIM)
    b_o = b_o.to(output.dtype.element_ty)
    if KEEPS_ROWS:
        tl.store(output + at, b_o, in_v)
    if rounded is not None:
        # Over a scale for each token.
        b_wide = b_o.to(tl.float32)
        b_scale = scale_of(b_wide, 1)
        tl.store(rounded.base + at, encode(b_wide / b_scale[:, None], NATIVE), in_v)
        tl.store(rounded.scales + i_hv * scales_stride + begin + o_t, b_scale, in_chunk)


@triton.jit
def pairwise_decay(decay, row, BELOW: tl.constexpr):
    """[C, C], decay from token j to token i where i >= j + BELOW, else 0."""
    is_later = row[:, None] >= row[None, :] + BELOW
    between = tl.where(is_later, decay[:, None] - decay[None, :], 0)
    return tl.where(is_later, tl.exp(between), 0)
