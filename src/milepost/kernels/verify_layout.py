"""What the fused kernels of token mixers with states in slots need to know of a step that may
verify.

Legend: S sequences, with their capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.kernels import chunks
from milepost.kernels.batch import Batch, padded
from milepost.kernels.chunks import Array, ChunkLayout
from milepost.kernels.decode_layout import DecodeLayout, lay_out_decodes

UNSPECIALISED = [*chunks.UNSPECIALISED, "begin", "length", "fold", "row", "arrivals"]
"""Arrays that begin anywhere in a buffer."""


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

    begin: Array
    """[S], first token of each."""
    length: Array
    """[S], its tokens: one and its drafts, or none."""
    fold: Array
    """[S], recorded tokens before them."""
    row: Array
    """[S], of the records."""
    slot_in: Array
    """[S]"""
    slot_out: Array
    """[S], -1 for padding."""
    decodes: DecodeLayout | None
    """Of programs that finish for others, as those of decodes do."""
    prefills: PrefillLayout | None
    """None where every sequence decodes."""

    @property
    def sequences(self) -> tuple[Array, ...]:
        """As kernels take them."""
        return self.begin, self.length, self.fold, self.row, self.slot_in, self.slot_out


def lay_out_verifies(batch: Batch, chunk: int, num_groups: int = 0) -> VerifyLayout:
    """Decodes of any length, in so many groups of programs that wait for one another, and chunks
    for the others."""
    own, num = slice(batch.num_decodes), batch.capacity.num_sequences
    lengths = batch.lengths[own]
    return VerifyLayout(
        begin=padded(lengths.cumsum() - lengths, num, 0),
        length=padded(lengths, num, 0),
        fold=padded(batch.folds[own], num, 0),
        row=padded(batch.record_rows[own], num, 0),
        slot_in=padded(batch.slot_in[own], num, 0),
        slot_out=padded(batch.slot_out[own], num, -1),
        decodes=lay_out_decodes(num, num_groups) if num_groups else None,
        prefills=None if batch.capacity.decodes else _lay_out_prefills(batch, chunk),
    )


def _lay_out_prefills(batch: Batch, chunk: int) -> PrefillLayout:
    decodes, capacity = batch.num_decodes, batch.capacity
    return PrefillLayout(
        chunks=chunks.lay_out(
            batch.starts[decodes:],
            batch.lengths[decodes:],
            [(sequence - decodes, *export) for sequence, *export in batch.exports],
            chunk=chunk,
            first=int(batch.lengths[:decodes].sum()),
            max_tokens=capacity.num_tokens,
            max_sequences=capacity.num_sequences,
            max_exports=capacity.num_exports,
        ),
        slot_in=padded(batch.slot_in[decodes:], capacity.num_sequences, 0),
        slot_out=padded(batch.slot_out[decodes:], capacity.num_sequences, -1),
    )
