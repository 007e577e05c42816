"""The tokens so far of running requests whose sampling depends on them: on the host in order, and
on the device as how often each answer contains each token.

Legend: V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from milepost.runner.sampling import SamplingRow
from milepost.runner.staging import Staging
from milepost.scheduler.plans import StepPlan


class Histories:
    """Token ids by request number. Plans and samples are the only source: a request's tokens when
    it starts, then each chunk and each run."""

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


IN_PROMPT = -(2**15)
"""Added to a token's count if the prompt contains the token and a penalty depends on that."""
MAX_COUNT = 2**15 - 1
_AT_ONCE = 1 << 16
"""Number of entries in one copy."""
_ENTRY_BYTES = 8 + 2


class Counts:
    """Token counts for penalties, with rows for as many requests as may sample in one step.

    A row belongs to one request. It is filled from the request's tokens when the request is new or
    returns; from then on sampling adds each chosen token, so the host need not know it. A row whose
    number of tokens differs from the request's (after a rollback, say) is filled again. Rows are
    never freed: when none is left, the row of a request outside the step is taken.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.table: Tensor = torch.zeros(num_rows, vocab_size, dtype=torch.int16, device=device)
        """[rows, V]"""
        self._staging = Staging(device, _ENTRY_BYTES * _AT_ONCE + 64)
        self._free = list(range(num_rows))
        self._held: dict[int, tuple[int, int]] = {}
        """Maps a request's number to its row and the number of tokens counted there."""

    def places(self, numbers: Sequence[int], rows: Sequence[SamplingRow]) -> list[int]:
        """Returns the row of each request that has penalties, -1 for the others. Rows count all
        tokens before the one to be sampled, and will count that one."""
        places: list[int] = []
        entries: list[tuple[np.ndarray, np.ndarray]] = []
        both = zip(numbers, rows, strict=True)
        wanted = {number for number, row in both if row.params.has_penalties}
        for number, row in zip(numbers, rows, strict=True):
            if number not in wanted:
                places.append(-1)
                continue
            place, num_counted = self._held.get(number, (-1, -1))
            if place < 0:
                place = self._take(wanted)
            if num_counted != row.index:
                assert not row.num_ahead, "a row is filled from tokens that are known"
                entries.append(self._fill(place, row))
            self._held[number] = place, row.index + 1
            places.append(place)
        if entries:
            indices, values = map(np.concatenate, zip(*entries, strict=True))
            self._staging.scatter(indices, values, self.table, _AT_ONCE)
        return places

    def _take(self, wanted: set[int]) -> int:
        """Takes a free row, or the row of a request outside this step."""
        if self._free:
            return self._free.pop()
        other = next(number for number in self._held if number not in wanted)
        return self._held.pop(other)[0]

    def _fill(self, place: int, row: SamplingRow) -> tuple[np.ndarray, np.ndarray]:
        """Zeroes a row. Returns the places in the table of the counts to write, and the counts."""
        vocab_size = self.table.shape[1]
        self.table[place].zero_()
        tokens = np.array(row.tokens, np.int64)
        counts = np.bincount(tokens[row.num_prompt_tokens :], minlength=vocab_size)
        counts = np.minimum(counts, MAX_COUNT)
        if row.params.repetition_penalty != 1:
            is_there = np.zeros(vocab_size, bool)
            is_there[tokens[: row.num_prompt_tokens]] = True
            counts += is_there * IN_PROMPT
        ids = np.flatnonzero(counts)
        return ids + place * vocab_size, counts[ids].astype(np.int16)
