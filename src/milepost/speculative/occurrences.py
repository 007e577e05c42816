"""Finds where the last tokens of a text have occurred before.

A table keyed by the last `width` tokens leads to their latest place, and each place to the one
before, as in the window of an LZ77 compressor. So a token costs one entry, and a search looks at
MOST_PLACES places at most, however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

MOST_PLACES = 16
"""Number of places that one search looks at, the latest first."""
BREAK = 2**32 - 1
"""Separates texts: no token has this id, and no draft continues past it."""
PICTURED = 2**31
"""Words from here on are no token ids: they separate texts or stand for a picture's tokens."""


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a text's last `length` tokens. No longer suffix occurs anywhere."""

    text: array[int]
    ends: Sequence[int]
    """Indices just after each place, the latest first."""
    length: int


class Occurrences:
    """A growing text, and the places of each run of `width` tokens in it."""

    __slots__ = ("_latest", "_previous", "num_looked_at", "num_skipped", "text", "width")

    def __init__(self, width: int, num_skipped: int = 0) -> None:
        self.width = width
        self.text = array("I")
        self.num_skipped = num_skipped
        """Number of tokens before the text that are not searched."""
        self.num_looked_at = 0
        """Number of places that all searches so far have looked at."""
        self._latest: dict[int, int] = {}
        """Maps the hash of a run to the index just after its latest place."""
        self._previous = array("i")
        """Maps each index to the index just after the previous place of the run (or of one with the
        same hash); -1 if there is none."""

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens, at the cost of one entry each."""
        first = max(len(self.text) - self.width + 1, 0)
        self.text.extend(tokens)
        self._previous.extend([-1] * (min(self.width - 1, len(self.text)) - len(self._previous)))
        new, latest, previous = self.text[first:], self._latest, self._previous
        runs = zip(*(new[skipped:] for skipped in range(self.width)), strict=False)
        for end, key in enumerate(map(hash, runs), start=first + self.width):
            previous.append(latest.get(key, -1))
            latest[key] = end

    def find(self, tail: array[int], *, depth: int, before: int | None = None) -> Places | None:
        """Finds the longest suffix of `tail`, of `width` to `depth` tokens, that occurs in the
        text; `before` bounds the indices just after its places. Returns None if none occurs."""
        if len(tail) < self.width:
            return None
        tail = tail[-depth:]
        end = self._latest.get(hash(tuple(tail[-self.width :])), -1)
        best = self.width - 1
        ends: list[int] = []
        for _ in range(MOST_PLACES):
            while before is not None and end >= before:
                end = self._previous[end - 1]
            if end < 0:
                break
            self.num_looked_at += 1
            length = _common_end(self.text, end, tail)
            if length > best:
                best, ends = length, []
            if length == best and end < len(self.text):
                ends.append(end)
            end = self._previous[end - 1]
        return Places(self.text, ends, best) if ends and best >= self.width else None


def _common_end(text: array[int], end: int, tail: array[int]) -> int:
    """Counts how many of the tokens before `end` equal the last tokens of the tail."""
    most = min(len(tail), end)
    if text[end - most : end] == tail[-most:]:
        return most
    for length in range(most):
        if text[end - 1 - length] != tail[-1 - length]:
            return length
    return most


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens that may follow. `score` is how many of them are likely to, judging by earlier
    continuations."""

    tokens: list[int]
    score: float


def continuation(places: Places, most: int, min_prob: float = 0.0) -> Continuation:
    """Returns the likeliest tokens after these places, up to the first whose probability is below
    `min_prob`. Among equally likely tokens the latest wins."""
    text, alive = places.text, list(places.ends)
    tokens: list[int] = []
    prob, score = 1.0, 0.0
    for _ in range(most):
        votes: dict[int, list[int]] = {}
        for end in alive:
            if end < len(text) and text[end] < PICTURED:
                votes.setdefault(text[end], []).append(end + 1)
        if not votes:
            break
        token = max(votes, key=lambda each: len(votes[each]))
        prob *= len(votes[token]) / len(alive)
        if prob < min_prob:
            break
        tokens.append(token)
        score += prob
        alive = votes[token]
    return Continuation(tokens, score)
