"""Token mixers with states in slots: Gated DeltaNet, KDA and Mamba2, each from its input projection
to its output projection, over pools of states: short convolution, recurrence, gated norm.

Callers import from here, whichever kernels run. The package can be imported without triton.

weights      small weights of a layer, and what its projections hand over
table        which kernel serves decodes, verifies and prefills, and why no better one
fused        a step by the kernels that the table names
structures   the arguments of the kernels, grouped
rules        what differs between the mixers, as functions of the device
portable     kernels in Triton, for any chip
hopper       kernels in Gluon
reference    the definition, in plain torch, on any device

The fused kernels add up in float32; operands of matrix products have the projection's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import check_rows, check_slots
from milepost.kernels.recurrent import reference
from milepost.kernels.recurrent.reference import (
    MixerPieces,
    MixerRows,
    lay_out_pieces,
    lay_out_rows,
)
from milepost.kernels.recurrent.structures import LayerStates
from milepost.kernels.recurrent.table import (
    CHUNK,
    DECODES,
    TABLES,
    MixerPart,
    Recurrence,
    needs_arrivals,
)
from milepost.kernels.recurrent.weights import (
    GatedDeltaWeights,
    KDAProjected,
    KDAWeights,
    Mamba2Weights,
    MixerProjections,
    Weights,
)

__all__ = [
    "CHUNK",
    "TABLES",
    "GatedDeltaWeights",
    "KDAProjected",
    "KDAWeights",
    "LayerStates",
    "Mamba2Weights",
    "MixerPart",
    "Recurrence",
    "RecurrentOperation",
    "choose_chunk",
    "mix",
    "needs_arrivals",
    "takes_drafts_fused",
]

MixerLayout = ChunkLayout | DecodeLayout | VerifyLayout | MixerRows | MixerPieces

_CHUNKS = 64, 128
"""Lengths of chunks in tokens. Shorter chunks write more states than they read tokens; the products
within longer ones do not fit a program's registers."""
_LINE = 64


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
class RecurrentOperation:
    """A token mixer with convolutions of `conv_width` taps, computed in chunks of `chunk`
    tokens."""

    recurrence: Recurrence
    conv_width: int
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
            return define(batch, conv_width=self.conv_width, chunk=self.chunk)
        if batch.capacity.num_drafts or self._steps_by_verifying(batch):
            return lay_out_verifies(batch, self.chunk)
        if batch.capacity.decodes:
            num = batch.capacity.num_sequences
            has_groups = needs_arrivals(self.recurrence, num, batch.chip)
            return lay_out_decodes(num, self.recurrence.num_units if has_groups else 0)
        return chunks.lay_out_step(batch, self.chunk)

    def _steps_by_verifying(self, batch: Batch) -> bool:
        """Whether decodes run with the verify kernels, so that all decodes round alike. A decode
        beside a prefill would otherwise run with the prefill's kernels; and among decode kernels
        only Hopper's have the bits of the verify kernels."""
        if not self.order.is_fixed or not batch.capacity.decodes:
            return self.order.is_fixed
        assert batch.chip is not None, "the reference has rows"
        part = MixerPart(recurrence=self.recurrence, num=1)
        choice = DECODES.choose(part, batch.chip)
        return choice is None or not choice.kernel.is_hopper

    def why_reference(self, chip: Chip) -> str:  # noqa: ARG002
        """Why the reference runs on the chip; empty if the fused kernels do, as they do on every
        chip that Triton supports. KDA heads whose rows are not whole cache lines left wrong states
        in bfloat16 (H200, triton 3.6)."""
        head_dim = self.recurrence.shared
        if self.recurrence.rule is KDAWeights and head_dim % _LINE:
            return f"the fused ones have heads of multiples of {_LINE}, not {head_dim}"
        return ""


def mix(
    projected: MixerProjections,
    weights: Weights,
    states: LayerStates,
    layout: MixerLayout,
    *,
    emit: Emit = Emit.VALUES,
    order: SumOrder = SumOrder.FREE,
) -> Inputs:
    """Advances each sequence by all its tokens, as laid out by `layout`. Returns the mixer's output
    [T, heads * W] and writes both pools, including the states of exports.

    Rows of `projected` and slots of a pool may lie apart; everything else is contiguous.

    Records [rows, drafts, ...] hold a draft's row of the projections without the gates, for each
    draft of a sequence's previous step; this step's drafts replace them. A state is written as of
    the sequence's first token, never as of a draft.

    A slot that is written is read by no other sequence of the batch; several sequences may read one
    slot, and slot_out may equal slot_in. A negative slot_out marks padding, whose outputs are
    zeros, or undefined in steps that verify. Gated DeltaNet's output is emitted as `emit` asks,
    except in steps that verify; the other mixers return values alone. The products after it read
    one row in FP8 too if their `order` is FIXED.
    """
    if isinstance(layout, MixerRows | MixerPieces):
        return reference.mix(projected, weights, states, layout)
    rows = projected
    if isinstance(projected, KDAProjected):
        rows = projected.rows
        check_rows(decay_inputs=projected.decays, gate=projected.gate)
    assert isinstance(rows, Tensor)
    check_rows(projected=rows, slot_in=states.slot_in, slot_out=states.slot_out)
    check_slots(conv_pool=states.conv, recurrent_pool=states.recurrent)
    from milepost.kernels.recurrent import fused

    return fused.mix(projected, weights, states, layout, emit, order=order)
