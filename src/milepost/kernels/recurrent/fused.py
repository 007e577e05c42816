"""A step of a token mixer by the fused kernels that the tables name.

A prefill with the delta rule (Gated DeltaNet, KDA) takes four launches. Those of Mamba2 are in
`portable.mamba2`.

1. `conv.convolve_heads`: a head of a tile in each program; queries, keys and values, ready for the
   rule.
2. `delta.wy_fwd`: a value head of a chunk; all that does not depend on the state before it. For KDA
   that is `intra.intra`, which also multiplies decays into queries and keys, so nobody after it
   needs them channel by channel.
3. `chunk_h`: some columns of a value head's state, from chunk to chunk of a sequence, in float32;
   leaves the state before every chunk, writes exports and final states.
4. `delta.chunk_fwd_o`: a value head of a chunk; outputs, then the gated norm.

A chunk's arithmetic depends on nothing but its tokens and the state before it: that is what makes
an export equal, bit for bit, the state that a prefill ending there leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from milepost.kernels.layout.chunks import ChunkLayout
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.tables import Kernel, KernelTable, SumOrder
from milepost.kernels.recurrent import DecodeLayout, VerifyLayout
from milepost.kernels.recurrent.mixer import MixerProjections, MixerSizes, RecurrentRule, Weights
from milepost.kernels.recurrent.portable import gated_delta, mamba2
from milepost.kernels.recurrent.portable.conv import convolve_heads
from milepost.kernels.recurrent.portable.delta import wy_fwd
from milepost.kernels.recurrent.portable.intra import intra
from milepost.kernels.recurrent.structures import (
    ChunkTensors,
    LayerStates,
    Mixer,
    PrefillChunks,
    slot_states,
)
from milepost.kernels.recurrent.table import (
    DECODES,
    OUTPUTS,
    STATES,
    VERIFIES,
    MixerPart,
    is_reached,
)


def describe(
    projected: MixerProjections, weights: Weights, sizes: MixerSizes, order: SumOrder
) -> Mixer:
    """Describes a layer's mixer for the kernels."""
    rule: Any = mamba2 if sizes.rule == RecurrentRule.MAMBA2 else gated_delta
    inputs = rule.inputs_of(projected, sizes)
    return Mixer(inputs=inputs, weights=weights, sizes=sizes, rule=rule.RULE, order=order)


def mix(
    mixer: Mixer, states: LayerStates, layout: ChunkLayout | DecodeLayout | VerifyLayout
) -> Tensor:
    """See `RecurrentOperation.mix`."""
    if isinstance(layout, DecodeLayout):
        return _decode(mixer, states, layout.arrivals)
    if isinstance(layout, ChunkLayout):
        return _prefill(mixer, states, layout)
    like, many = mixer.inputs.mixed.base, layout.prefills
    if many is None:
        output: Tensor = like.new_empty(len(like), mixer.sizes.width)
    else:
        own = states._replace(slot_in=many.slot_in, slot_out=many.slot_out)
        output = _prefill(mixer, own, many.chunks)
    if states.records is None:  # nothing is drafted, nothing is recorded
        states = states._replace(records=like.new_empty(1, 1, like.shape[1]))
    steps = states.verifies(layout.sequences)
    kernel = _choose(VERIFIES, mixer, len(steps.sequences.slot_out), states)
    kernel.run(mixer, steps, output)
    return output


def _decode(mixer: Mixer, states: LayerStates, arrivals: Tensor | None) -> Tensor:
    num_sequences = len(states.slot_out)
    output: Tensor = mixer.inputs.mixed.base.new_empty(num_sequences, mixer.sizes.width)
    kernel = _choose(DECODES, mixer, num_sequences, states)
    kernel.run(mixer, states.decodes(), output, arrivals)
    return output


def _prefill(mixer: Mixer, states: LayerStates, layout: ChunkLayout) -> Tensor:
    if mixer.sizes.rule == RecurrentRule.MAMBA2:
        return mamba2.prefill(mixer, states, layout)
    num_tokens, chunks = len(mixer.inputs.mixed.base), states.chunks(layout)
    tensors = _prepare(mixer, states, layout, chunks)
    kernel = _choose(STATES, mixer, num_tokens, states, layout.chunk)
    pool = slot_states(states.recurrent)
    kernel.run(mixer, layout.chunk, pool, chunks, tensors)
    kernel = _choose(OUTPUTS, mixer, num_tokens, states, layout.chunk)
    output: Tensor = tensors.v.new_empty(num_tokens, mixer.sizes.width)
    kernel.run(mixer, layout.chunk, chunks, tensors, output)
    return output


def _prepare(
    mixer: Mixer, states: LayerStates, layout: ChunkLayout, chunks: PrefillChunks
) -> ChunkTensors:
    """Runs the first two launches of a prefill, which do not depend on the states before chunks."""
    tensors = _open(mixer, layout)
    conv, tiles = slot_states(states.conv), states.tiles(layout)
    convolve_heads(mixer, conv, tiles, tensors.query_key, tensors.v)
    if tensors.scores is None:
        wy_fwd(mixer, layout.chunk, chunks, tensors)
    else:
        intra(mixer, layout.chunk, chunks, tensors)
    return tensors


def _open(mixer: Mixer, layout: ChunkLayout) -> ChunkTensors:
    """Returns unfilled tensors for a prefill."""
    sizes, like = mixer.sizes, mixer.inputs.mixed.base
    num_tokens, num_chunks, heads = len(like), len(layout.chunk_size), sizes.heads
    decay = (num_chunks, heads, sizes.shared) if sizes.by_channel else (heads, num_tokens)
    return ChunkTensors(
        query_key=like.new_empty(2 * sizes.units, num_tokens, sizes.shared),
        v=like.new_empty(heads, num_tokens, sizes.own),
        w=like.new_empty(heads, num_tokens, sizes.shared),
        decay=like.new_empty(decay, dtype=torch.float32),
        h=like.new_empty(num_chunks, heads, sizes.shared, sizes.own),
        scores=like.new_empty(heads, num_tokens, layout.chunk) if sizes.by_channel else None,
    )


def _choose(
    table: KernelTable[MixerPart], mixer: Mixer, num: int, states: LayerStates, chunk: int = 64
) -> Kernel[MixerPart]:
    like = mixer.inputs.mixed.base
    part = MixerPart(
        sizes=mixer.sizes,
        num=num,
        element_bytes=like.element_size(),
        chunk=chunk,
        is_reached=is_reached(states.recurrent),
    )
    choice = table.choose(part, probe(like.device))
    assert choice is not None, "kernels for any chip serve all"
    return choice.kernel
