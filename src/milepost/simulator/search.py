"""Finds the memory that a hit rate takes, by doubling it and then halving the interval."""

from __future__ import annotations

from collections.abc import Callable

SMALLEST_GIB = 1.0
LARGEST_GIB = 4096.0
PRECISION = 0.05
"""Largest excess of the result over the memory that is needed, as a share of it."""


def smallest(target: float, hit_rate: Callable[[float], float]) -> float | None:
    """Returns the least memory in GiB with which `hit_rate` reaches `target`, or None if
    LARGEST_GIB do not suffice. Assumes that more memory hits no less; if luck has it otherwise, the
    result still reaches the target.
    """
    low, high = 0.0, SMALLEST_GIB
    while hit_rate(high) < target:
        if high >= LARGEST_GIB:
            return None
        low, high = high, 2 * high
    while low and high - low > PRECISION * high:
        middle = (low + high) / 2
        if hit_rate(middle) < target:
            low = middle
        else:
            high = middle
    return high
