"""A request with two steps in flight."""

import pytest

from milepost.cache import Cache, Kind
from tests.invariants import check


def admitted(num_tokens, marks=()):
    cache = Cache(num_pages=16, num_slots=8)
    chain = cache.chain(range(num_tokens))
    return cache, chain, cache.admit(chain, cache.match(chain), marks=marks)


def written(allocation, end, exports):
    return {allocation.slot_out: end} | {export.slot: export.position for export in exports}


def test_each_step_commits_its_own_exports():
    cache, chain, allocation = admitted(300, marks=(64, 192))
    first = cache.take_exports(allocation, 128)
    second = cache.take_exports(allocation, 300)
    assert [[e.position for e in taken] for taken in (first, second)] == [[64], [192, 256]]
    assert (allocation.committed, allocation.planned) == (0, 300)
    check(cache)
    cache.commit(allocation, 128, written(allocation, 128, first))
    check(cache)
    assert allocation.exports == second
    assert cache.match(chain).state_length == 64
    cache.commit(allocation, 300, written(allocation, 300, second))
    assert not allocation.exports
    assert cache.match(chain).state_length == 256
    cache.release(allocation, Kind.ANSWER_END)
    check(cache)


def test_exports_of_both_steps_are_given_up_together():
    cache, _, allocation = admitted(300, marks=(64, 192))
    cache.take_exports(allocation, 128)
    cache.take_exports(allocation, 300)
    cache.release(allocation)
    check(cache)
    assert cache.slots.num_free == 8


def test_a_branch_point_is_asked_for_before_any_step_passes_it():
    cache, _, allocation = admitted(300)
    cache.take_exports(allocation, 128)
    with pytest.raises(AssertionError, match="A2"):
        cache.add_branch_point(allocation, 128)
    cache.add_branch_point(allocation, 192)
    assert [export.position for export in cache.take_exports(allocation, 300)] == [192, 256]


def test_of_too_many_states_the_deepest_are_kept():
    cache, _, allocation = admitted(300, marks=(64, 128, 192))
    assert [export.position for export in cache.take_exports(allocation, 300, most=2)] == [192, 256]
    assert cache.stats.checkpoints_skipped == 2


def test_a_chunk_is_planned_once():
    cache, _, allocation = admitted(300)
    cache.take_exports(allocation, 128)
    with pytest.raises(AssertionError, match="A3"):
        cache.take_exports(allocation, 128)
