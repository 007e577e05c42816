"""Gated DeltaNet from the input projection to the output projection, over pools of states: short
convolution, L2 norms, gates, gated delta rule and gated norm.

This is the door to the op: callers import it from here, whatever computes it. It can be imported
without triton. `GatedDeltaOperation.lay_out` chooses the kernels by the device's capabilities; what
it returns is what `mix` goes by. `reference` and `conv.reference` are the definition, on any
device; in the fused kernels sums are float32, the operands of matrix products have the
projection's type.

Legend: T tokens, S sequences, C channels, J taps, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from milepost.kernels.gated_delta import mixer
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.layout import chunks
from milepost.kernels.layout.batch import Batch
from milepost.kernels.layout.chunks import ChunkLayout
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.layout.verify import (
    DecodeLayout,
    VerifyLayout,
    lay_out_decodes,
    lay_out_verifies,
)
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tensors import check_rows, check_slots
from milepost.kernels.recurrent.mixer_rows import MixerRows, lay_out_rows

__all__ = [
    "CHUNK",
    "ChunkLayout",
    "GatedDeltaOperation",
    "GatedDeltaWeights",
    "MixerRows",
    "mix",
    "takes_drafts_fused",
]


MixerLayout = ChunkLayout | DecodeLayout | VerifyLayout | MixerRows

CHUNK = 64
"""Tokens in a full chunk."""


def takes_drafts_fused(key_dim: int, value_dim: int) -> bool:
    """Whether the fused kernels that verify are right for heads of these sizes: powers of two, from
    16 on. Of others, which need masks, a GPU's states were not those of plain decoding."""
    return all(size >= 16 and size.bit_count() == 1 for size in (key_dim, value_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaOperation:
    """The token mixer behind convolutions of so many taps."""

    conv_width: int
    num_key_heads: int
    num_value_heads: int

    def lay_out(self, batch: Batch) -> MixerLayout:
        """Chunks for the fused kernels, or what they need where every sequence decodes or the step
        may verify; or rows for the reference."""
        if batch.chip is None:
            return lay_out_rows(batch, conv_width=self.conv_width, chunk=CHUNK)
        if batch.capacity.num_drafts:
            return lay_out_verifies(batch, CHUNK)
        if batch.capacity.decodes:
            return lay_out_decodes(batch.capacity.num_sequences, self.num_key_heads)
        return chunks.lay_out_step(batch, CHUNK)

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """The fused kernels run on every chip that runs Triton's."""
        return ""


def mix(
    projected: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: MixerLayout,
    records: Tensor | None = None,
    *,
    emit: Emit = Emit.VALUES,
) -> Inputs:
    """Advance the sequences by all their tokens, as `layout` has them; returns [T, V * W] and
    writes both pools, the states of exports among them.

    `projected` [T, C + V * W + 2 * V]: queries, keys, values (the C channels), output gates, betas
    [V] before their sigmoid, decay inputs [V], heads side by side. `conv_pool` [slots, C, J - 1],
    `recurrent_pool` [slots, V, K, W], `slot_in` and `slot_out` [S] of any integer type. Rows of
    `projected` may be strided, as may a pool's slots be, and nothing else.

    `records` [rows, drafts, C + 2 * V] hold, of each draft that a sequence had in its step before,
    what is read of its row but for the gates; those of this step's drafts take their place. A state
    is written as it is behind a sequence's first token, never behind a draft.

    A slot that is written is read by no other sequence of the batch; several sequences may read one
    slot, and slot_out may be slot_in. Where slot_out is negative there is no sequence; outputs of
    padding are zeros, but for steps that verify, where they hold anything. The output is handed
    on as `emit` asks, but for that of steps that verify, which is values alone.
    """
    pools = conv_pool, recurrent_pool
    if isinstance(layout, MixerRows):
        return mixer.mix(projected, weights, *pools, layout, records)
    check_rows(projected=projected, slot_in=slot_in, slot_out=slot_out)
    check_slots(conv_pool=conv_pool, recurrent_pool=recurrent_pool)
    if isinstance(layout, DecodeLayout):
        from milepost.kernels.gated_delta import triton_step

        slots = slot_in, slot_out
        return triton_step.decode(projected, weights, *pools, *slots, layout, emit=emit)
    from milepost.kernels.gated_delta import triton_prefill

    if isinstance(layout, VerifyLayout):
        from milepost.kernels.gated_delta import triton_step

        assert records is not None, "V1: only mixers that keep records verify"
        output = projected.new_empty(len(projected), math.prod(recurrent_pool.shape[1::2]))
        triton_step.verify(projected, weights, *pools, layout, records, output)
        many = layout.prefills
        if many is not None:
            slots = many.slot_in, many.slot_out
            triton_prefill.prefill(projected, weights, *pools, *slots, many.chunks, output)
        return output
    slots = slot_in, slot_out
    return triton_prefill.prefill(projected, weights, *pools, *slots, layout, emit=emit)
