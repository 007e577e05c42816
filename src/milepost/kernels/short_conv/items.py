"""A step's short convolutions as the fused kernels take them: arrays of fixed capacities.

Legend: T tokens, S sequences, E states that are written, each with its capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from milepost.kernels.layout.batch import Batch, padded
from milepost.kernels.short_conv.reference import find_places, find_recorded, find_rows, num_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvItems:
    """int32 arrays, in numpy from `lay_out`, on the device for `mix`; rows are those of the pool,
    row 0 being zeros and row p + 1 beside page p, or slot p."""

    token_sequence: Any
    """[T], -1 for padding."""
    sequence_begin: Any
    """[S], the first token of each in the batch."""
    sequence_row: Any
    """[S], row of the state that each begins with."""
    sequence_place: Any
    """[S + 1], where each one's places begin, the last position first."""
    place_end: Any
    """[E], token of the batch before which a state stands."""
    place_row: Any
    """[E], row that it is written to."""
    sequence_record: Any
    """[S], row of the records."""
    sequence_recorded: Any
    """[S], drafts of its step before that each has taken since, -1 where it had none."""
    sequence_drafts: Any
    """[S]"""


def lay_out(batch: Batch, *, in_slots: bool = False) -> ShortConvItems:
    """Returns the states that a step reads, and those it writes."""
    capacity, count = batch.capacity, len(batch.starts)
    owners, begins = np.arange(count), batch.lengths.cumsum() - batch.lengths
    kept, written = find_places(batch, range(count), in_slots=in_slots)
    begun = batch.slot_in if in_slots else find_rows(batch, owners, batch.starts)
    recorded = find_recorded(batch, in_slots=in_slots)
    # A state that is read may be overwritten by the first place; the others are written before.
    order = np.lexsort((-kept[:, 1], kept[:, 0]))
    (sequence, position), written = kept[order].T, written[order]
    most = capacity.num_tokens // batch.page_size + 2 * capacity.num_sequences
    most += capacity.num_exports if in_slots else 0
    return ShortConvItems(
        token_sequence=padded(owners.repeat(batch.lengths), capacity.num_tokens, -1),
        sequence_begin=padded(begins, capacity.num_sequences, 0),
        sequence_row=padded(begun, capacity.num_sequences, 0),
        sequence_place=padded(
            np.searchsorted(sequence, np.arange(count + 1)), capacity.num_sequences + 1, len(kept)
        ),
        place_end=padded(position - (batch.starts - begins)[sequence], most, 0),
        place_row=padded(written, most, 0),
        sequence_record=padded(batch.record_rows, capacity.num_sequences, -1),
        sequence_recorded=padded(recorded, capacity.num_sequences, -1),
        sequence_drafts=padded(num_drafts(batch), capacity.num_sequences, 0),
    )
