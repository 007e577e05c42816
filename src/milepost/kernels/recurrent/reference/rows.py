"""A step's work for the reference of token mixers: a short convolution, then a recurrence.

Sequences that decode come first. Each takes one step of the recurrence, or in a step that verifies
one per token. The other sequences go through chunks.

Legend: D decoding sequences, T tokens of theirs, F recorded tokens that are folded, R drafts, E
numbers of a token's record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from milepost.kernels import conv
from milepost.kernels.layout.batch import Batch, Ints, ordinals_of
from milepost.kernels.layout.chunks import ChunkRows, lay_out_chunks
from milepost.kernels.platform.tensors import write_slots
from milepost.kernels.recurrent.structures import LayerStates


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
    """[n] int64, among F recorded tokens and the T of the step after them."""
    stored: Tensor
    """[m] int64, the sequences whose states are written after this token."""


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
    """A step for the reference: slots as int64, and where tokens stand in chunks and windows."""

    slot_in: Tensor
    """[D]"""
    slot_out: Tensor
    """[D]"""
    verifies: Verifies | None
    """None where each decoding sequence has one token and folds none."""
    prefills: PrefillRows | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerPieces:
    """A step whose pieces are computed one after the other, so that bits depend on one sequence
    alone: each decoding sequence, and each chunk of the others."""

    pieces: tuple[tuple[slice, MixerRows], ...]
    """Each piece's tokens, and its rows."""


def lay_out_pieces(batch: Batch, *, conv_width: int, chunk: int) -> MixerPieces:
    """Returns the pieces of a step, with the arguments of `lay_out_rows`."""
    pieces = (
        (tokens, lay_out_rows(own, conv_width=conv_width, chunk=chunk))
        for tokens, own in _cut(batch, chunk)
    )
    return MixerPieces(pieces=tuple(pieces))


def _cut(batch: Batch, chunk: int) -> Iterator[tuple[slice, Batch]]:
    """Cuts a step into batches of one sequence, and those of prefills at multiples of `chunk`. All
    pieces of a sequence but the first read the state that the one before has written."""
    first = 0
    for sequence in range(len(batch.starts)):
        start, own = int(batch.starts[sequence]), slice(sequence, sequence + 1)
        end, decodes = start + int(batch.lengths[sequence]), sequence < batch.num_decodes
        cuts = () if decodes else range((start // chunk + 1) * chunk, end, chunk)
        for begin, stop in pairwise((start, *cuts, end)):
            exports = (each for each in batch.exports if each[0] == sequence)
            yield (
                slice(first, first + stop - begin),
                replace(
                    batch,
                    starts=np.array([begin]),
                    lengths=np.array([stop - begin]),
                    num_decodes=int(decodes),
                    folds=batch.folds[own],
                    record_rows=batch.record_rows[own],
                    slot_in=(batch.slot_in if begin == start else batch.slot_out)[own],
                    slot_out=batch.slot_out[own],
                    exports=tuple((0, at, slot) for _, at, slot in exports if begin < at <= stop),
                ),
            )
            first += stop - begin


def lay_out_rows(batch: Batch, *, conv_width: int, chunk: int) -> MixerRows:
    """Returns the rows of a step, for convolutions of `conv_width` taps and chunks of `chunk`
    tokens."""
    decodes, device = batch.num_decodes, batch.device
    slot_in, slot_out = (
        torch.from_numpy(slots).to(device) for slots in (batch.slot_in, batch.slot_out)
    )
    prefills = None
    if decodes < len(batch.starts):
        starts, lengths = batch.starts[decodes:].tolist(), batch.lengths[decodes:].tolist()
        exports = [(sequence - decodes, end, slot) for sequence, end, slot in batch.exports]
        prefills = PrefillRows(
            slot_in=slot_in[decodes:],
            slot_out=slot_out[decodes:],
            chunks=lay_out_chunks(starts, lengths, exports, chunk=chunk, device=device),
            windows=conv.lay_out_windows(starts, lengths, exports, conv_width, device),
        )
    return MixerRows(
        slot_in=slot_in[:decodes],
        slot_out=slot_out[:decodes],
        verifies=_lay_out_verifies(batch) if batch.verifies else None,
        prefills=prefills,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A mixer's arithmetic."""

    prepare: Callable[..., Sequence[Tensor]]
    """Takes what is recorded of tokens; returns the convolution's inputs, and what else the
    recurrence reads, row by row."""
    conv: tuple[Tensor, Tensor | None]
    """The convolution's weight and bias."""
    split: Callable[[Tensor, Tensor], Sequence[Tensor]]
    """Takes what is convolved and the pool of recurrent states; returns heads."""
    decode: Callable[..., Tensor]
    """Advances states by a token a sequence: takes heads, the rest of what is prepared, the pool,
    slot_in and slot_out; returns [D, ...]."""
    prefill: Callable[..., Tensor]
    """Advances states by many tokens: takes the same, and chunks; returns [T, ...]."""


def run(steps: Steps, inputs: Sequence[Tensor], states: LayerStates, rows: MixerRows) -> Tensor:
    """Advances the sequences by all their tokens; returns [T, ...].

    `inputs` [T, ...], side by side [T, E], are what is recorded of a draft in the records [rows,
    drafts, E].
    """
    num_decodes, parts, pools = len(rows.slot_in), [], (states.conv, states.recurrent)
    if rows.verifies is not None:
        num_decodes = sum(rows.verifies.lengths)
        parts.append(_verify(steps, [part[:num_decodes] for part in inputs], states, rows))
    elif num_decodes:
        own = steps.prepare(*(part[:num_decodes] for part in inputs))
        parts.append(_decode(steps, own, pools, rows.slot_in, rows.slot_out))
    if rows.prefills is not None:
        mixed, *own = steps.prepare(*(part[num_decodes:] for part in inputs))
        many, slots = rows.prefills, (rows.prefills.slot_in, rows.prefills.slot_out)
        mixed = conv.prefill(mixed, *steps.conv, states.conv, *slots, many.windows)
        heads = steps.split(mixed, states.recurrent)
        parts.append(steps.prefill(*heads, *own, states.recurrent, *slots, many.chunks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(
    steps: Steps, prepared: Iterable[Tensor], pools: Sequence[Tensor], *slots: Tensor
) -> Tensor:
    """Advances each sequence by one token, in pools of convolution and recurrent states."""
    (mixed, *rest), (conv_pool, pool) = prepared, pools
    mixed = conv.decode(mixed, *steps.conv, conv_pool, *slots)
    return steps.decode(*steps.split(mixed, pool), *rest, pool, *slots)


def carry_states(
    advance: Callable[[int, int, Tensor], None],
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: ChunkRows,
    dtype: torch.dtype,
) -> None:
    """Carries states through chunks by `advance(first, size, states)`, which changes the states of
    `size` sequences by the chunks from `first` on; writes them to `pool`, exports on the way."""
    state = pool.index_select(0, slot_in.index_select(0, layout.order)).to(dtype)
    for (first, size), exports in zip(layout.steps, layout.exports, strict=True):
        advance(first, size, state[:size])
        for index, slot in exports:
            pool[slot].copy_(state[index])
    write_slots(pool, slot_out.index_select(0, layout.order), state)


def _verify(steps: Steps, inputs: Sequence[Tensor], states: LayerStates, rows: MixerRows) -> Tensor:
    """Computes tokens one by one, with the operations of a decode, in a copy of the states."""
    verifies, records, pools = rows.verifies, states.records, (states.conv, states.recurrent)
    assert verifies is not None
    assert records is not None, "V1: only mixers that keep records verify"
    own = [pool.index_select(0, rows.slot_in) for pool in pools]
    old = records[verifies.folded].split([part.shape[1] for part in inputs], -1)
    records[verifies.recorded] = torch.cat([part[verifies.drafts] for part in inputs], 1)
    both = steps.prepare(*(torch.cat(parts) for parts in zip(old, inputs, strict=True)))
    output = None
    for each in verifies.rounds:
        of_round = (part[each.tokens] for part in both)
        found = _decode(steps, of_round, own, each.sequences, each.sequences)
        output = found.new_empty(len(both[0]), *found.shape[1:]) if output is None else output
        output[each.tokens] = found
        for pool, kept in zip(pools, own, strict=True):
            pool[rows.slot_out[each.stored]] = kept[each.stored]
    assert output is not None, "who verifies has a token, recorded or new"
    return output[len(old[0]) :]


def _lay_out_verifies(batch: Batch) -> Verifies:
    own, device = slice(batch.num_decodes), batch.device
    folds, lengths, rows = batch.folds[own], batch.lengths[own], batch.record_rows[own]
    num_drafts = np.maximum(lengths - 1, 0)
    assert ((rows >= 0) | ((folds == 0) & (num_drafts == 0))).all(), "V2: who records has a row"
    begins = lengths.cumsum() - lengths
    places = ordinals_of(num_drafts)

    def send(numbers: Ints) -> Tensor:
        return torch.from_numpy(numbers).to(device)

    return Verifies(
        lengths=tuple(lengths.tolist()),
        folded=(send(rows.repeat(folds)), send(ordinals_of(folds))),
        drafts=send(begins.repeat(num_drafts) + 1 + places),
        recorded=(send(rows.repeat(num_drafts)), send(places)),
        rounds=tuple(
            Round(sequences=send(sequences), tokens=send(tokens), stored=send(stored))
            for sequences, tokens, stored in _rounds(folds, lengths)
        ),
    )


def _rounds(folds: Ints, lengths: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yields each sequence's first token, which may be a recorded one, then the second of those
    that have one, and so on."""
    firsts = folds.cumsum() - folds
    begins = folds.sum() + lengths.cumsum() - lengths
    stops = folds + np.minimum(lengths, 1)
    for number in range(int((folds + lengths).max())):
        sequences = np.flatnonzero(folds + lengths > number)
        tokens = np.where(number < folds, firsts + number, begins + number - folds)[sequences]
        yield sequences, tokens, np.flatnonzero(stops == number + 1)
