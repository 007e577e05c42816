"""The row of records of each request that has drafts.

A row holds what layers with states need to fold in the drafts of a request's last step. The request
keeps it until its next step, which folds in those that were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

from milepost.scheduler.plans import SequencePlan, StepPlan

NO_ROW = -1


class RecordRows:
    """`num_rows` rows: as many as requests that may have drafts in one step."""

    __slots__ = ("_begins", "_free", "_recorded", "_rows", "_spent")

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[int, int] = {}
        """Request number -> its row."""
        self._spent: list[int] = []
        """Requests of the last plan that have no drafts any more."""
        self._begins: dict[int, int] = {}
        """Request number -> position of the first draft of its last step, if that had any."""
        self._recorded: dict[int, int] = {}
        """Of the last plan: request number -> recorded drafts that are committed now."""

    def follow(self, plan: StepPlan) -> None:
        """Hand out rows for a plan, and take back those of the plan before that hold nothing."""
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
        """The row of each; their plan has been followed."""
        return [self._rows.get(sequence.number, NO_ROW) for sequence in sequences]

    def recorded(self, sequences: Sequence[SequencePlan]) -> list[int]:
        """How many drafts of its last step each has taken since, -1 where it had none; their plan
        has been followed."""
        return [self._recorded.get(sequence.number, -1) for sequence in sequences]
