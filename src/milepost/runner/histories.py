"""Keeps the token ids of running requests whose sampling depends on them.

Plans and samples are the only source: a request's tokens when it starts, then each chunk and each
run.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from milepost.scheduler.plans import StepPlan


class Histories:
    """Token ids by request number."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}

    def follow(self, plan: StepPlan) -> None:
        """Adds the tokens of a plan, and drops the requests that it ends."""
        for number in plan.ended:
            self._tokens.pop(number, None)
        for sequence in plan.sequences:
            if sequence.history is not None:
                self._tokens[sequence.number] = array("I", sequence.history)
            if not sequence.is_ahead and sequence.number in self._tokens:
                self._put(sequence.number, sequence.start, array("I", sequence.tokens))

    def add(self, plan: StepPlan, runs: Mapping[int, Sequence[int]]) -> None:
        """Adds the tokens that a step sampled; a run replaces the drafts of its request."""
        if not self._tokens:
            return
        for sequence in plan.sequences:
            if sequence.number in runs and sequence.number in self._tokens:
                begin = sequence.end - sequence.num_drafts
                self._put(sequence.number, begin, array("I", runs[sequence.number]))

    def of(self, number: int) -> Sequence[int] | None:
        """Returns all known tokens of a request, or None if its tokens are not kept."""
        return self._tokens.get(number)

    def _put(self, number: int, position: int, tokens: array[int]) -> None:
        """Replaces the tokens from a position on."""
        known = self._tokens[number]
        assert len(known) >= position, "H1: a history has no gaps"
        known[position:] = tokens
