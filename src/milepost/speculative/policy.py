"""Decides how many drafts each decoding request gets in the next step.

The policy maximises tokens per second. It adds drafts, most likely first, while the expected tokens
of a step grow faster than its duration, estimated from past acceptance and measured times. So a
request whose drafts fail gets none, many requests share fewer than one each, and no request gets
any if a step with drafts takes longer than they are worth.

Exploring costs time. A probe, one draft for one request, becomes rarer each time it fails, and
requests get more drafts as drafts pay. The policy keeps an account of time lost and gained by
drafts; while the loss exceeds 1/200 of the time, nothing is drafted. So decoding is slower than
without drafts by at most that, plus an allowance at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from milepost.speculative.estimates import Acceptance, StepTimes

LOSS = 0.005
"""Share of the time that may be lost to exploring."""
_FIRST_CREDIT = 1.0
_MOST_CREDIT = 8.0
"""The first and the largest credit, in plain steps."""
_PROBE_EVERY = 32
_MOST_PROBE_EVERY = 512
"""Number of steps without drafts before a probe: at first, and after several failed probes."""
_LEAST_CHANCE = 0.02
_STANDS = 16
"""Number of steps that a decision lasts, while no draft is verified and the same requests decode.
"""


class Standing(msgspec.Struct, frozen=True, gc=False):
    """A decoding request."""

    number: int
    length: int
    """Length of the request's text, in tokens."""


class Verified(msgspec.Struct, frozen=True, gc=False):
    """Numbers of drafts of one request that a step has verified and accepted."""

    number: int
    length: int
    num_drafts: int
    num_accepted: int


class Policy(Protocol):
    """Decides the number of drafts, and is told about every step."""

    def allot(self, standings: Sequence[Standing]) -> list[int]:
        """Returns the largest number of drafts for each request in the next step."""
        ...

    def note(self, num_sequences: int, verified: Sequence[Verified], seconds: float | None) -> None:
        """Records a step: how many sequences decoded, whose drafts were verified, and how long the
        step took if it did nothing else."""
        ...

    def forget(self, number: int) -> None:
        """Forgets a request that is over."""
        ...


class Always:
    """Always allows `num_drafts` drafts for each request."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def allot(self, standings: Sequence[Standing]) -> list[int]:
        return [self._num_drafts] * len(standings)

    def note(self, num_sequences: int, verified: Sequence[Verified], seconds: float | None) -> None:
        """Does nothing: this policy learns nothing."""

    def forget(self, number: int) -> None:
        """Does nothing: this policy keeps nothing per request."""


class Adaptive:
    """Allows each request as many drafts as pay, up to `num_drafts`."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._acceptance = Acceptance(num_drafts)
        self._times = StepTimes()
        self._credit: float | None = None
        """Seconds that drafts may still lose."""
        self._reach = 1
        """Largest number of drafts for a request now. It doubles each time that this many have
        paid."""
        self._num_plain = 0
        """Number of steps without drafts since the last step with drafts."""
        self._probe_every = _PROBE_EVERY
        self._num_verified = 0
        """Number of requests whose drafts the last step verified."""
        self._probed: dict[int, int] = {}
        """Maps a request's number to its probes so far."""
        self._decided: tuple[list[int], list[int] | None] | None = None
        """The requests of the last decision and the number of drafts for each, or None if no draft
        pays."""
        self._num_left = 0
        """Number of steps that the decision still lasts."""

    def allot(self, standings: Sequence[Standing]) -> list[int]:
        plain = self._times.plain(len(standings)) if standings else None
        if plain is None or self._credit is None or self._credit < 0:
            return [0] * len(standings)
        numbers = [each.number for each in standings]
        if self._decided is not None and self._num_left and numbers == self._decided[0]:
            self._num_left -= 1
        else:
            self._decided, self._num_left = (numbers, self._decide(standings, plain)), _STANDS
        allotted = self._decided[1]
        return self._probe(standings, plain) if allotted is None else allotted

    def _decide(self, standings: Sequence[Standing], plain: float) -> list[int] | None:
        """Returns how many drafts each request is worth, or None if no draft pays."""
        chances = [self._acceptance.chances(each.number, each.length) for each in standings]
        least = self._threshold(chances, plain)
        if least is None:
            return None
        return [sum(c >= least for c in each[: self._reach]) for each in chances]

    def _threshold(self, chances: Sequence[Sequence[float]], plain: float) -> float | None:
        """Returns the lowest acceptance chance at which a draft pays, or None if no draft does."""
        by_chance: dict[float, list[float]] = {}
        for each in chances:
            for chance in each[: self._reach]:
                if chance < _LEAST_CHANCE:
                    break
                by_chance.setdefault(round(chance, 2), []).append(chance)
        best, least, num, gained = len(chances) / plain, None, 0, 0.0
        for alike in sorted(by_chance, reverse=True):
            num += len(by_chance[alike])
            gained += sum(by_chance[alike])
            rate = (len(chances) + gained) / self._times.estimate(len(chances), num)
            if rate > best:
                best, least = rate, min(by_chance[alike])
        return least

    def _probe(self, standings: Sequence[Standing], plain: float) -> list[int]:
        """Returns one draft for the request that was probed least, if a probe is due and the credit
        covers it; otherwise none."""
        assert self._credit is not None
        cost = self._times.estimate(len(standings), 1) - plain
        if self._num_plain < self._probe_every or cost > self._credit:
            return [0] * len(standings)
        chosen = min(standings, key=lambda each: self._probed.get(each.number, 0))
        return [int(each is chosen) for each in standings]

    def note(self, num_sequences: int, verified: Sequence[Verified], seconds: float | None) -> None:
        for each in verified:
            self._acceptance.note(each.number, each.length, each.num_drafts, each.num_accepted)
            self._probed[each.number] = self._probed.get(each.number, 0) + 1
        is_behind = bool(self._num_verified) and not verified
        self._num_verified = len(verified)
        self._num_plain = 0 if verified else self._num_plain + 1
        if verified:
            self._decided = None
        if seconds is None or not num_sequences:
            return
        if not is_behind:
            self._times.note(num_sequences, sum(each.num_drafts for each in verified), seconds)
        plain = self._times.plain(num_sequences)
        if plain is None:
            return
        if self._credit is None:
            self._credit = _FIRST_CREDIT * plain
        if verified:
            num_accepted = sum(each.num_accepted for each in verified)
            won = plain * (1 + num_accepted / num_sequences) - seconds
            self._note_won(won, verified)
        elif is_behind:  # a step after one with drafts could not be launched ahead
            won = max(min(plain - seconds, LOSS * seconds), -plain)
        else:
            won = LOSS * seconds
        self._credit = min(self._credit + won, _MOST_CREDIT * plain)
        if self._credit < 0:
            self._reach = 1

    def _note_won(self, won: float, verified: Sequence[Verified]) -> None:
        """Adapts the number of drafts and the rate of probes to the time that a step's drafts have
        saved."""
        if won <= 0:
            self._probe_every = min(2 * self._probe_every, _MOST_PROBE_EVERY)
            return
        self._probe_every = _PROBE_EVERY
        if max(each.num_drafts for each in verified) >= self._reach:
            self._reach = min(2 * self._reach, self._num_drafts)

    def forget(self, number: int) -> None:
        self._acceptance.forget(number)
        self._probed.pop(number, None)
