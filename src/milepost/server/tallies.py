"""Metrics that are counted once or more for each token.

The library's own metrics take a lock, search for a bucket and check their arguments each time.
All of ours are counted in the event loop, so here a count is just an addition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Total(Collector):
    """A counter."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._value = 0

    def inc(self, amount: int = 1) -> None:
        self._value += amount

    def collect(self) -> Iterator[Family]:
        yield CounterMetricFamily(self._name, self._text, value=self._value)


class Distribution(Collector):
    """A histogram with these upper bounds, in ascending order."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text = name, text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Family]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], buckets, sum_value=self._sum)
        yield family
