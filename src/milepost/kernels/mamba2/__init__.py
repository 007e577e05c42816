"""Mamba2 from the input projection to the output projection, over pools of states: short
convolution, time steps, SSD recurrence and grouped gated norm.

This is the door to the op: callers import it from here, whatever computes it. It can be imported
without triton. `Mamba2Operation.lay_out` chooses the kernels by the device's capabilities; what it
returns is what `mix` goes by. `reference` and `conv.reference` are the definition, on any device;
in the fused kernels sums are float32, the operands of matrix products have the projection's type.

Legend: T tokens, S sequences, C = H * P + 2 * G * N channels, J taps, H heads, P head_dim, G
groups, N state_size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from milepost.kernels.layout import chunks
from milepost.kernels.layout.batch import Batch
from milepost.kernels.layout.chunks import ChunkLayout
from milepost.kernels.layout.verify import (
    DecodeLayout,
    VerifyLayout,
    lay_out_decodes,
    lay_out_verifies,
)
from milepost.kernels.mamba2 import mixer
from milepost.kernels.mamba2.weights import Mamba2Weights
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tensors import check_rows, check_slots
from milepost.kernels.recurrent.mixer_rows import MixerRows, lay_out_rows

__all__ = ["Mamba2Operation", "Mamba2Weights", "choose_chunk", "mix"]

MixerLayout = ChunkLayout | DecodeLayout | VerifyLayout | MixerRows

_CHUNKS = 64, 128
"""Tokens: shorter ones leave more states to write than tokens to read; of longer ones the products
within a chunk outgrow a program's registers."""


def choose_chunk(size: int) -> int:
    """The longest chunk that is no longer than the model's own, if there is one: how a sum is split
    is the kernels' matter, and what can be resumed is the finer the shorter chunks are."""
    return max((chunk for chunk in _CHUNKS if chunk <= size), default=_CHUNKS[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Operation:
    """The token mixer behind convolutions of so many taps, in chunks of so many tokens."""

    conv_width: int
    chunk: int
    num_groups: int

    def __post_init__(self) -> None:
        assert self.chunk <= _CHUNKS[-1], f"a chunk of {self.chunk} tokens outgrows a program"

    def lay_out(self, batch: Batch) -> MixerLayout:
        """Chunks for the fused kernels, or what they need where every sequence decodes or the step
        may verify; or rows for the reference."""
        if batch.chip is None:
            return lay_out_rows(batch, conv_width=self.conv_width, chunk=self.chunk)
        if batch.capacity.num_drafts:
            return lay_out_verifies(batch, self.chunk)
        if batch.capacity.decodes:
            return lay_out_decodes(batch.capacity.num_sequences, self.num_groups)
        return chunks.lay_out_step(batch, self.chunk)

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """The fused kernels run on every chip that runs Triton's."""
        return ""


def mix(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: MixerLayout,
    records: Tensor | None = None,
) -> Tensor:
    """Advance the sequences by all their tokens, as `layout` has them; returns [T, H * P] and
    writes both pools, the states of exports among them.

    `projected` [T, H * P + C + H]: gates, x, B, C (the C channels), time steps. `conv_pool`
    [slots, C, J - 1], `recurrent_pool` [slots, H, P, N], `slot_in` and `slot_out` [S] of any
    integer type. Rows of `projected` may be strided, as may a pool's slots be, and nothing else.

    `records` [rows, drafts, C + H] hold, of each draft that a sequence had in its step before, its
    row of `projected` but for the gates; those of this step's drafts take their place. A state is
    written as it is behind a sequence's first token, never behind a draft.

    A slot that is written is read by no other sequence of the batch; several sequences may read one
    slot, and slot_out may be slot_in. Where slot_out is negative there is no sequence; outputs of
    padding are zeros, but for steps that verify, where they hold anything.
    """
    pools = conv_pool, recurrent_pool
    if isinstance(layout, MixerRows):
        return mixer.mix(projected, weights, *pools, layout, records)
    check_rows(projected=projected, slot_in=slot_in, slot_out=slot_out)
    check_slots(conv_pool=conv_pool, recurrent_pool=recurrent_pool)
    if isinstance(layout, DecodeLayout):
        from milepost.kernels.mamba2 import triton_step

        return triton_step.decode(projected, weights, *pools, slot_in, slot_out, layout)
    from milepost.kernels.mamba2 import triton_prefill

    if isinstance(layout, VerifyLayout):
        from milepost.kernels.mamba2 import triton_step

        assert records is not None, "V1: only mixers that keep records verify"
        many = layout.prefills
        if many is None:
            output = projected.new_empty(len(projected), math.prod(recurrent_pool.shape[1:3]))
        else:
            slots = many.slot_in, many.slot_out
            output = triton_prefill.prefill(projected, weights, *pools, *slots, many.chunks)
        triton_step.verify(projected, weights, *pools, layout, records, output)
        return output
    return triton_prefill.prefill(projected, weights, *pools, slot_in, slot_out, layout)
