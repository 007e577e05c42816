"""What is learned, and the order in which checkpoints go because of it."""

import copy
import random
from collections import Counter
from itertools import pairwise

from milepost.cache.eviction import Score
from milepost.cache.eviction.buckets import Buckets
from milepost.cache.eviction.return_rates import (
    AGE_OFFSET,
    PRIOR_CUTS,
    Cuts,
    ReturnRates,
)
from milepost.cache.tree import Checkpoint, End, Node
from milepost.cache.tree.nodes import NO_PAGE


def test_without_evidence_a_return_gets_less_likely_with_age():
    rates = ReturnRates()
    chances = [rates.chance(0, age) for age in (0, 1, 10, 100, 1000)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == 1 / AGE_OFFSET


def test_what_never_returns_loses_its_worth():
    rates = ReturnRates()
    for _ in range(50):
        rates.observe(0, 0, 500, returned=False)
    assert rates.chance(0, 10) < ReturnRates().chance(0, 10) / 4


def test_what_returned_before_is_told_from_what_did_not():
    rates = ReturnRates()
    for _ in range(50):
        rates.observe(0, 0, 100, returned=False)
        rates.observe(2, 0, 10, returned=True)
    assert rates.chance(2, 10) > 5 * rates.chance(0, 10)


def test_in_a_cycle_the_oldest_is_worth_most():
    """It is next; only of the very youngest too little is known to tell."""
    rates = ReturnRates()
    for _ in range(400):
        rates.observe(2, 0, 160, returned=True)
    chances = [rates.chance(2, age) for age in (30, 60, 100, 127)]
    assert chances == sorted(chances)


def test_a_wait_counted_in_two_parts_counts_the_same():
    whole, parts = ReturnRates(), ReturnRates()
    whole.observe(1, 0, 300, returned=True)
    parts.observe(1, 0, 70, returned=False)
    parts.observe(1, 70, 300, returned=True)
    for age in (0, 5, 64, 100, 500):
        assert abs(whole.chance(1, age) / parts.chance(1, age) - 1) < 0.2


def test_the_curve_is_derived_once_for_all_that_is_asked_before_the_next_observation(monkeypatch):
    num_derived = Counter()
    derive = ReturnRates._derive
    monkeypatch.setattr(
        ReturnRates, "_derive", lambda rates: num_derived.update("d") or derive(rates)
    )
    rates, rng = ReturnRates(), random.Random(0)
    for num in range(1, 100):
        for _ in range(10):
            rates.observe(rng.randrange(3), 0, rng.randrange(2000), returned=rng.random() < 0.3)
        chances = [rates.chance(1, age) for age in (1 << 40, 1500, 300, 10, 0)]
        assert num_derived["d"] == num
    other = copy.deepcopy(rates)
    other._curve = []
    assert chances == [other.chance(1, age) for age in (1 << 40, 1500, 300, 10, 0)]


def test_rates_of_cuts_add_up():
    cuts = Cuts()
    rng = random.Random(0)
    for _ in range(100):
        cuts.observe(rng.randrange(50_000))
    edges = [0, 1, 63, 64, 65, 5000, 8191, 100_000]
    parts = [cuts.rate(a, b) for a, b in pairwise(edges)]
    assert all(part >= 0 for part in parts)
    assert abs(sum(parts) - cuts.rate(0, 100_000)) < 1e-9
    assert cuts.rate(64, 64) == 0


def test_cuts_count_for_each_return_to_the_end_and_where_they_were_seen():
    cuts = Cuts()
    assert abs(cuts.rate(0, 1 << 22) - PRIOR_CUTS) < PRIOR_CUTS / 5
    for _ in range(100):
        cuts.observe(100)
    assert cuts.rate(63, 127) > 0.99 * cuts.rate(0, 1 << 22)
    before = cuts.rate(63, 127)
    cuts.num_continued *= 4
    assert cuts.rate(63, 127) == before / 4


def checkpoint(position):
    node = Node(b"", NO_PAGE, None, b"")
    end = End(position=position, time=0)
    return Checkpoint(
        position=position, slot=1, node=node, kind="mark", tail=b"", tail_page=None, end=end
    )


class Listed(Score):
    """Worth by position from a table, relied on for `rest` requests; notes what is looked at."""

    def __init__(self, values, rest=0):
        super().__init__(num_slots=1, grid=64)
        self.values, self.rest, self.looks = values, rest, []

    def of(self, checkpoint):
        self.looks.append(checkpoint.position)
        return self.values[checkpoint.position]

    def steady(self, _):
        return self.rest


def test_shelves_give_the_least_of_either_end_of_a_shelf():
    score = Listed({i: i for i in range(6)})
    buckets, items = Buckets(score, score.of), [checkpoint(i) for i in range(6)]
    assert buckets.victim() is None
    for time, item in enumerate(items):
        buckets.push(item, "even" if time % 2 == 0 else "odd", time)
    assert buckets.victim() == (items[0], 0)
    score.values = {i: -i for i in range(6)}
    assert buckets.victim() == (items[5], -5)
    score.values = {i: i for i in range(6)}
    buckets.discard(items[0])
    buckets.push(items[5], "even", 9)
    assert buckets.victim() == (items[1], 1)
    assert sorted(c.position for c in buckets) == [1, 2, 3, 4, 5]


def test_buckets_rest_until_they_change_or_their_worth_may():
    score = Listed({i: i for i in range(4)}, rest=10)
    buckets, items = Buckets(score, score.of), [checkpoint(i) for i in range(4)]
    for item in items[:3]:
        buckets.push(item, item.position, 0)
    buckets.victim()
    score.looks.clear()
    assert buckets.victim() == (items[0], 0)
    assert score.looks == [0], "only the least is looked at again"
    score.looks.clear()
    buckets.push(items[3], 2, 1)
    buckets.victim()
    assert sorted(score.looks) == [0, 2, 3], "and a bucket that has changed"
    score.clock += 10
    score.looks.clear()
    buckets.victim()
    assert sorted(set(score.looks)) == [0, 1, 2, 3]


def test_what_buckets_return_is_worth_that_now():
    """Also where the one that was worth least has become dearer than others."""
    score = Listed({i: i for i in range(4)}, rest=10)
    buckets, items = Buckets(score, score.of), [checkpoint(i) for i in range(4)]
    for item in items:
        buckets.push(item, item.position, 0)
    buckets.victim()
    score.values |= {0: 9, 1: 8, 2: 2.5}
    assert buckets.victim() == (items[2], 2.5)
