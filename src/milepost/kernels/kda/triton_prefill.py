"""KDA's token mixer for many tokens a sequence, in four launches.

1. `convolve`, Gated DeltaNet's: queries, keys and values, ready for the rule.
2. `intra`: all that doesn't depend on the state before a chunk. Decays are multiplied into queries
   and keys here, so nobody behind it needs them channel by channel.
3. `chunk_fwd_h`, Gated DeltaNet's too: some columns of a head's state, from chunk to chunk of a
   sequence, in float32; leaves the state before every chunk, writes exports and final states.
4. `chunk_o`: a head of a chunk; outputs, then the gated norm.

A chunk's arithmetic depends on nothing but its tokens and the state before it: that is what makes
an export equal, bit for bit, the state that a prefill ending there leaves.

Legend: T tokens, N chunks, C tokens in a chunk, H heads, K head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.gated_delta.triton_chunk_h import chunk_fwd_h
from milepost.kernels.gated_delta.triton_convolve import convolve
from milepost.kernels.gated_delta.triton_shapes import PrefillShapes
from milepost.kernels.kda.triton_chunk_o import chunk_o
from milepost.kernels.kda.triton_intra import ChunkBuffers, intra
from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.layout.chunks import ChunkLayout


def prefill(
    projected: Tensor,
    decay_inputs: Tensor,
    gate: Tensor,
    weights: KDAWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: ChunkLayout,
) -> Tensor:
    """See `kda.mix`."""
    _, heads, head_dim, _ = recurrent_pool.shape
    channels, conv_width = weights.conv.shape
    shapes = PrefillShapes(
        key_heads=heads,
        value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        channels=channels,
        conv_width=conv_width,
        chunk=layout.chunk,
    )
    num_tokens, num_chunks = len(projected), len(layout.chunk_size)
    chunks = ChunkBuffers(
        query_key=projected.new_empty(2 * heads, num_tokens, head_dim),
        values=projected.new_empty(heads, num_tokens, head_dim),
        w=projected.new_empty(heads, num_tokens, head_dim),
        scores=projected.new_empty(heads, num_tokens, layout.chunk),
        decay=projected.new_empty(num_chunks, heads, head_dim, dtype=torch.float32),
    )
    h = projected.new_empty(num_chunks, heads, head_dim, head_dim)
    slots = slot_in, slot_out
    own = chunks.query_key, chunks.values
    convolve(projected, weights, layout, shapes, conv_pool, *slots, *own)
    intra(projected, decay_inputs, weights, layout, shapes, chunks)
    parts = chunks.query_key, chunks.values, chunks.w, chunks.decay
    chunk_fwd_h(layout, shapes, recurrent_pool, *slots, *parts, h)
    return chunk_o(gate, weights, layout, shapes, chunks, h)
