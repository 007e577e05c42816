"""Estimates the gain and the cost of drafts: how likely they are to be accepted, and the time of a
step by its numbers of decoding sequences and of verified drafts.

Times are measured where the engine runs, so nothing here depends on a chip.
"""

from __future__ import annotations

from collections.abc import Sequence

_NEW = 0.2
"""Weight of the newest measurement, once there are many."""
NUM_FIRST = 3
"""Number of first measurements. The shortest of them counts, as the first may include compiling."""


class _Cell:
    """Times of steps with about the same number of sequences and drafts."""

    __slots__ = ("drafts", "num", "seconds")

    def __init__(self) -> None:
        self.num = 0
        self.drafts = 0.0
        """Average number of drafts per sequence."""
        self.seconds = 0.0

    def note(self, drafts: float, seconds: float) -> None:
        self.num += 1
        if self.num <= NUM_FIRST:
            self.seconds = seconds if self.num == 1 else min(self.seconds, seconds)
        else:  # an outlier counts as twice the average at most
            self.seconds += _NEW * (min(seconds, 2 * self.seconds) - self.seconds)
        self.drafts += (drafts - self.drafts) * max(_NEW, 1 / self.num)

    @property
    def is_known(self) -> bool:
        return self.num >= NUM_FIRST


class StepTimes:
    """Times of steps in which every sequence decodes."""

    def __init__(self) -> None:
        self._cells: dict[int, dict[int, _Cell]] = {}
        """Maps the class of the number of sequences to cells by level of drafts; level 0 is no
        drafts."""

    def note(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        row = self._cells.setdefault(_class(num_sequences), {})
        drafts = num_drafts / num_sequences
        row.setdefault(_level(drafts), _Cell()).note(drafts, seconds)

    def plain(self, num_sequences: int) -> float | None:
        """Returns the seconds of a step without drafts, or None if not yet known."""
        cell = self._cells.get(_class(num_sequences), {}).get(0)
        return cell.seconds if cell is not None and cell.is_known else None

    def estimate(self, num_sequences: int, num_drafts: int) -> float:
        """Returns the seconds of a step with drafts, interpolated between measurements with fewer
        and with more drafts; `plain` must be known. An untried number counts as cheap, so that it
        is tried."""
        row = self._cells[_class(num_sequences)]
        drafts, plain = num_drafts / num_sequences, row[0].seconds
        below, above = (0.0, plain), None
        for level in sorted(row):
            cell = row[level]
            if not level or not cell.is_known:
                continue
            if cell.drafts <= drafts:
                below = cell.drafts, cell.seconds
            else:
                above = cell.drafts, cell.seconds
                break
        if above is not None:
            share = (drafts - below[0]) / (above[0] - below[0])
            return below[1] + share * (above[1] - below[1])
        slope = (below[1] - plain) / below[0] if below[0] else 0.0
        return below[1] + max(slope, 0.0) * (drafts - below[0])


def _class(num: int) -> int:
    """Returns the size class of a number, rounded up: two per doubling (1, 2, 3, 4, 6, 8, 12, 16,
    ...)."""
    size = max(num, 1).bit_length()
    if num <= 1 << size - 1:
        return 2 * size
    return 2 * size + (1 if num <= 3 << size - 2 else 2)


def _level(drafts: float) -> int:
    """Returns 0 for no drafts, then one level per doubling."""
    level = int(drafts > 0)
    while drafts > 1 / 64:
        drafts /= 2
        level += 1
    return level


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
    """Acceptance rates of requests that get up to `num_drafts` drafts a step.

    There is one estimate for each position after the sampled token, given that the drafts before it
    were accepted. The request's own history counts most once there is enough of it; until then,
    that of all requests of about the same length. Older observations count less and less.
    """

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
        self._all[_length_class(length)].note(num_drafts, num_accepted)

    def chances(self, number: int, length: int) -> Sequence[float]:
        """Returns for each draft the chance that it and all drafts before it are accepted."""
        rates, every = self._own.get(number), self._all[_length_class(length)]
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


def _length_class(length: int) -> int:
    return sum(length >= bound for bound in _LENGTHS)
