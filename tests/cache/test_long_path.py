"""A path of 20,000 pages: every verb is a loop, none a recursion."""

from __future__ import annotations

import inspect
import sys

import pytest

from milepost.cache import Cache
from milepost.cache.placement import Kind
from milepost.cache.tree import upwards
from tests.invariants import check

PAGE_SIZE = 16
NUM_PAGES = 20_000
LENGTH = NUM_PAGES * PAGE_SIZE


@pytest.fixture
def shallow():
    """Too little stack for a recursion over even a small part of the path."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    yield
    sys.setrecursionlimit(limit)


def long_tokens(seed: int) -> list[int]:
    return [(seed + 7 * i) % 50_021 for i in range(LENGTH)]


def prefill(cache: Cache, chain) -> object:
    """Admit and compute a prompt in one step."""
    allocation = cache.admit(chain, cache.match(chain))
    assert allocation is not None
    exports = cache.take_exports(allocation, len(chain))
    written = {export.slot: export.position for export in exports}
    cache.commit(allocation, len(chain), {allocation.slot_out: len(chain)} | written)
    return allocation


def test_match_admit_commit_release_evict(shallow):
    cache = Cache(num_pages=NUM_PAGES + 2, num_slots=4, page_size=PAGE_SIZE)
    tokens = long_tokens(1)
    chain = cache.chain(tokens)
    assert cache.match(chain).kv_length == 0
    allocation = prefill(cache, chain)
    assert len(allocation.path) == NUM_PAGES
    cache.release(allocation, Kind.ANSWER_END)

    follow_up = cache.chain([*tokens, 1, 2, 3])
    match = cache.match(follow_up)
    assert (match.kv_length, match.state_length) == (LENGTH, LENGTH)
    allocation = prefill(cache, follow_up)
    assert allocation.report.lost == {"unseen": 3}
    cache.release(allocation, Kind.PREEMPTED)

    fork = cache.match(cache.chain([*tokens[: LENGTH // 2], 1]))
    assert (fork.branch_points, fork.kv_length) == ((LENGTH // 2,), LENGTH // 2)
    assert fork.state_length < LENGTH // 2
    assert len(list(upwards(cache.match(follow_up).checkpoint))) >= 2
    check(cache)

    other = cache.chain(long_tokens(2))
    allocation = prefill(cache, other)
    assert cache.stats.pages_evicted >= NUM_PAGES - 2
    report = cache.match(follow_up).report
    assert report.reused == 0
    assert report.lost["kv_evicted"] > LENGTH // 2
    cache.release(allocation)
    check(cache)
    assert cache.reset()
    assert cache.pages.num_free == cache.pages.total


def test_a_state_at_the_end_of_a_long_path_goes_alone(shallow):
    """Dropping it makes the whole path strays, which go one by one and from the end."""
    cache = Cache(num_pages=NUM_PAGES, num_slots=1, page_size=PAGE_SIZE)
    chain = cache.chain(long_tokens(1))
    cache.release(prefill(cache, chain), Kind.ANSWER_END)
    short = cache.chain(range(33))
    cache.release(prefill(cache, short), Kind.ANSWER_END)
    assert cache.stats.checkpoints_evicted == {"slots": 1}
    assert cache.match(chain).kv_length == LENGTH - 3 * PAGE_SIZE
    check(cache)
