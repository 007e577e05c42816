"""Token mixers with states in slots: Gated DeltaNet, KDA and Mamba2, each from its input projection
to its output projection, over pools of states: short convolution, recurrence, gated norm.

Callers import from here, whichever kernels run. The package can be imported without triton.

mixer        what a mixer is: its rule and sizes, a layer's small weights, and what its projections
             hand over
table        which kernel serves decodes, verifies and prefills
fused        a step by the kernels that the table names
structures   the arguments of the kernels, grouped
portable     kernels in Triton, for any chip; what differs between the mixers in steps that decode
             is a rule of four device functions, in `gated_delta` (KDA too) and `mamba2`
hopper       kernels in Gluon
reference    the definition, in plain torch, on any device

The fused kernels add up in float32; operands of matrix products have the projection's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from milepost.kernels.layout import chunks
from milepost.kernels.layout.batch import Batch, Operation, padded
from milepost.kernels.layout.chunks import Array, ChunkLayout
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import check_rows, check_slots
from milepost.kernels.recurrent import reference
from milepost.kernels.recurrent.mixer import (
    DeltaWeights,
    KDAProjected,
    Mamba2Weights,
    MixerProjections,
    MixerSizes,
    RecurrentRule,
    Weights,
)
from milepost.kernels.recurrent.reference import (
    MixerPieces,
    MixerRows,
    lay_out_pieces,
    lay_out_rows,
)
from milepost.kernels.recurrent.structures import LayerStates
from milepost.kernels.recurrent.table import CHUNK, DECODES, TABLES, MixerPart, needs_arrivals

__all__ = [
    "CHUNK",
    "TABLES",
    "DeltaWeights",
    "KDAProjected",
    "LayerStates",
    "Mamba2Weights",
    "MixerPart",
    "MixerProjections",
    "MixerSizes",
    "RecurrentOperation",
    "RecurrentRule",
    "Weights",
    "choose_chunk",
    "needs_arrivals",
    "takes_drafts_fused",
]

_CHUNKS = 64, 128
"""Lengths of chunks in tokens. Shorter chunks write more states than they read tokens; the products
within longer ones do not fit a program's registers."""
_LINE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLayout:
    """The sequences that do not decode: int32 arrays."""

    chunks: ChunkLayout
    slot_in: Array
    """[S]"""
    slot_out: Array
    """[S], -1 for padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyLayout:
    """The decoding sequences: int32 arrays."""

    sequences: Array
    """[6, S], of each: its first token; its tokens, one and its drafts, or none; recorded tokens
    before them; its row of the records; slot_in; slot_out, -1 for padding. In this order kernels
    take them."""
    prefills: PrefillLayout | None
    """None where every sequence decodes."""

    @property
    def num_sequences(self) -> int:
        """S, including padding."""
        return int(self.sequences.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """Layout of a step in which every sequence decodes."""

    arrivals: Array | None
    """[S, G] int32 zeros: number of a group's programs that have read their inputs. The last one
    resets it, so all layers of a step share the array. None if no program waits for others."""


MixerLayout = ChunkLayout | DecodeLayout | VerifyLayout | MixerRows | MixerPieces


def choose_chunk(size: int) -> int:
    """Returns the longest supported chunk that is no longer than the model's own, else the
    shortest. Shorter chunks let prompts resume at more positions; results do not depend on the
    choice but for rounding."""
    return max((chunk for chunk in _CHUNKS if chunk <= size), default=_CHUNKS[0])


def takes_drafts_fused(key_dim: int, value_dim: int) -> bool:
    """Whether the fused kernels verify drafts correctly for Gated DeltaNet heads of these sizes:
    powers of two from 16 on. Other sizes need masks, and with those the states on a GPU differed
    from plain decoding."""
    return all(size >= 16 and size.bit_count() == 1 for size in (key_dim, value_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentOperation(Operation):
    """A token mixer, computed in chunks of `chunk` tokens."""

    sizes: MixerSizes
    chunk: int = CHUNK
    order: SumOrder = SumOrder.FREE
    """If FIXED, a sequence's bits do not depend on the rest of the batch."""

    def __post_init__(self) -> None:
        assert self.chunk <= _CHUNKS[-1], f"a chunk of {self.chunk} tokens outgrows a program"

    def lay_out(self, batch: Batch) -> MixerLayout:
        """Returns a step's layout: chunks, decodes or verifies for the fused kernels, rows or
        pieces for the reference."""
        if batch.chip is None:
            define = lay_out_pieces if self.order.is_fixed else lay_out_rows
            return define(batch, conv_width=self.sizes.taps, chunk=self.chunk)
        if batch.capacity.num_drafts or self._steps_by_verifying(batch):
            return lay_out_verifies(batch, self.chunk)
        if batch.capacity.decodes:
            num = batch.capacity.num_sequences
            has_groups = needs_arrivals(self.sizes, num, batch.chip)
            return lay_out_decodes(num, self.sizes.units if has_groups else 0)
        return chunks.lay_out_step(batch, self.chunk)

    def _steps_by_verifying(self, batch: Batch) -> bool:
        """Whether decodes run with the verify kernels, so that all decodes round alike. A decode
        beside a prefill would otherwise run with the prefill's kernels; and among decode kernels
        only Hopper's have the bits of the verify kernels."""
        if not self.order.is_fixed or not batch.capacity.decodes:
            return self.order.is_fixed
        assert batch.chip is not None, "the reference has rows"
        part = MixerPart(sizes=self.sizes, num=1)
        choice = DECODES.choose(part, batch.chip)
        return choice is None or not choice.kernel.is_hopper

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """Why the reference runs on the chip; empty if the fused kernels do, as they do on every
        chip that Triton supports. KDA heads whose rows are not whole cache lines left wrong states
        in bfloat16 (H200, triton 3.6)."""
        head_dim = self.sizes.shared
        if self.sizes.rule == RecurrentRule.KDA and head_dim % _LINE:
            return f"the fused ones have heads of multiples of {_LINE}, not {head_dim}"
        return ""

    def mix(
        self,
        projected: MixerProjections,
        weights: Weights,
        states: LayerStates,
        layout: MixerLayout,
    ) -> Tensor:
        """Advances each sequence by all its tokens, as laid out by `layout`. Returns the mixer's
        output [T, heads * W] and writes both pools, including the states of exports.

        Rows of `projected` and slots of a pool may be strided; everything else is contiguous.

        Records [rows, drafts, ...] hold a draft's row of the projections without the gates, for
        each draft of a sequence's previous step; this step's drafts replace them. A state is
        written as of the sequence's first token, never as of a draft.

        A slot that is written is read by no other sequence of the batch; several sequences may read
        one slot, and slot_out may equal slot_in. A negative slot_out marks padding, whose outputs
        are zeros, or undefined in steps that verify.
        """
        if isinstance(layout, MixerRows | MixerPieces):
            return reference.mix(self.sizes, projected, weights, states, layout)
        rows = projected
        if isinstance(projected, KDAProjected):
            rows = projected.rows
            check_rows(decay_inputs=projected.decays, gate=projected.gate)
        assert isinstance(rows, Tensor)
        check_rows(projected=rows, slot_in=states.slot_in, slot_out=states.slot_out)
        check_slots(conv_pool=states.conv, recurrent_pool=states.recurrent)
        from milepost.kernels.recurrent import fused

        mixer = fused.describe(projected, weights, self.sizes, self.order)
        return fused.mix(mixer, states, layout)


def lay_out_verifies(batch: Batch, chunk: int) -> VerifyLayout:
    """Lays out decodes of any length, and chunks for the others."""
    own, num = slice(batch.num_decodes), batch.capacity.num_sequences
    lengths = batch.lengths[own]
    sequences = np.zeros((6, num), np.int32)
    sequences[5] = -1
    sequences[:, : len(lengths)] = (
        lengths.cumsum() - lengths,
        lengths,
        batch.folds[own],
        batch.record_rows[own],
        batch.slot_in[own],
        batch.slot_out[own],
    )
    return VerifyLayout(
        sequences=sequences,
        prefills=None if batch.capacity.decodes else _lay_out_prefills(batch, chunk),
    )


def _lay_out_prefills(batch: Batch, chunk: int) -> PrefillLayout:
    decodes, capacity = batch.num_decodes, batch.capacity
    return PrefillLayout(
        chunks=chunks.lay_out(
            batch.starts[decodes:],
            batch.lengths[decodes:],
            [(sequence - decodes, end, slot) for sequence, end, slot in batch.exports],
            chunk=chunk,
            first=int(batch.lengths[:decodes].sum()),
            max_tokens=capacity.num_tokens,
            max_sequences=capacity.num_sequences,
            max_exports=capacity.num_exports,
        ),
        slot_in=padded(batch.slot_in[decodes:], capacity.num_sequences, 0),
        slot_out=padded(batch.slot_out[decodes:], capacity.num_sequences, -1),
    )


def lay_out_decodes(num_sequences: int, num_groups: int) -> DecodeLayout:
    """Returns the layout of a step's decodes; if `num_groups` is 0, no program waits for others."""
    arrivals = np.zeros((num_sequences, num_groups), np.int32) if num_groups else None
    return DecodeLayout(arrivals=arrivals)
