"""Gated short convolution in plain torch: the definition, on any device.

    out_t = c_t * (bias + sum_j weight[:, j] * (b * x)_{t - (J - 1) + j})        j = 0 .. J - 1

States lie beside pages, or in slots. The state beside a page is written by whoever writes the KV of
the page's newest token. So a page that is shared keeps its state, also where a sequence computes
some of its tokens again.

Legend: T tokens, S sequences, C channels, J taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from milepost.kernels import conv
from milepost.kernels.layout.batch import Batch, Ints, ordinals_of
from milepost.kernels.platform.tensors import cast


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTaps:
    """Inputs that are read from records and written to them. Places in records are pairs of a row
    and an input."""

    again: Tensor
    """[n] int64, sequences that begin with what was recorded of their step before."""
    read: tuple[Tensor, Tensor]
    """[n, J - 1] int64 each: these inputs."""
    recorded: tuple[Tensor, Tensor]
    """[m] int64 each: the inputs that are recorded."""
    sources: Tensor
    """[m] int64, the rows of the extended input that they are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvRows:
    """A step for the reference. Rows are the pool's: row 0 is zeros, row p + 1 lies beside page p;
    or row p is slot p."""

    rows_in: Tensor
    """[S] int64, the states that sequences begin with."""
    windows: conv.ConvLayout
    """The sequences' windows, with all states that they write as exports."""
    records: RecordedTaps | None
    """None if no decoding sequence has drafts or had some in its step before."""


def lay_out(batch: Batch, num_taps: int, *, in_slots: bool = False) -> ShortConvRows:
    """Returns the rows of a step."""
    owners, device = np.arange(len(batch.starts)), batch.device
    begun = batch.slot_in if in_slots else find_rows(batch, owners, batch.starts)
    kept, written = find_places(batch, owners.tolist(), in_slots=in_slots)
    exports = [(*place, row) for place, row in zip(kept.tolist(), written.tolist(), strict=True)]
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    windows = conv.lay_out_windows(starts, lengths, exports, num_taps, device)
    return ShortConvRows(
        rows_in=torch.from_numpy(begun).to(device),
        # Where a sequence stops is among the places already, if it is written at all.
        windows=replace(windows, kept=windows.kept[len(starts) :]),
        records=_lay_out_records(batch, num_taps, in_slots=in_slots) if has_drafts(batch) else None,
    )


def has_drafts(batch: Batch) -> bool:
    """Whether a decoding sequence has drafts, or had some in its step before."""
    recorded = batch.recorded is not None and (batch.recorded[: batch.num_decodes] >= 0).any()
    return batch.verifies or bool(recorded)


def num_drafts(batch: Batch) -> Ints:
    """Returns the number of each sequence's drafts."""
    decodes = np.arange(len(batch.starts)) < batch.num_decodes
    return np.where(decodes, np.maximum(batch.lengths - 1, 0), 0)


def find_recorded(batch: Batch, *, in_slots: bool) -> Ints:
    """Returns the number of recorded drafts after which each sequence continues, -1 if it continues
    from the state of its page or slot."""
    if in_slots:
        return np.where(batch.folds > 0, batch.folds, -1)
    return np.full(len(batch.starts), -1) if batch.recorded is None else batch.recorded


def _lay_out_records(batch: Batch, num_taps: int, *, in_slots: bool) -> RecordedTaps:
    width, rows, recorded = num_taps - 1, batch.record_rows, find_recorded(batch, in_slots=in_slots)
    assert in_slots or batch.recorded is not None, "V1: a step verifies only with records"
    drafts, inputs = num_drafts(batch), np.arange(width)
    assert ((rows >= 0) | ((recorded < 0) & (drafts == 0))).all(), "V2: who records has a row"
    again = np.flatnonzero(recorded >= 0)
    counts = np.where(drafts > 0, width + drafts, 0)
    number = ordinals_of(counts)
    # After a sequence's own token.
    first = batch.lengths.cumsum() - batch.lengths + np.arange(len(rows)) * width + 1

    def send(numbers: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(batch.device)

    return RecordedTaps(
        again=send(again),
        read=(send(rows[again][:, None].repeat(width, 1)), send(recorded[again][:, None] + inputs)),
        recorded=(send(rows.repeat(counts)), send(number)),
        sources=send(first.repeat(counts) + number),
    )


def find_rows(batch: Batch, sequences: Ints, positions: Ints) -> Ints:
    """Returns the rows of sequences' states after `positions` tokens."""
    last = np.maximum(positions - 1, 0) // batch.page_size
    pages = batch.tables[batch.rows[sequences], last].astype(np.int64)
    return np.where(positions > 0, pages + 1, 0)


def find_places(batch: Batch, sequences: Sequence[int], *, in_slots: bool) -> tuple[Ints, Ints]:
    """Returns what `find_kept` does, and the rows [n] of the states that are written; in slots they
    are those of exports, and where a sequence stops."""
    if not in_slots:
        kept = find_kept(batch, sequences)
        return kept, find_rows(batch, *kept.T)
    ends = batch.starts + batch.lengths - num_drafts(batch)
    own = [(each, int(ends[each]), int(batch.slot_out[each])) for each in sequences]
    exports = [export for export in batch.exports if export[0] in sequences]
    found = np.array([*exports, *own], np.int64).reshape(-1, 3)
    return found[:, :2], found[:, 2]


def find_kept(batch: Batch, sequences: Iterable[int]) -> Ints:
    """Returns [n, 2]: these sequences, each with the positions whose states it writes, the ends of
    pages and, if it has no drafts, where it stops."""
    return np.array(list(_find_kept(batch, sequences)), np.int64).reshape(-1, 2)


def _find_kept(batch: Batch, sequences: Iterable[int]) -> Iterator[tuple[int, int]]:
    size, begins = batch.page_size, batch.lengths.cumsum() - batch.lengths
    drafts = num_drafts(batch)
    for sequence in sequences:
        start = int(batch.starts[sequence])
        end = start + int(batch.lengths[sequence])
        newest = int(begins[sequence]) - start - 1
        stops = (end,) if not drafts[sequence] and end > start else ()
        page_ends = range(start // size * size + size, end + (not stops), size)
        for position in (*page_ends, *stops):
            if batch.kv_rows[newest + position] >= 0:
                yield sequence, position
            else:
                assert position % size == 0, "a step does not stop inside a shared page"


def mix(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    rows: ShortConvRows,
    records: Tensor | None = None,
) -> Tensor:
    """See `short_conv.mix`."""
    before, after, x = projected.chunk(3, -1)
    inputs, windows, own = before * x, rows.windows, rows.records
    states = pool.index_select(0, rows.rows_in).transpose(1, 2)
    if own is not None:
        assert records is not None, "V1: a step verifies only with records"
        states[own.again] = records[own.read]
    extended = conv.extend(inputs, states, windows)
    pool[windows.export_slots] = extended[windows.kept].transpose(1, 2)
    if own is not None and records is not None:
        records[own.recorded] = extended[own.sources]
    return cast(conv.convolve(extended, weight, bias, windows), inputs.dtype).mul_(after)
