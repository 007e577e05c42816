"""What queries read: from the state before their chunk, and from the chunk's own tokens.

Legend: T tokens, N chunks, C tokens in a chunk, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.gated_delta.triton_parts import pairwise_decay
from milepost.kernels.gated_delta.triton_shapes import PrefillShapes
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.layout.chunks import UNSPECIALISED, ChunkLayout
from milepost.kernels.layout.emit import (
    Emit,
    Inputs,
    as_arguments,
    handed_on,
    keeps_values,
    room_for,
)
from milepost.kernels.platform.device import probe, runs_gluon
from milepost.kernels.platform.launches import OVERLAPPED, quick, wait_for_inputs
from milepost.kernels.platform.numerics import encode, scale_of
from milepost.kernels.platform.tensors import BLOCK, LEAST_SCALE
from milepost.kernels.recurrent.rules.gated_delta import finish

_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


def chunk_fwd_o(
    projected: Tensor,
    weights: GatedDeltaWeights,
    layout: ChunkLayout,
    shapes: PrefillShapes,
    query_key: Tensor,
    values: Tensor,
    g_cumsum: Tensor,
    h: Tensor,
    output: Tensor | None = None,
    *,
    emit: Emit = Emit.VALUES,
) -> Inputs:
    """Outputs [T, V * W] from states `h` and what tokens add, `values`, through the gated norm.
    Where a head is a block that shares a scale, they are handed on as `emit` asks."""
    if output is None:
        output = projected.new_empty(len(projected), shapes.value_heads * shapes.value_dim)
    emit = emit if shapes.value_dim == BLOCK else Emit.VALUES
    rounded = room_for(*output.shape, output, emit)
    if runs_gluon(values):
        from milepost.kernels.gated_delta import triton_hopper_chunk_o as hopper

        if hopper.suits(shapes, values):
            if rounded is not None:  # it writes either
                rounded = replace(rounded, is_alone=True) if emit is Emit.FP8 else None
            hopper.chunk_fwd_o(
                projected, weights, layout, shapes, query_key, values, g_cumsum, h, output, rounded
            )
            return handed_on(output, rounded)
    _chunk_fwd_o_kernel[(shapes.value_heads, len(layout.chunk_size))](
        projected,
        projected.stride(0),
        len(projected),
        shapes.channels,
        weights.norm,
        weights.norm_eps,
        layout.chunk_begin,
        layout.chunk_size,
        query_key,
        values,
        g_cumsum,
        h,
        output,
        *as_arguments(rounded),
        **shapes.heads,
        **shapes.blocks,
        KEEPS_ROWS=keeps_values(rounded),
        NATIVE=probe(projected.device).has_fp8,
        num_warps=4,
        **OVERLAPPED,
    )
    return handed_on(output, rounded)


@quick
@triton.jit(
    do_not_specialize=["num_tokens", "scales_stride"],
    do_not_specialize_on_alignment=UNSPECIALISED,
)
def _chunk_fwd_o_kernel(
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
    g_cumsum,
    h,
    output,
    rounded,
    scales,
    scales_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    KEEPS_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One value head of a chunk: what queries read from the state before the chunk and from the
    chunk's own new values, through the gated norm into `output` [T, V * W], or to float8."""
    i_hv, i_t = tl.program_id(0), tl.program_id(1)
    size = tl.load(chunk_size + i_t)
    wait_for_inputs()
    if size == 0:
        return
    begin = tl.load(chunk_begin + i_t).to(tl.int64)
    o_t = tl.arange(0, C)
    in_chunk = o_t < tl.abs(size)
    o_v, o_k = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_K)
    is_v, is_k = o_v < VALUE_DIM, o_k < KEY_DIM
    in_v = in_chunk[:, None] & is_v[None, :]
    first = (begin * VALUE_HEADS + i_hv) * VALUE_DIM
    places = first + o_t[:, None] * (VALUE_HEADS * VALUE_DIM) + o_v[None, :]
    targets = output, rounded, scales, i_hv * scales_stride + begin + o_t
    if size < 0:
        if KEEPS_ROWS:
            tl.store(output + places, tl.zeros([C, BLOCK_W], output.dtype.element_ty), in_v)
        if rounded is not None:  # by their bits: see `triton_hopper_chunk_o`
            tl.store(rounded + places, tl.zeros([C, BLOCK_W], tl.uint8), in_v)
            least = tl.full([C], _LEAST_SCALE, tl.float32)
            tl.store(scales + i_hv * scales_stride + begin + o_t, least, in_chunk)
        return

    tokens = tl.cast(num_tokens, tl.int64)
    query_begin = (i_hv // (VALUE_HEADS // KEY_HEADS)) * tokens + begin
    in_k = in_chunk[:, None] & is_k[None, :]
    p_q = query_key + query_begin * KEY_DIM + o_t[:, None] * KEY_DIM + o_k[None, :]
    b_q = tl.load(p_q, in_k, 0)
    b_k = tl.load(p_q + KEY_HEADS * tokens * KEY_DIM, in_k, 0)
    v_begin = i_hv * tokens + begin
    b_g = tl.load(g_cumsum + v_begin + o_t, in_chunk, 0)
    p_h = h + (i_t.to(tl.int64) * VALUE_HEADS + i_hv) * (VALUE_DIM * KEY_DIM)
    o_h = o_k[:, None] * VALUE_DIM + o_v[None, :]
    b_h = tl.load(p_h + o_h, is_k[:, None] & is_v[None, :], 0)

    b_o = tl.dot(b_q, b_h, input_precision="ieee") * tl.exp(b_g)[:, None]
    b_a = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    b_a = (b_a * pairwise_decay(b_g, o_t, 0)).to(b_k.dtype)
    value_at = o_t[:, None] * VALUE_DIM + o_v[None, :]
    b_v = tl.load(values + v_begin * VALUE_DIM + value_at, in_v, 0)
    b_o += tl.dot(b_a, b_v, input_precision="ieee")

    b_weight = tl.load(norm_weight + o_v, is_v, 0)[None, :]
    gates = projected + begin * projected_stride + channels + i_hv * VALUE_DIM
    gate_at = o_t[:, None] * projected_stride + o_v[None, :]
    b_gate = tl.load(gates + gate_at, in_v, 0)
    b_o = finish(b_o, b_weight, b_gate, norm_eps, VALUE_DIM)
    b_o = b_o.to(output.dtype.element_ty)
    _store(targets, places, b_o, in_v, in_chunk, KEEPS_ROWS, NATIVE)


@triton.jit
def _store(targets, places, b_o, in_v, in_chunk, KEEPS_ROWS: tl.constexpr, NATIVE: tl.constexpr):
    """A head's outputs as they are, and rounded to float8 over a scale for each token."""
    output, rounded, scales, scale_places = targets
    if KEEPS_ROWS:
        tl.store(output + places, b_o, in_v)
    if rounded is not None:
        b_wide = b_o.to(tl.float32)
        b_scale = scale_of(b_wide, 1)
        tl.store(rounded + places, encode(b_wide / b_scale[:, None], NATIVE), in_v)
        tl.store(scales + scale_places, b_scale, in_chunk)
