"""Rates of what is copied and computed."""

import pytest

from milepost.tiers.holdings import MIN_BYTES, MIN_TOKENS, MeasuredRates


def test_the_first_measurement_replaces_the_guess_and_later_ones_are_smoothed():
    rates = MeasuredRates()
    rates.computed(1000, 0.1)
    rates.host.measure(2**30, 1.0)
    rates.disk.measure(2**30, 2.0)
    assert (rates.prefill.value, rates.host.value) == (10_000.0, 2**30)
    assert rates.load_seconds(0, 2**30) == pytest.approx(3.001)
    rates.computed(1000, 0.05)
    assert rates.prefill.value == 15_000.0
    for _ in range(20):
        rates.computed(1000, 0.05)
    rates.computed(1000, 1.0)
    assert 15_000 < rates.prefill.value < 17_000, "one slow step is not all"


def test_what_is_too_short_tells_nothing():
    rates = MeasuredRates(tokens_per_s=5.0, host_bytes_per_s=6.0, disk_bytes_per_s=7.0)
    rates.computed(MIN_TOKENS - 1, 1.0)
    rates.host.measure(MIN_BYTES - 1, 1.0)
    rates.disk.measure(MIN_BYTES - 1, 1.0)
    assert (rates.prefill.value, rates.host.value, rates.disk.value) == (5.0, 6.0, 7.0)


def test_a_way_that_was_slow_once_is_tried_again_in_time():
    """Found too slow it would not be used, and so never be measured again."""
    rates = MeasuredRates()
    rates.computed(10_000, 0.1)
    rates.disk.measure(2**30, 100.0)

    def is_worth():
        return rates.load_seconds(0, 2**28) < rates.compute_seconds(10_000)

    assert not is_worth()
    num_prefills = 0
    while not is_worth() and num_prefills < 1000:
        rates.computed(10_000, 0.1)
        num_prefills += 1
    assert 20 < num_prefills < 500
