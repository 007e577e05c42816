"""How much memory it takes for a hit rate: doubling, then halving the interval."""

from __future__ import annotations

from collections.abc import Callable

SMALLEST_GIB = 1.0
LARGEST_GIB = 4096.0
PRECISION = 0.05
"""What is found is at most so much more than needed, as a share of it."""


def smallest(target: float, hit_rate: Callable[[float], float]) -> float | None:
    """The least memory in GiB with which `hit_rate` is at least `target`; None if LARGEST_GIB do
    not suffice. Supposes that more memory hits no less; where luck has it otherwise, what is
    returned still reaches the target.
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
