"""Learns from the returns to known paths how likely one is at which age, and how far back paths are
left.

Pure counting; knows nothing of checkpoints. The constants are priors, which evidence overrides.

The prior probability of a return is 1 / (age + AGE_OFFSET) (a Lomax law); age counts requests, not
time. How much more or less likely it is, is learned: overall, by number of earlier returns, and by
magnitude of the age. Where returns come late and all at once (a cycle), the probability looks ahead
to the best time to wait until, as a Gittins index does.
"""

from __future__ import annotations

from itertools import accumulate
from math import inf, log
from operator import add, mul, truediv

AGE_OFFSET = 16.0
"""Requests over which a return stays about as likely as at once: traffic is interleaved."""
PRIOR_EVENTS = 4.0
"""Weight of the prior in each learned ratio, in events. For ages: where one return is expected; a
range of ages in which fewer are expected learns from fewer.
"""
PRIOR_CUTS = 0.25
"""Forks supposed at each magnitude of cut, before there is evidence."""
MAX_RETURNS = 2
"""Earlier returns are told apart up to this many."""
MAGNITUDES = 32


def _width(low: int, high: int) -> float:
    """Returns that the law expects between two ages before anything is learned."""
    return log((high + AGE_OFFSET) / (low + AGE_OFFSET))


AGES = [1 << m >> 1 for m in range(MAGNITUDES)]
"""Where each magnitude begins."""
STARTS = [log(low + AGE_OFFSET) for low in AGES]
WIDTHS = [_width(low, 2 * low or 1) for low in AGES]


class ReturnRates:
    """How much more often than 1 / (age + AGE_OFFSET) something returns: learned, by number of
    earlier returns and by magnitude of the age.

    What follows from the counts is worked out when it is asked for, as of then: from rates that lag
    behind by a few observations already, other requests are let in and evicted.
    """

    def __init__(self) -> None:
        self._total = _Ratio(PRIOR_EVENTS)
        self._own = [_Ratio(PRIOR_EVENTS) for _ in range(MAX_RETURNS + 1)]
        self._levels = [1.0] * (MAX_RETURNS + 1)
        self._returned = [PRIOR_EVENTS * width for width in WIDTHS]
        self._expected = self._returned.copy()
        """But for what `turns` adds."""
        self._turns = [0.0] * (MAGNITUDES + 1)
        """By how much more than the magnitude before one was lived through from end to end."""
        self._num_magnitudes = 2
        """Those that were observed or asked for, and one more: beyond them the law holds."""
        self._derived: list[tuple[float, float, float, float]] = []

    def chance(self, num_returns: int, age: int) -> float:
        """Of a return, for each request that the wait for it takes at best: returns may be unlikely
        now and come all at a later age.
        """
        magnitude = age.bit_length()
        ratio, _, until, events = self._up_to(magnitude)[magnitude]
        rate = ratio / (age + AGE_OFFSET)
        if until > age:
            rate = max(rate, (events - ratio * log(age + AGE_OFFSET)) / (until - age))
        return self._levels[min(num_returns, MAX_RETURNS)] * rate

    def expected(self, num_returns: int, age: int, later: int) -> float:
        """Returns to expect between two ages."""
        magnitude = later.bit_length()
        derived = self._up_to(magnitude)
        ratio, before, _, _ = derived[age.bit_length()]
        ratio_later, before_later, _, _ = derived[magnitude]
        events = before_later + ratio_later * log(later + AGE_OFFSET)
        events -= before + ratio * log(age + AGE_OFFSET)
        return self._levels[min(num_returns, MAX_RETURNS)] * events

    def _up_to(self, magnitude: int) -> list[tuple[float, float, float, float]]:
        """What `_derive` has, at least up to this magnitude."""
        if magnitude >= len(self._derived):
            self._num_magnitudes = max(self._num_magnitudes, magnitude + 1)
            self._derived = self._derive()
        return self._derived

    def _derive(self) -> list[tuple[float, float, float, float]]:
        """For each magnitude of age: how much likelier returns are; how many are expected up to an
        age; until when to wait for the most of them a request, and how many are expected from an
        age until then. Of the second and fourth what ratio x log(age + AGE_OFFSET) adds to or takes
        away.
        """
        num = self._num_magnitudes
        whole = map(mul, accumulate(self._turns[:num]), WIDTHS)
        ratios = list(map(truediv, self._returned, map(add, self._expected, whole)))
        starts = list(map(mul, ratios, STARTS))
        widths = list(map(mul, ratios, WIDTHS))
        before = [0.0, *accumulate(widths)]
        derived = []
        later, more = inf, 0.0
        for m in range(num - 1, -1, -1):
            age, found = AGES[m], widths[m]
            until = 2 * age or 1
            if (found + more) * (until - age) > found * (later - age):
                found += more
            else:
                later = until
            more = found
            derived.append((ratios[m], before[m] - starts[m], later, found + starts[m]))
        derived.reverse()
        return derived

    def observe(self, num_returns: int, since: int, age: int, *, returned: bool) -> None:
        """Something lived from age `since` to `age`, and then returned or was left waiting."""
        own = self._own[min(num_returns, MAX_RETURNS)]
        level = self._total.value * own.value
        first, last = since.bit_length(), age.bit_length()
        if first == last:
            self._expected[last] += level * _width(since, age)
        else:
            self._expected[first] += level * _width(since, AGES[first + 1])
            self._expected[last] += level * _width(AGES[last], age)
            self._turns[first + 1] += level
            self._turns[last] -= level
        self._returned[last] += returned
        in_all = _width(since, age)
        own.observe(in_all * self._total.value, returned)
        self._total.observe(in_all, returned)
        self._levels = [self._total.value * ratio.value for ratio in self._own]
        self._num_magnitudes = max(self._num_magnitudes, last + 2)
        self._derived = []


class _Ratio:
    """Events seen to events expected, starting from one."""

    __slots__ = ("_expected", "_seen", "value")

    def __init__(self, prior_events: float) -> None:
        self._seen = self._expected = prior_events
        self.value = 1.0

    def observe(self, expected: float, seen: int) -> None:
        self._expected += expected
        self._seen += seen
        self.value = self._seen / self._expected


class Cuts:
    """How many tokens before a path's end others leave it, by magnitude."""

    def __init__(self) -> None:
        self._counts = [PRIOR_CUTS] * MAGNITUDES
        self._below = [0.0, *accumulate(self._counts)]

    def observe(self, num_tokens: int) -> None:
        self._counts[num_tokens.bit_length()] += 1
        self._below = [0.0, *accumulate(self._counts)]

    def share(self, over: int, up_to: int) -> float:
        """Share of the cuts above `over` tokens, up to and with `up_to`."""
        return (self._under(up_to + 1) - self._under(over + 1)) / self._below[-1]

    def _under(self, num_tokens: int) -> float:
        """Cuts of fewer tokens; inside a magnitude they are supposed to be even."""
        magnitude = num_tokens.bit_length()
        low = 1 << magnitude >> 1
        return self._below[magnitude] + self._counts[magnitude] * (num_tokens - low) / (low or 1)
