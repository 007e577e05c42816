"""The search for the least memory."""

import pytest

from milepost.simulator.search import LARGEST_GIB, PRECISION, smallest


@pytest.mark.parametrize("needed", [1.0, 1.01, 37.0, 64.0, 900.0])
def test_what_is_found_suffices_and_little_less_does_not(needed):
    asked = []

    def hit_rate(gib):
        asked.append(gib)
        return 0.9 if gib >= needed else 0.5

    found = smallest(0.9, hit_rate)
    assert needed <= found <= needed * (1 + 2 * PRECISION)
    assert found in asked
    assert len(asked) <= 20


def test_a_rate_that_is_never_reached_is_told_from_one_that_is():
    assert smallest(0.9, lambda _: 0.5) is None
    assert smallest(0.9, lambda gib: 0.9 if gib >= LARGEST_GIB else 0.0) == LARGEST_GIB
