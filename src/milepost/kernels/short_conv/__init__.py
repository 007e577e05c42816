"""Gated short convolution from the input projection to the output projection, over states that lie
beside pages, or in slots.

A state is a convolution's last J - 1 inputs. After p tokens it lies beside the page of token p - 1,
the page that is being filled; beside a full page stays the state at the page's end. So a request
can resume at every page boundary and needs no slot. In models whose other layers do not keep states
at every boundary, states lie in slots, like those of recurrent layers.

Callers import the operation from here. `ShortConvOperation.lay_out` chooses the kernels by the
device, and `mix` runs those that the layout is for. `reference` is the definition, on any device.

Legend: T tokens, S sequences, C channels, J taps (kernel size).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from milepost.kernels.layout.batch import Batch, Operation, padded
from milepost.kernels.short_conv import reference
from milepost.kernels.short_conv.reference import (
    ShortConvRows,
    find_places,
    find_recorded,
    find_rows,
    num_drafts,
)

__all__ = ["ShortConvOperation", "mix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvItems:
    """A step for the fused kernels: int32 arrays, in numpy from `lay_out`, on the device for `mix`.
    T, S and the number E of written states are those of a capacity. Rows are the pool's: row 0 is
    zeros, row p + 1 lies beside page p; or row p is slot p."""

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
    """[S], accepted drafts of each one's previous step, -1 if it had none."""
    sequence_drafts: Any
    """[S]"""
    decodes: bool
    """Whether no sequence has more than one token, and there are as many tokens as sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvOperation(Operation):
    """Convolutions of `num_taps` taps."""

    num_taps: int
    in_slots: bool = False
    """Whether states lie in slots."""

    def lay_out(self, batch: Batch) -> ShortConvItems | ShortConvRows:
        """Returns items for the fused kernels, or rows for the reference."""
        if batch.chip is None:
            return reference.lay_out(batch, self.num_taps, in_slots=self.in_slots)
        return _lay_out_items(batch, in_slots=self.in_slots)


def _lay_out_items(batch: Batch, *, in_slots: bool) -> ShortConvItems:
    """Returns the layout of a step for the fused kernels."""
    capacity, count = batch.capacity, len(batch.starts)
    owners, begins = np.arange(count), batch.lengths.cumsum() - batch.lengths
    kept, written = find_places(batch, range(count), in_slots=in_slots)
    begun = batch.slot_in if in_slots else find_rows(batch, owners, batch.starts)
    recorded = find_recorded(batch, in_slots=in_slots)
    # The state at the first position may overwrite the one that is read, so it is written last.
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
        decodes=capacity.decodes
        and not capacity.num_drafts
        and capacity.num_tokens == capacity.num_sequences,
    )


def mix(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    layout: ShortConvItems | ShortConvRows,
    records: Tensor | None = None,
) -> Tensor:
    """Advances the sequences by all their tokens, as `layout` has them; returns [T, C] and writes
    the states at every page's end and where a sequence stops.

    `projected` [T, 3 * C]: gates before the convolution, gates after it, x. `weight` [C, J],
    `bias` [C]. `pool` [1 + pages, C, J - 1], oldest first: zeros, which nothing writes, and what
    lies beside each page; or [slots, C, J - 1].

    A row of `records` [rows, J - 1 + drafts, C] belongs to a sequence that had drafts in its
    previous step. It holds the inputs of the convolution after that step's own token: J - 1 of
    them, then those of the drafts. How many drafts were accepted is known only now, so the state is
    read from the record: the one beside the page may include rejected drafts, and the one in the
    slot precedes all drafts. This step's drafts replace the record.
    """
    if isinstance(layout, ShortConvRows):
        return reference.mix(projected, weight, bias, pool, layout, records)
    from milepost.kernels.short_conv import triton

    return triton.mix(projected, weight, bias, pool, layout, records)
