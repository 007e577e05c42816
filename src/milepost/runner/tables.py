"""The page tables of running requests, on the host and on the device, and the rows of records of
those with drafts.

A plan names the pages added to each request's table, and the requests whose tables end. So a step
sends only new entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from milepost.kernels.layout.batch import ordinals_of
from milepost.runner.staging import Staging
from milepost.scheduler.plans import SequencePlan, StepPlan

PAGES_AT_ONCE = 1 << 16
"""Number of entries in one copy: more than most steps have, however many requests run."""
_ENTRY_BYTES = 8 + 4
_NOTHING_NEW = np.empty(0, np.int64), np.empty(0, np.int32)


class HostTables:
    """The host's copy: a row of `max_pages` for each running request. Row 0 belongs to no request.

    Rows are never cleared: entries after the end of a request's table are stale.
    """

    __slots__ = ("_are_windows", "_free", "_lengths", "_page_size", "_places", "rows", "windows")

    def __init__(
        self, num_requests: int, max_pages: int, page_size: int, windows: HostTables | None = None
    ) -> None:
        self._are_windows = False
        self.windows = windows
        """Tables of window pages, if there are any. Entries older than a window are stale."""
        self.rows = np.zeros((num_requests + 1, max_pages), np.int32)
        self._page_size = page_size
        self._lengths = [0] * (num_requests + 1)
        self._free = list(range(num_requests, 0, -1))
        self._places: dict[int, int] = {}
        """Maps a request's number to its row."""

    @classmethod
    def of_windows(cls, num_requests: int, max_pages: int, page_size: int) -> HostTables:
        """Builds tables of window pages, for layers with a sliding window."""
        tables = cls(num_requests, max_pages, page_size)
        tables._are_windows = True
        return tables

    def follow(self, plan: StepPlan) -> list[tuple[np.ndarray, np.ndarray]]:
        """Applies a plan to these tables, and then to those of window pages. Returns for each what
        `update` returns."""
        tables = (self,) if self.windows is None else (self, self.windows)
        return [each.update(plan) for each in tables]

    def update(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        """Follows a plan; returns flat indices and values of the new entries."""
        for number in plan.ended:
            place = self._places.pop(number, None)
            if place is not None:
                self._free.append(place)
        begins: list[int] = []
        counts: list[int] = []
        values: list[int] = []
        for sequence in plan.sequences:
            place = self._place(sequence)
            pages = sequence.new_windows if self._are_windows else sequence.new_pages
            first = self._lengths[place]
            end = first + len(pages)
            assert end <= self.rows.shape[1], "T2: a page table has room for the longest sequence"
            assert end * self._page_size >= sequence.end, "T1: a page table covers the step"
            if pages:
                self._lengths[place] = end
                begins.append(place * self.rows.shape[1] + first)
                counts.append(len(pages))
                values += pages
        if not values:  # the usual case
            return _NOTHING_NEW
        lengths = np.array(counts, np.int64)
        indices = np.array(begins, np.int64).repeat(lengths) + ordinals_of(lengths)
        entries = np.array(values, np.int32)
        self.rows.reshape(-1)[indices] = entries
        return indices, entries

    def places(self, sequences: Sequence[SequencePlan]) -> list[int]:
        """Returns the row of each sequence; `update` has seen their plan."""
        return [self._places[sequence.number] for sequence in sequences]

    def num_covered(self, number: int) -> int:
        """Returns the number of tokens that a request's page table has room for."""
        return self._lengths[self._places[number]] * self._page_size

    def _place(self, sequence: SequencePlan) -> int:
        place = self._places.get(sequence.number)
        if place is None:
            place = self._places[sequence.number] = self._free.pop()
            self._lengths[place] = 0
        return place


class PageTables:
    """The page tables on the host, and their copy on the device."""

    def __init__(
        self,
        num_requests: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
        *,
        has_windows: bool = False,
    ) -> None:
        sizes = num_requests, max_pages, page_size
        self.windows: Tensor | None = None
        """Tables of window pages on the device, if there are any."""
        self.host = HostTables(*sizes, HostTables.of_windows(*sizes) if has_windows else None)
        if has_windows:
            self.windows = torch.zeros(self.host.rows.shape, dtype=torch.int32, device=device)
        self.on_device: Tensor = torch.zeros(self.host.rows.shape, dtype=torch.int32, device=device)
        self._staging = Staging(device, _ENTRY_BYTES * PAGES_AT_ONCE)

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes of pinned host memory; they do not depend on the number of requests."""
        return self._staging.num_pinned_bytes

    def send(self, new: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Sends the device the entries that `host.follow` returned, without waiting."""
        for entries, table in zip(new, (self.on_device, self.windows), strict=False):
            assert table is not None, "only windows have tables of their own"
            self._staging.scatter(*entries, table, PAGES_AT_ONCE)


NO_ROW = -1


class RecordRows:
    """Rows of records, one for each of the `num_rows` requests that may have drafts in one step.

    A row holds the data that layers with states need to fold in the drafts of a request's last
    step. The request keeps it until its next step, which folds in the accepted drafts.
    """

    __slots__ = ("_begins", "_free", "_recorded", "_rows", "_spent")

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[int, int] = {}
        """Maps a request's number to its row."""
        self._spent: list[int] = []
        """Requests of the last plan that have no drafts any more."""
        self._begins: dict[int, int] = {}
        """Maps a request's number to the position of the first draft in its last step, if it had
        any."""
        self._recorded: dict[int, int] = {}
        """Maps a request's number, in the last plan, to its recorded drafts that are committed
        now."""

    def follow(self, plan: StepPlan) -> None:
        """Assigns rows for a plan, and frees those of the previous plan that hold nothing."""
        for number in (*plan.ended, *self._spent):
            row = self._rows.pop(number, None)
            if row is not None:
                self._free.append(row)
        for number in plan.ended:
            self._begins.pop(number, None)
        self._spent.clear()
        self._recorded.clear()
        for sequence in plan.sequences:
            number = sequence.number
            has_row = number in self._rows
            if number in self._begins:
                self._recorded[number] = sequence.start - self._begins.pop(number)
            if sequence.num_drafts:
                self._begins[number] = sequence.state_end
            assert has_row or not sequence.fold, "V3: what is folded was recorded"
            if sequence.num_drafts and not has_row:
                assert self._free, "V4: no more requests have drafts than may run"
                self._rows[number] = self._free.pop()
            elif has_row and not sequence.num_drafts:
                self._spent.append(number)

    def rows(self, sequences: Sequence[SequencePlan]) -> list[int]:
        """Returns the row of each sequence; `follow` has seen their plan."""
        return [self._rows.get(sequence.number, NO_ROW) for sequence in sequences]

    def recorded(self, sequences: Sequence[SequencePlan]) -> list[int]:
        """Returns how many drafts of its last step each sequence has taken since, -1 if it had
        none; `follow` has seen their plan."""
        return [self._recorded.get(sequence.number, -1) for sequence in sequences]
