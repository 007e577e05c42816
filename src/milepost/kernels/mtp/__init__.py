"""The inputs of an MTP head: each token's embedding, and the hidden state before it.

In a step the state before a token is that after the previous token of the batch. Before a
sequence's first it is *carried*: each slot holds the last hidden state of the tokens that it stands
for. So a hit, whose tokens are not in the batch, has it too, bit for bit. After accepted drafts it
is one of the recorded states; recurrent layers record theirs likewise.

These are the definitions, in plain torch; on a GPU `triton` computes them. The host works out
before, for kernels too, where hidden states are read and carried to.

Legend: T tokens, S sequences, W states to be carried, R tokens that may be drafts, V vocabulary, C
hidden size, N numbers of a state; T and S of a capacity where rows are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.kernels import norm
from milepost.kernels.layout.batch import Batch, Ints, Operation, ordinals_of
from milepost.kernels.platform.tables import fused

__all__ = [
    "Carried",
    "CarryOperation",
    "CarryRows",
    "join",
    "keep",
    "keep_states",
    "lay_out",
]

_NUM_REMEMBERED = 64
"""Number of layouts kept, by the sequences' lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Hidden states that slots carry, beside the pools of layers."""

    states: Tensor
    """[slots, C], the last of the tokens that each slot stands for."""
    records: Tensor | None = None
    """[rows, drafts, C], those of the drafts of a sequence's last step, in the rows of all records;
    None where nothing is drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryRows:
    """int32 arrays: in numpy if they are to be sent to a device, else tensors. A record is
    identified by its row and a draft; -1 means none."""

    sources: Any
    """[T, 2]: the slot that carries the state before a token, and -1; or the record of it; twice -1
    if it is the state after the previous token of the batch."""
    targets: Any
    """[W, 4]: the token after which a state is carried on, or -1 if it is recorded; the slot
    that carries it, -1 for padding; the record."""
    recorded: Any
    """[T, 2]: where the state after a draft is recorded."""


def lay_out(batch: Batch) -> CarryRows:
    """Lays out a step; records and slots are read before they are written."""
    capacity, num_tokens, num = batch.capacity, batch.capacity.num_tokens, len(batch.starts)
    places = _places(batch.lengths.tobytes(), batch.num_decodes)
    last_folded = batch.folds - 1
    sources = np.full((num_tokens, 2), -1, np.int32)
    before = np.where(batch.folds > 0, batch.record_rows, batch.slot_in)
    sources[places.firsts, 0] = before[places.computing]
    sources[places.firsts, 1] = last_folded[places.computing]
    most = num + len(batch.exports)
    if not capacity.is_exact:
        most = capacity.num_sequences + capacity.num_exports
    targets = np.full((most, 4), -1, np.int32)
    targets[:num, 0], targets[:num, 1] = places.lasts, batch.slot_out
    targets[:num, 2], targets[:num, 3] = batch.record_rows, last_folded
    for place, (index, position, slot) in enumerate(batch.exports, start=num):
        token = places.begins[index] + position - batch.starts[index] - 1
        targets[place, :2] = token, slot
    recorded = np.full((num_tokens, 2), -1, np.int32)
    recorded[places.drafts, 0] = batch.record_rows[places.owners]
    recorded[places.drafts, 1] = places.ordinals
    if batch.chip is not None:
        return CarryRows(sources=sources, targets=targets, recorded=recorded)
    on_device = (torch.from_numpy(a).to(batch.device) for a in (sources, targets, recorded))
    return CarryRows(**dict(zip(("sources", "targets", "recorded"), on_device, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryOperation(Operation):
    """Says which hidden state precedes each token, and which ones slots carry on."""

    def lay_out(self, batch: Batch) -> CarryRows:
        """Lays out a step, alike for kernels and definitions."""
        return lay_out(batch)


class _TokenPlaces(NamedTuple):
    """How a step's tokens belong to sequences."""

    begins: Ints
    """[S], where each begins."""
    computing: Ints
    """Sequences that have tokens in this step."""
    firsts: Ints
    """First tokens of those sequences."""
    lasts: Ints
    """[S], the last token whose state a sequence's slot carries, -1 if there is none. Slots exclude
    drafts: for a sequence that decodes, it is the first token."""
    drafts: Ints
    """Tokens that are drafts."""
    owners: Ints
    """Their sequences."""
    ordinals: Ints
    """Their places among a sequence's drafts."""


@lru_cache(maxsize=_NUM_REMEMBERED)
def _places(packed: bytes, num_decodes: int) -> _TokenPlaces:
    """Returns how tokens belong to sequences of these `packed` lengths, which mostly are those of
    the step before."""
    lengths = np.frombuffer(packed, np.int64)
    begins = lengths.cumsum() - lengths
    computing = lengths.nonzero()[0]
    lasts = begins + lengths - 1
    lasts[:num_decodes] = begins[:num_decodes]
    lasts[lengths == 0] = -1
    owners = np.arange(num_decodes).repeat(lengths[:num_decodes])
    ordinals = ordinals_of(lengths[:num_decodes]) - 1
    drafts = (ordinals >= 0).nonzero()[0]
    return _TokenPlaces(
        begins, computing, begins[computing], lasts, drafts, owners[drafts], ordinals[drafts]
    )


@fused("mtp.triton")
def join(
    hidden: Tensor,
    token_ids: Tensor,
    table: Tensor,
    scales: tuple[Tensor, Tensor],
    eps: float,
    carried: tuple[Carried, CarryRows] | None = None,
) -> Tensor:
    """Returns [T, 2 * C]: the embeddings of `token_ids` [T] from the `table` [V, C], and the hidden
    states before them, each normed with its own of the two `scales` [C].

    The state before token t is row t of `hidden` [T, C]; or, with `carried`, row t - 1, and the
    carried one before a sequence's first token.
    """
    embedded = F.embedding(token_ids, table)
    before = hidden if carried is None else _shift(hidden, *carried)
    halves = zip((embedded, before), scales, strict=True)
    return torch.cat([norm.norm(half, scale, eps) for half, scale in halves], -1)


def _shift(hidden: Tensor, carried: Carried, rows: CarryRows) -> Tensor:
    where, place = rows.sources.unbind(1)
    before = torch.cat((hidden[:1], hidden[:-1]))
    in_slot = (where >= 0) & (place < 0)
    before[in_slot] = carried.states[where[in_slot]]
    if carried.records is not None:
        in_record = place >= 0
        before[in_record] = carried.records[where[in_record], place[in_record]]
    return before


@fused("mtp.triton")
def keep(hidden: Tensor, carried: Carried, rows: CarryRows) -> None:
    """Stores rows of `hidden` [T, C], the states after the tokens, in slots and records as `rows`
    say."""
    token = rows.targets[:, 0].long()
    states = hidden.new_zeros(len(token), hidden.shape[1])
    states[token >= 0] = hidden[token[token >= 0]]  # a step that folds has no tokens
    keep_states(states, hidden, carried, rows, slice(None))


@fused("mtp.triton")
def keep_states(
    states: Tensor, recorded: Tensor | None, carried: Carried, rows: CarryRows, columns: slice
) -> None:
    """Writes `states` [W, N], those after the tokens of `rows.targets`, to `columns` of their
    slots; or, for a target without a token, the state of its record.

    Then `recorded` [R, N], the states after the step's first R tokens, replace the records of
    those tokens that are drafts.
    """
    token, slot, row, place = rows.targets.long().unbind(1)
    is_new = (token >= 0) & (slot >= 0)
    carried.states[slot[is_new], columns] = states[is_new]
    if carried.records is None or recorded is None:
        return
    is_folded = (token < 0) & (slot >= 0)
    found = carried.records[row[is_folded], place[is_folded], columns]
    carried.states[slot[is_folded], columns] = found
    row, place = rows.recorded[: len(recorded)].long().unbind(1)
    carried.records[row[row >= 0], place[row >= 0], columns] = recorded[row >= 0]
