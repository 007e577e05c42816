"""How many drafts each decoding request is worth in the next step.

Tokens a second decide: drafts are added, most likely first, while the tokens that a step is
expected to yield grow faster than the time it takes, by what was accepted and measured so far. So a
request whose drafts fail gets none, many requests share fewer than one each, and nobody gets any
where a step with drafts takes longer than they are worth.

Exploring costs time: a probe, one draft of one request, comes more rarely each time that it fails.
Drafts get more as they pay. Time lost by drafts is booked against time gained, and while the loss
exceeds a two hundredth of the time, nobody drafts. So decoding is never slower than plain decoding
by more than that and an allowance at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from milepost.speculative.acceptance import Acceptance
from milepost.speculative.times import StepTimes

LOSS = 0.005
"""Share of the time that may be lost in finding out."""
_FIRST_CREDIT = 1.0
_MOST_CREDIT = 8.0
"""In plain steps."""
_PROBE_EVERY = 32
_MOST_PROBE_EVERY = 512
"""Steps without drafts before a probe: at first, and after several in vain."""
_LEAST_CHANCE = 0.02
_STANDS = 16
"""Steps for which a decision stands, while no draft is verified and the same requests decode."""


class Standing(msgspec.Struct, frozen=True, gc=False):
    """A request that decodes."""

    number: int
    length: int
    """Of its text, in tokens."""


class Verified(msgspec.Struct, frozen=True, gc=False):
    """What became of a request's drafts in a step."""

    number: int
    length: int
    num_drafts: int
    num_accepted: int


class Policy(Protocol):
    """Decides, and hears of every step."""

    def allot(self, standings: Sequence[Standing]) -> list[int]:
        """Most drafts for each request in the next step."""
        ...

    def note(self, num_sequences: int, verified: Sequence[Verified], seconds: float | None) -> None:
        """What a step was: how many sequences decoded, whose drafts were verified, and how long it
        took if it did nothing else.
        """
        ...

    def forget(self, number: int) -> None:
        """A request is over."""
        ...


class Always:
    """As many drafts as there are."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def allot(self, standings: Sequence[Standing]) -> list[int]:
        return [self._num_drafts] * len(standings)

    def note(self, num_sequences: int, verified: Sequence[Verified], seconds: float | None) -> None:
        """Nothing is learned."""

    def forget(self, number: int) -> None:
        """Nothing is known."""


class Adaptive:
    """As many as pay, up to `num_drafts` each."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._acceptance = Acceptance(num_drafts)
        self._times = StepTimes()
        self._credit: float | None = None
        """Seconds that may be lost."""
        self._reach = 1
        """Most drafts that a request has now: twice as many each time that as many have paid."""
        self._num_plain = 0
        """Steps without drafts since the last one with."""
        self._probe_every = _PROBE_EVERY
        self._num_verified = 0
        """Requests whose drafts the last step has verified."""
        self._probed: dict[int, int] = {}
        """Request number -> probes so far."""
        self._decided: tuple[list[int], list[int] | None] | None = None
        """The requests of the last decision, and how many drafts each has; None where none pay."""
        self._num_left = 0
        """Steps for which it stands yet."""

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
        """How many drafts each is worth; None if no draft pays."""
        chances = [self._acceptance.chances(each.number, each.length) for each in standings]
        least = self._threshold(chances, plain)
        if least is None:
            return None
        return [sum(c >= least for c in each[: self._reach]) for each in chances]

    def _threshold(self, chances: Sequence[Sequence[float]], plain: float) -> float | None:
        """The least chance of a draft that pays; None if none does."""
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
        """A draft for one request alone, the one that was probed least, if it is time and there is
        credit for it."""
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
        elif is_behind:  # nothing could be launched ahead of it
            won = max(min(plain - seconds, LOSS * seconds), -plain)
        else:
            won = LOSS * seconds
        self._credit = min(self._credit + won, _MOST_CREDIT * plain)
        if self._credit < 0:
            self._reach = 1

    def _note_won(self, won: float, verified: Sequence[Verified]) -> None:
        """Have more drafts or fewer probes from now on, by what a step's drafts have won."""
        if won <= 0:
            self._probe_every = min(2 * self._probe_every, _MOST_PROBE_EVERY)
            return
        self._probe_every = _PROBE_EVERY
        if max(each.num_drafts for each in verified) >= self._reach:
            self._reach = min(2 * self._reach, self._num_drafts)

    def forget(self, number: int) -> None:
        self._acceptance.forget(number)
        self._probed.pop(number, None)
