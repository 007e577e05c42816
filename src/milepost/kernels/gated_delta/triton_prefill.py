"""Gated DeltaNet's token mixer for many tokens a sequence, in four launches.

1. `convolve`: a head of a tile in each program; queries, keys and values, ready for the rule.
2. `wy_fwd`: a value head of a chunk; u and w, which don't depend on the state.
3. `chunk_fwd_h`: some columns of a value head's state, from chunk to chunk of a sequence, in
   float32; leaves the state before every chunk, writes exports and final states.
4. `chunk_fwd_o`: a value head of a chunk; outputs, then the gated norm.

A chunk's arithmetic depends on nothing but its tokens and the state before it: that is what makes
an export equal, bit for bit, the state that a prefill ending there leaves.

Legend: T tokens, N chunks, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.gated_delta.triton_chunk_h import chunk_fwd_h
from milepost.kernels.gated_delta.triton_chunk_o import chunk_fwd_o
from milepost.kernels.gated_delta.triton_convolve import convolve
from milepost.kernels.gated_delta.triton_shapes import shapes_of
from milepost.kernels.gated_delta.triton_wy import wy_fwd
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.layout.chunks import ChunkLayout
from milepost.kernels.layout.emit import Emit, Inputs


def prefill(
    projected: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: ChunkLayout,
    output: Tensor | None = None,
    *,
    emit: Emit = Emit.VALUES,
) -> Inputs:
    """See `gated_delta.mix`; writes to `output` if there is one."""
    shapes = shapes_of(weights, recurrent_pool, layout)
    num_tokens, num_chunks = len(projected), len(layout.chunk_size)
    key_dim, value_heads, value_dim = shapes.key_dim, shapes.value_heads, shapes.value_dim
    query_key = projected.new_empty(2 * shapes.key_heads, num_tokens, key_dim)
    values = projected.new_empty(value_heads, num_tokens, value_dim)
    w = projected.new_empty(value_heads, num_tokens, key_dim)
    g_cumsum = projected.new_empty(value_heads, num_tokens, dtype=torch.float32)
    h = projected.new_empty(num_chunks, value_heads, key_dim, value_dim)
    common = projected, weights, layout, shapes
    slots, chunked = (slot_in, slot_out), (query_key, values)
    convolve(*common, conv_pool, *slots, *chunked)
    wy_fwd(*common, *chunked, w, g_cumsum)
    chunk_fwd_h(layout, shapes, recurrent_pool, *slots, *chunked, w, g_cumsum, h)
    return chunk_fwd_o(*common, *chunked, g_cumsum, h, output, emit=emit)
