"""A step's work for the reference kernels of token mixers that are a short convolution and a
recurrence.

Sequences that decode come first and take one step of the recurrence each, or, where the step
verifies, as many as they have tokens; the others go through chunks.

Legend: D decoding sequences, T tokens of theirs, F recorded tokens that are folded, R drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milepost.kernels import conv
from milepost.kernels.batch import Batch, Ints
from milepost.kernels.chunk_rows import ChunkRows, lay_out_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRows:
    """The sequences that do not decode."""

    slot_in: Tensor
    slot_out: Tensor
    chunks: ChunkRows
    windows: conv.ConvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One token of each of some decoding sequences."""

    sequences: Tensor
    """[n] int64"""
    tokens: Tensor
    """[n] int64, among F recorded tokens and the T of the step behind them."""
    stored: Tensor
    """[m] int64, the sequences whose states are written behind this token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifies:
    """Where the tokens of a step that verifies come from, and what is kept of them.

    Records are counted in tokens, row after row, in memory [rows, tokens of a row, ...].
    """

    lengths: tuple[int, ...]
    """[D] tokens of the step."""
    folded: tuple[Tensor, Tensor]
    """[F] int64 each: row and place of the records that are read."""
    drafts: Tensor
    """[R] int64, the tokens that are recorded."""
    recorded: tuple[Tensor, Tensor]
    """[R] int64 each: row and place of their records."""
    rounds: tuple[Round, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerRows:
    """Slots as int64, and where tokens stand in chunks and windows."""

    slot_in: Tensor
    """[D]"""
    slot_out: Tensor
    """[D]"""
    verifies: Verifies | None
    """None where each decoding sequence has one token and folds none."""
    prefills: PrefillRows | None


def lay_out_rows(
    batch: Batch, *, conv_width: int, chunk: int, has_records: bool = False
) -> MixerRows:
    """The rows of a step, for convolutions of so many taps and chunks of so many tokens."""
    decodes, device = batch.num_decodes, batch.device
    verifies = batch.verifies
    assert has_records or not verifies, "V1: only mixers that keep records verify"
    slot_in, slot_out = (
        torch.from_numpy(slots).to(device) for slots in (batch.slot_in, batch.slot_out)
    )
    prefills = None
    if decodes < len(batch.starts):
        starts, lengths = batch.starts[decodes:].tolist(), batch.lengths[decodes:].tolist()
        exports = [(sequence - decodes, *export) for sequence, *export in batch.exports]
        prefills = PrefillRows(
            slot_in=slot_in[decodes:],
            slot_out=slot_out[decodes:],
            chunks=lay_out_chunks(starts, lengths, exports, chunk=chunk, device=device),
            windows=conv.lay_out_windows(starts, lengths, exports, conv_width, device),
        )
    return MixerRows(
        slot_in=slot_in[:decodes],
        slot_out=slot_out[:decodes],
        verifies=_lay_out_verifies(batch) if verifies else None,
        prefills=prefills,
    )


def _lay_out_verifies(batch: Batch) -> Verifies:
    own, device = slice(batch.num_decodes), batch.device
    folds, lengths, rows = batch.folds[own], batch.lengths[own], batch.record_rows[own]
    num_drafts = np.maximum(lengths - 1, 0)
    assert ((rows >= 0) | ((folds == 0) & (num_drafts == 0))).all(), "V2: who records has a row"
    begins = lengths.cumsum() - lengths
    places = _ordinals(num_drafts)

    def send(numbers: Ints) -> Tensor:
        return torch.from_numpy(numbers).to(device)

    return Verifies(
        lengths=tuple(lengths.tolist()),
        folded=(send(rows.repeat(folds)), send(_ordinals(folds))),
        drafts=send(begins.repeat(num_drafts) + 1 + places),
        recorded=(send(rows.repeat(num_drafts)), send(places)),
        rounds=tuple(
            Round(sequences=send(sequences), tokens=send(tokens), stored=send(stored))
            for sequences, tokens, stored in _rounds(folds, lengths)
        ),
    )


def _rounds(folds: Ints, lengths: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Each sequence's first token, which may be a recorded one, then the second of those that have
    one, and so on."""
    firsts = folds.cumsum() - folds
    begins = folds.sum() + lengths.cumsum() - lengths
    stops = folds + np.minimum(lengths, 1)
    for number in range(int((folds + lengths).max())):
        sequences = np.flatnonzero(folds + lengths > number)
        tokens = np.where(number < folds, firsts + number, begins + number - folds)[sequences]
        yield sequences, tokens, np.flatnonzero(stops == number + 1)


def _ordinals(counts: Ints) -> Ints:
    """0, 1 ... count - 1 for each of `counts`."""
    return np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
