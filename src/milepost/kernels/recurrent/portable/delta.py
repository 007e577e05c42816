"""A prefill of the delta rule, Gated DeltaNet's or KDA's, in four launches.

1. `conv.convolve_heads`: a head of a tile in each program; queries, keys and values, ready for the
   rule.
2. `wy.wy_fwd`: a value head of a chunk; all that does not depend on the state before it. For KDA
   that is `intra.intra`, which also multiplies decays into queries and keys, so nobody after it
   needs them channel by channel.
3. `chunk_h`: some columns of a value head's state, from chunk to chunk of a sequence,
   in float32; leaves the state before every chunk, writes exports and final states.
4. `chunk_o`: a value head of a chunk; outputs, then the gated norm.

A chunk's arithmetic depends on nothing but its tokens and the state before it: that is what makes
an export equal, bit for bit, the state that a prefill ending there leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.layout.chunks import ChunkLayout
from milepost.kernels.recurrent.portable.conv import convolve_heads
from milepost.kernels.recurrent.portable.intra import intra
from milepost.kernels.recurrent.portable.wy import wy_fwd
from milepost.kernels.recurrent.structures import (
    ChunkTensors,
    LayerStates,
    Mixer,
    PrefillChunks,
    slot_states,
)


def prepare(
    mixer: Mixer, states: LayerStates, layout: ChunkLayout, chunks: PrefillChunks
) -> ChunkTensors:
    """The first two launches: all that does not depend on states before chunks."""
    tensors = _open(mixer, layout)
    conv, tiles = slot_states(states.conv), states.tiles(layout)
    convolve_heads(mixer, conv, tiles, tensors.query_key, tensors.v)
    if tensors.scores is None:
        wy_fwd(mixer, layout.chunk, chunks, tensors)
    else:
        intra(mixer, layout.chunk, chunks, tensors)
    return tensors


def _open(mixer: Mixer, layout: ChunkLayout) -> ChunkTensors:
    """Unfilled tensors for a prefill."""
    sizes, like = mixer.sizes, mixer.inputs.mixed.base
    num_tokens, num_chunks, heads = len(like), len(layout.chunk_size), sizes.heads
    by_channel = sizes.decays > heads
    decay = (num_chunks, heads, sizes.shared) if by_channel else (heads, num_tokens)

    def empty(*shape: int) -> Tensor:
        return like.new_empty(*shape)

    return ChunkTensors(
        query_key=empty(2 * sizes.units, num_tokens, sizes.shared),
        v=empty(heads, num_tokens, sizes.own),
        w=empty(heads, num_tokens, sizes.shared),
        decay=like.new_empty(decay, dtype=torch.float32),
        h=empty(num_chunks, heads, sizes.shared, sizes.own),
        scores=empty(heads, num_tokens, layout.chunk) if by_channel else None,
    )
