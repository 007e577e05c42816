"""Estimates how likely drafts are to be accepted, from the drafts accepted so far.

There is one estimate for each position after the sampled token, given that the drafts before it
were accepted. The request's own history counts most once there is enough of it; until then, that of
all requests of about the same length. Older observations count less and less.
"""

from __future__ import annotations

from collections.abc import Sequence

_OWN_DECAY = 0.9
_ALL_DECAY = 0.98
_ALL_WEIGHT = 4.0
"""Weight of the estimate over all requests, in drafts of the request's own."""
_FIRST_GUESS = 0.6
_FIRST_WEIGHT = 2.0
_LENGTHS = (4096, 16384, 65536)
"""Bounds of the length classes. Lengths are classed because drafts get worse in longer texts."""


class AcceptanceRates:
    """Decayed counts by position."""

    __slots__ = ("_accepted", "_decay", "_verified")

    def __init__(self, num_positions: int, decay: float) -> None:
        self._accepted = [0.0] * num_positions
        self._verified = [0.0] * num_positions
        self._decay = decay

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Records that `num_accepted` of `num_drafts` drafts were accepted. The draft after them
        was rejected; later ones were not judged."""
        decay = self._decay
        for place in range(min(num_accepted + 1, num_drafts)):
            self._verified[place] = decay * self._verified[place] + 1
            self._accepted[place] = decay * self._accepted[place] + (place < num_accepted)

    def rate(self, place: int, guess: float, weight: float) -> float:
        """Returns the acceptance rate at a position; `guess` counts like `weight` drafts."""
        return (self._accepted[place] + weight * guess) / (self._verified[place] + weight)


class Acceptance:
    """Acceptance rates of requests that get up to `num_drafts` drafts a step."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._own: dict[int, AcceptanceRates] = {}
        """Maps a request's number to its own rates."""
        self._all = [AcceptanceRates(num_drafts, _ALL_DECAY) for _ in range(len(_LENGTHS) + 1)]

    def note(self, number: int, length: int, num_drafts: int, num_accepted: int) -> None:
        """Records how many of a request's drafts were accepted."""
        rates = self._own.get(number)
        if rates is None:
            rates = self._own[number] = AcceptanceRates(self._num_drafts, _OWN_DECAY)
        rates.note(num_drafts, num_accepted)
        self._all[_class(length)].note(num_drafts, num_accepted)

    def chances(self, number: int, length: int) -> Sequence[float]:
        """Returns for each draft the chance that it and all drafts before it are accepted."""
        rates, every = self._own.get(number), self._all[_class(length)]
        chances, chance = [], 1.0
        for place in range(self._num_drafts):
            rate = every.rate(place, _FIRST_GUESS, _FIRST_WEIGHT)
            if rates is not None:
                rate = rates.rate(place, rate, _ALL_WEIGHT)
            chance *= rate
            chances.append(chance)
        return chances

    def forget(self, number: int) -> None:
        self._own.pop(number, None)


def _class(length: int) -> int:
    return sum(length >= bound for bound in _LENGTHS)
