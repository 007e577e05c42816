"""Layout of a step that may verify, for the fused kernels of token mixers with states in slots.

Legend: S sequences, with their capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milepost.kernels.layout import chunks
from milepost.kernels.layout.batch import Batch, padded
from milepost.kernels.layout.chunks import Array, ChunkLayout


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """Layout of a step in which every sequence decodes."""

    arrivals: Array | None
    """[S, G] int32 zeros: number of a group's programs that have read their inputs. The last one
    resets it, so all layers of a step share the array. None if no program waits for others."""


def lay_out_decodes(num_sequences: int, num_groups: int) -> DecodeLayout:
    """Returns the layout of a step's decodes; if `num_groups` is 0, no program waits for others."""
    arrivals = np.zeros((num_sequences, num_groups), np.int32) if num_groups else None
    return DecodeLayout(arrivals=arrivals)
