"""Learns from known paths how likely a return is at which age, and how far from their ends paths
are left.

Pure counting; knows nothing of checkpoints. Ages count requests, not seconds. The prior chance of a
return is 1 / (age + AGE_OFFSET), a Lomax law. Evidence scales it: overall, by number of earlier
returns, and by magnitude of the age. Where returns come late and all at once (a cycle), the chance
looks ahead to the best age to wait for, as a Gittins index does.
"""

from __future__ import annotations

from itertools import accumulate
from math import inf, log
from operator import mul, truediv

AGE_OFFSET = 16.0
"""Age in requests up to which a return stays about as likely as at age 0, since conversations are
interleaved."""
PRIOR_EVENTS = 4.0
"""Weight of the prior in each learned ratio, in events. For a range of ages it is the number of
returns that the prior expects there, so a range where few are expected learns faster."""
PRIOR_CUTS = 0.1
"""Prior number of cuts per return to the end."""
MAX_RETURNS = 2
"""Numbers of earlier returns are distinguished up to this one."""
MAGNITUDES = 24


def _width(low: int, high: int) -> float:
    """Returns the number of returns that the prior expects between two ages."""
    return log((high + AGE_OFFSET) / (low + AGE_OFFSET))


AGES = [1 << m >> 1 for m in range(MAGNITUDES + 1)]
"""First age of each magnitude, and the end of the last one."""
STARTS = [log(low + AGE_OFFSET) for low in AGES[:-1]]
WIDTHS = list(map(_width, AGES, AGES[1:]))


class Ratio:
    """Ratio of events seen to events expected. It starts at one, with the weight of
    `PRIOR_EVENTS`."""

    __slots__ = ("_expected", "seen", "value")

    def __init__(self) -> None:
        self.seen = self._expected = PRIOR_EVENTS
        self.value = 1.0

    def observe(self, expected: float, seen: int) -> None:
        self._expected += expected
        self.seen += seen
        self.value = self.seen / self._expected


class ReturnRates:
    """Learns how many times more often than 1 / (age + AGE_OFFSET) something returns.

    The curve is derived from all counts so far when it is first needed after a change.
    """

    def __init__(self) -> None:
        self._total = Ratio()
        self._own = [Ratio() for _ in range(MAX_RETURNS + 1)]
        self._returned = [PRIOR_EVENTS * width for width in WIDTHS]
        self._expected = self._returned.copy()
        self._curve: list[tuple[float, float, float, float]] = []

    def chance(self, num_returns: int, age: int) -> float:
        """Returns the chance of a return per request, averaged up to the age that makes it highest:
        returns may be unlikely now and all come at a later age."""
        ratio, _, until, events = self._at(age)
        rate = ratio / (age + AGE_OFFSET)
        if until > age:
            rate = max(rate, (events - ratio * log(age + AGE_OFFSET)) / (until - age))
        return self._level(num_returns) * rate

    def expected(self, num_returns: int, age: int, later: int) -> float:
        """Returns the number of returns to expect between two ages."""
        ratio, before, _, _ = self._at(age)
        ratio_later, before_later, _, _ = self._at(later)
        events = before_later + ratio_later * log(later + AGE_OFFSET)
        return self._level(num_returns) * (events - before - ratio * log(age + AGE_OFFSET))

    def observe(self, num_returns: int, since: int, age: int, *, returned: bool) -> None:
        """Records a wait from age `since` to `age`, after which the path was returned to, or was
        not yet."""
        level, rate = self._level(num_returns), self._own[min(num_returns, MAX_RETURNS)]
        last = _magnitude(age)
        for m in range(_magnitude(since), last + 1):
            low, high = max(since, AGES[m]), min(age, AGES[m + 1])
            self._expected[m] += level * _width(low, high)
        self._returned[last] += returned
        width = _width(since, age)
        rate.observe(width * self._total.value, returned)
        self._total.observe(width, returned)
        self._curve = []

    @property
    def evidence(self) -> float:
        """Share of the returns that were seen, and not assumed by the prior."""
        return 1.0 - PRIOR_EVENTS / self._total.seen

    def _level(self, num_returns: int) -> float:
        return self._total.value * self._own[min(num_returns, MAX_RETURNS)].value

    def _at(self, age: int) -> tuple[float, float, float, float]:
        if not self._curve:
            self._curve = self._derive()
        return self._curve[_magnitude(age)]

    def _derive(self) -> list[tuple[float, float, float, float]]:
        """Returns for each magnitude of age: the factor on the prior; the returns expected before
        an age; the age to wait for, which maximises returns per request; and the returns expected
        from an age until then. Callers add factor x log(age + AGE_OFFSET) to the second, and
        subtract it from the fourth."""
        ratios = list(map(truediv, self._returned, self._expected))
        starts, widths = list(map(mul, ratios, STARTS)), list(map(mul, ratios, WIDTHS))
        before = list(accumulate(widths, initial=0.0))
        curve, later, more = [], inf, 0.0
        for m in range(MAGNITUDES - 1, -1, -1):
            found, until = widths[m], AGES[m + 1]
            if (found + more) * (until - AGES[m]) > found * (later - AGES[m]):
                found += more
            else:
                later = until
            more = found
            curve.append((ratios[m], before[m] - starts[m], later, found + starts[m]))
        curve.reverse()
        return curve


class Cuts:
    """Counts the returns that leave a path before its end, per return to the end, by magnitude of
    the number of tokens in between."""

    def __init__(self) -> None:
        self.num_continued = PRIOR_EVENTS
        self._counts = [PRIOR_EVENTS * PRIOR_CUTS / MAGNITUDES] * MAGNITUDES

    def observe(self, num_tokens: int) -> None:
        self._counts[_magnitude(num_tokens)] += 1

    def rate(self, over: int, up_to: int) -> float:
        """Returns the number of cuts of more than `over` and at most `up_to` tokens, per return to
        the end."""
        return (self._under(up_to + 1) - self._under(over + 1)) / self.num_continued

    def _under(self, num_tokens: int) -> float:
        """Returns the number of cuts of fewer tokens. Those within one magnitude are
        spread evenly."""
        magnitude = _magnitude(num_tokens)
        low, high = AGES[magnitude : magnitude + 2]
        part = self._counts[magnitude] * (num_tokens - low) / (high - low)
        return sum(self._counts[:magnitude]) + part


def _magnitude(age: int) -> int:
    return min(age.bit_length(), MAGNITUDES - 1)
