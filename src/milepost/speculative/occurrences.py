"""Finds where the last tokens of a text have occurred before.

A table keyed by the last `width` tokens leads to the latest place where they occurred, and each
place to the one before, as in the window of an LZ77 compressor. So a token costs one entry, and a
search looks at MOST_PLACES places at most, whatever the length of the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

MOST_PLACES = 16
"""That one search looks at, the latest."""
BREAK = 2**32 - 1
"""Stands between texts: no token has this id, and nothing goes on behind it."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where a text's last `length` tokens stand, which is the most that stands anywhere."""

    text: array[int]
    ends: Sequence[int]
    """Indices behind them, the latest first."""
    length: int


class Occurrences:
    """A text that grows, and where each run of `width` tokens stands in it."""

    __slots__ = ("_latest", "_previous", "num_looked_at", "num_skipped", "text", "width")

    def __init__(self, width: int, num_skipped: int = 0) -> None:
        self.width = width
        self.text = array("I")
        self.num_skipped = num_skipped
        """Tokens before the text, that nobody looks for."""
        self.num_looked_at = 0
        """Places, by all searches so far."""
        self._latest: dict[int, int] = {}
        """Hash of a run -> the index behind its latest place."""
        self._previous = array("i")
        """For each index the one behind the same run's place before, or a hash's like it; else -1.
        """

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; costs one entry each."""
        first = max(len(self.text) - self.width + 1, 0)
        self.text.extend(tokens)
        self._previous.extend([-1] * (min(self.width - 1, len(self.text)) - len(self._previous)))
        new, latest, previous = self.text[first:], self._latest, self._previous
        runs = zip(*(new[skipped:] for skipped in range(self.width)), strict=False)
        for end, key in enumerate(map(hash, runs), start=first + self.width):
            previous.append(latest.get(key, -1))
            latest[key] = end

    def find(self, tail: array[int], *, depth: int, before: int | None = None) -> Places | None:
        """Where the longest end of `tail`, of `width` to `depth` tokens, stands; `before` bounds
        the indices behind it. None if nowhere.
        """
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
    """How many of the tokens before `end` are the tail's last."""
    most = min(len(tail), end)
    if text[end - most : end] == tail[-most:]:
        return most
    for length in range(most):
        if text[end - 1 - length] != tail[-1 - length]:
            return length
    return most


@dataclass(frozen=True, slots=True)
class Continuation:
    """What may follow, and how many of its tokens are likely to, by what followed before."""

    tokens: list[int]
    score: float


def continuation(places: Places, most: int, min_prob: float = 0.0) -> Continuation:
    """The likeliest tokens behind these places, up to one that is less likely than `min_prob`; of
    equally likely ones the latest.
    """
    text, alive = places.text, list(places.ends)
    tokens: list[int] = []
    prob, score = 1.0, 0.0
    for _ in range(most):
        votes: dict[int, list[int]] = {}
        for end in alive:
            if end < len(text) and text[end] != BREAK:
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
