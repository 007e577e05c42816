"""Where hidden states are read and carried to, worked out on the host.

Legend: T tokens, S sequences, W states to be carried, C hidden size; T and S of a capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from milepost.kernels.batch import Batch, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Hidden states beside the pools of layers."""

    states: Tensor
    """[slots, C], the last of the tokens that each slot stands for."""
    records: Tensor | None = None
    """[rows, drafts, C], those of the drafts of a sequence's last step, in the rows of all records;
    None where nothing is drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarryRows:
    """int32 arrays: in numpy where they are to be sent to a device, else tensors. A record is named
    by its row and a draft; -1 stands for what is not there."""

    sources: Any
    """[T, 2]: the slot that carries the state before a token, and -1; or the record of it; twice -1
    where it is that behind the token ahead of it in the batch."""
    targets: Any
    """[W, 4]: the token behind which a state is carried on, or -1 where it is recorded; the slot
    that carries it, -1 for padding; the record."""
    recorded: Any
    """[T, 2]: where the state behind a draft is recorded."""


def lay_out(batch: Batch) -> CarryRows:
    """Of a step; records and slots are read before they are written."""
    capacity, num_tokens = batch.capacity, batch.capacity.num_tokens
    ends = batch.lengths.cumsum()
    firsts = ends - batch.lengths
    is_folded, has_tokens = batch.folds > 0, batch.lengths > 0
    folded = np.stack((batch.record_rows, batch.folds - 1), 1)
    carrying = np.stack((batch.slot_in, np.full_like(batch.slot_in, -1)), 1)
    sources = np.full((num_tokens, 2), -1, np.int32)
    sources[firsts[has_tokens]] = np.where(is_folded[:, None], folded, carrying)[has_tokens]
    written = _targets(batch, firsts, folded)
    most = len(written) if capacity.is_exact else capacity.num_sequences + capacity.num_exports
    targets = np.full((most, 4), -1, np.int32)
    targets[: len(written)] = written
    recorded = np.full((num_tokens, 2), -1, np.int32)
    if batch.verifies:
        own = np.arange(batch.num_decodes).repeat(batch.lengths[: batch.num_decodes])
        place = np.arange(len(own)) - firsts[own] - 1
        records = np.stack((batch.record_rows[own], place), 1)
        recorded[: len(own)] = np.where(place[:, None] < 0, -1, records)
    if batch.chip is not None:
        return CarryRows(sources=sources, targets=targets, recorded=recorded)
    on_device = (torch.from_numpy(a).to(batch.device) for a in (sources, targets, recorded))
    return CarryRows(**dict(zip(("sources", "targets", "recorded"), on_device, strict=True)))


def _targets(batch: Batch, firsts: Ints, folded: Ints) -> Ints:
    """A sequence's own slot, then exports. Drafts are no part of what a slot stands for: of a
    sequence that decodes the first token alone is."""
    last = firsts + batch.lengths - 1
    last[: batch.num_decodes] = firsts[: batch.num_decodes]
    last = np.where(batch.lengths > 0, last, -1)
    own = np.column_stack((last, batch.slot_out, folded))
    exported = [
        (firsts[index] + position - batch.starts[index] - 1, slot, -1, -1)
        for index, position, slot in batch.exports
    ]
    return np.concatenate((own, np.array(exported, np.int64).reshape(-1, 4)))
