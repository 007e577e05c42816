"""One step's batch on the host, from which every operation lays out its own work.

A step is a flat list of tokens, sequence after sequence; decoding sequences (one token each,
nothing to export) come first. An operation's layout is the same for all layers that have the
operation, so it is made once per step.

In a step that *verifies*, a decoding sequence has drafts after its one token. Drafts do not change
its state; their inputs to recurrent layers are recorded instead. The sequence's next step folds the
accepted ones into the state, before its one token:

    state    [ fold ][ 1 ]                  fold: recorded tokens, that are no longer in the batch
    tokens           [ 1 ][ drafts ]        a sequence that only folds has none
    records               [ drafts ]

Legend: S sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from milepost.kernels.platform.device import Capable, Chip
from milepost.kernels.platform.tables import SumOrder

Ints = NDArray[np.int64]
StateExport = tuple[int, int, int]
"""A state to export: the sequence's index in the batch, the position after which it is taken (start
< position <= start + length), and its slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The most that a step may hold. Shapes of arrays depend on the capacity alone, so that a
    captured graph can read them."""

    num_tokens: int
    num_sequences: int
    num_exports: int = 0
    decodes: bool = False
    """Whether every sequence decodes."""
    num_drafts: int = 0
    """Largest number of drafts of a decoding sequence; if above 0 the step may verify."""
    is_exact: bool = False
    """Whether it is that of one step alone, so that arrays need no padding."""

    @property
    def ends_early(self) -> bool:
        """Whether most tokens are not sampled from, and so need no more layers once their KV and
        states are written."""
        return not self.decodes and not self.num_drafts

    @property
    def num_sampled(self) -> int:
        """Largest number of positions that are sampled from."""
        return min(self.num_tokens, self.num_sequences * (1 + self.num_drafts))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPages:
    """The pages of layers with a sliding window: fields of `Batch`."""

    kv_rows: Ints
    tables: NDArray[np.int32]
    page_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's sequences, and properties of the device that runs it."""

    starts: Ints
    """[S] position of each sequence's first new token."""
    lengths: Ints
    """[S] new tokens of each sequence."""
    num_decodes: int
    folds: Ints
    """[S] recorded tokens that are folded into each sequence's state first."""
    record_rows: Ints
    """[S] row of the records that each sequence reads and then writes, -1 for those without."""
    rows: Ints
    """[S] row of the page tables."""
    kv_rows: Ints
    """[T] row to which each token's key is written (see `kernels.attention.pages`), -1 for
    nowhere."""
    slot_in: Ints
    """[S] slot that each sequence's state is read from (0: zeros)."""
    slot_out: Ints
    """[S] slot that each sequence's state is written to; may equal slot_in; never 0."""
    exports: tuple[StateExport, ...]
    tables: NDArray[np.int32]
    """[rows, pages]; entries past a sequence's own table hold anything."""
    page_size: int
    page_rows: int
    """Rows of KV from one page to the next."""
    capacity: Capacity
    device: torch.device
    chip: Chip | None
    """None where the reference kernels run."""
    has_float8_kv: bool = False
    order: SumOrder = SumOrder.FREE
    """Order of sums in this step; an operation's own if it is stricter."""
    samples: Ints | None = None
    """[S] 1 for sequences that sample after their last token, else 0; None if all do."""
    recorded: Ints | None = None
    """[S] number of accepted drafts of each sequence's last step, -1 if it had none; for states
    beside pages, which are not folded. None if nothing is drafted."""

    windows: WindowPages | None = None
    """Pages of layers with a sliding window; None if those use the same ones."""

    def in_windows(self) -> Batch:
        """Returns the step as layers with a sliding window see it, with their pages."""
        own = self.windows
        if own is None:
            return self
        return replace(self, kv_rows=own.kv_rows, tables=own.tables, page_rows=own.page_rows)

    def ends(self) -> Batch:
        """Returns a batch of the last tokens of the sequences that sample, as decodes whose KV is
        written already, without states and records."""
        own = slice(None) if self.samples is None else self.samples.nonzero()[0]
        lasts = (self.starts + self.lengths - 1)[own]
        nothing = np.zeros_like(lasts)
        num = self.capacity.num_sampled
        return replace(
            self,
            starts=lasts,
            lengths=nothing + 1,
            num_decodes=len(lasts),
            folds=nothing,
            record_rows=nothing - 1,
            rows=self.rows[own],
            kv_rows=nothing - 1,
            slot_in=nothing,
            slot_out=nothing,
            exports=(),
            capacity=replace(
                self.capacity, num_tokens=num, num_sequences=num, num_exports=0, decodes=True
            ),
            order=SumOrder.FREE,
            samples=None,
            recorded=None,
        )

    @property
    def verifies(self) -> bool:
        """Whether a decoding sequence folds, or has another number of tokens than one."""
        own = slice(self.num_decodes)
        return bool(self.folds[own].any() or (self.lengths[own] != 1).any())


def ordinals_of(counts: Ints) -> Ints:
    """Returns 0, 1 ... count - 1 for each of `counts`, one after the other: for lengths of
    sequences, each token's place in its sequence."""
    return np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)


def padded(
    values: Sequence[int] | Ints, length: int, filler: int, dtype: type = np.int32
) -> NDArray[Any]:
    """Returns an array of `values`, padded with `filler` up to `length`."""
    assert len(values) <= length, "a batch stays within its capacities"
    if len(values) == length:
        return np.array(values, dtype)
    array: NDArray[Any] = np.empty(length, dtype)
    array[: len(values)] = values
    array[len(values) :] = filler
    return array


class Operation(Capable, Protocol):
    """A kind of work that layers share, with all sizes which determine its layout; hashable."""

    def lay_out(self, batch: Batch) -> Any:
        """Returns the work of a step. With a chip it is a dataclass of numpy arrays, which the
        runner sends to the device; for the reference one of tensors on the device; None if there is
        nothing to do."""
        ...
