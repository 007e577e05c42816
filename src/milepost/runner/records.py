"""Assigns a row of records to each request that has drafts.

A row holds the data that layers with states need to fold in the drafts of a request's last step.
The request keeps it until its next step, which folds in the accepted drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from milepost.scheduler.plans import SequencePlan, StepPlan

NO_ROW = -1


class RecordRows:
    """Rows of records, one for each of the `num_rows` requests that may have drafts in one step."""

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
