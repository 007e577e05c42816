"""What is learned from the returns to known paths: how likely one is at which age, and how far back
paths are left.

Pure counting; knows nothing of checkpoints. The constants are priors, which evidence outvotes.

A return is at first supposed to be as likely as 1 / (age + AGE_OFFSET) (a Lomax law); age counts
requests, not time. How much more or less likely it is, is learned: in all, by number of earlier
returns, and by magnitude of the age. Where returns come late and all at once (a cycle), the chance
looks ahead to the best time to wait until, as a Gittins index does.
"""

from __future__ import annotations

from itertools import accumulate
from math import log

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


AGES = [1 << m >> 1 for m in range(MAGNITUDES + 1)]
"""Where each magnitude begins."""
WIDTHS = [_width(AGES[m], AGES[m + 1]) for m in range(MAGNITUDES)]


class ReturnRates:
    """How much more often than 1 / (age + AGE_OFFSET) something returns: learned, by number of
    earlier returns and by magnitude of the age.
    """

    __slots__ = ("_before", "_by_age", "_levels", "_own", "_total", "_waits")

    def __init__(self) -> None:
        self._total = _Ratio(PRIOR_EVENTS)
        self._own = [_Ratio(PRIOR_EVENTS) for _ in range(MAX_RETURNS + 1)]
        self._by_age = [_Ratio(PRIOR_EVENTS * width) for width in WIDTHS]
        self._levels = [1.0] * (MAX_RETURNS + 1)
        self._before: list[float] | None = None
        self._waits: list[tuple[int, float]] | None = None

    def chance(self, num_returns: int, age: int) -> float:
        """Of a return, for each request that the wait for it takes at best: returns may be unlikely
        now and come all at a later age.
        """
        magnitude = age.bit_length()
        ratio = self._by_age[magnitude].value
        rate = ratio / (age + AGE_OFFSET)
        until, events = self._best_waits()[magnitude]
        if until > age:
            low = 1 << magnitude >> 1
            events -= ratio * _width(low, age)
            rate = max(rate, events / (until - age))
        return self._levels[min(num_returns, MAX_RETURNS)] * rate

    def expected(self, num_returns: int, age: int, later: int) -> float:
        """Returns to expect between two ages."""
        events = self._until(later) - self._until(age)
        return self._levels[min(num_returns, MAX_RETURNS)] * events

    def _until(self, age: int) -> float:
        """Returns to expect up to an age, as often as all return."""
        before, magnitude = self._before, age.bit_length()
        if before is None:
            each = (ratio.value * width for ratio, width in zip(self._by_age, WIDTHS, strict=True))
            before = self._before = [0.0, *accumulate(each)]
        low = 1 << magnitude >> 1
        return before[magnitude] + self._by_age[magnitude].value * _width(low, age)

    def _best_waits(self) -> list[tuple[int, float]]:
        """For each magnitude of age: until when to wait for the most events a request, and how many
        come from the magnitude's beginning until then.
        """
        if self._waits is not None:
            return self._waits
        ages = AGES
        events = [0.0] * MAGNITUDES
        waits = [(0, 0.0)] * MAGNITUDES
        for m in range(MAGNITUDES - 1, -1, -1):
            events[m] = self._by_age[m].value * WIDTHS[m]
            until, found = ages[m + 1], events[m]
            if m + 1 < MAGNITUDES:
                later, more = waits[m + 1]
                if (found + more) * (until - ages[m]) > found * (later - ages[m]):
                    until, found = later, found + more
            waits[m] = (until, found)
        self._waits = waits
        return waits

    def observe(self, num_returns: int, since: int, age: int, *, returned: bool) -> None:
        """Something lived from age `since` to `age`, and then returned or was left waiting."""
        self._waits = self._before = None
        own = self._own[min(num_returns, MAX_RETURNS)]
        level = self._total.value * own.value
        in_all = 0.0
        first, last = since.bit_length(), age.bit_length()
        for magnitude in range(first, last + 1):
            expected = WIDTHS[magnitude]
            if magnitude in (first, last):
                low = max(AGES[magnitude], since)
                expected = _width(low, max(min(age, AGES[magnitude + 1]), low))
            in_all += expected
            is_last = returned and magnitude == last
            self._by_age[magnitude].observe(expected * level, is_last)
        own.observe(in_all * self._total.value, returned)
        self._total.observe(in_all, returned)
        self._levels = [self._total.value * ratio.value for ratio in self._own]


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

    __slots__ = ("_below", "_counts")

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
