"""What is kept in mind of requests that wait, and what is forgotten of those that go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from milepost.cache import Cache
from milepost.cache.plans import PageMove
from milepost.scheduler.queue import Queue
from milepost.scheduler.request import FinishReason
from milepost.scheduler.sharing import PendingPrefixes
from tests.fakes import make_request
from tests.scheduler.test_peers import Bench, tokens


class Room:
    """A memory of which only the room is asked for."""

    def __init__(self) -> None:
        self.room = (10, 2)
        reservation = SimpleNamespace(checkpoint=None)
        self.expect = self.refresh = self.forget = lambda *_, **__: reservation


@pytest.mark.parametrize(
    ("room", "is_blocked"),
    [((10, 2), True), ((9, 1), True), ((11, 2), False), ((10, 3), False), ((11, 1), False)],
)
def test_more_of_either_kind_of_memory_unblocks(room, is_blocked):
    cache = Cache(num_pages=8, num_slots=2)
    memory = Room()
    queue = Queue(memory)
    request, other = (make_request(cache, id_, [1, 2, 3]) for id_ in "ab")
    other.number = 1
    queue.add(request)
    queue.add(other)
    assert not queue.is_blocked(request, 0.0)
    queue.block(request, None)
    memory.room = room
    assert queue.is_blocked(request, 0.0) is is_blocked
    memory.room = (10, 2)
    queue.admit(other)
    assert not queue.is_blocked(request, 0.0), (
        "something else was admitted that it could share with"
    )


def test_who_is_passed_over_counts_each_admission_behind_it():
    bench = Bench(num_pages=12, num_slots=8)
    bench.submit(tokens(100, 1), max_tokens=40)
    bench.step()
    blocked = bench.submit(tokens(150, 2), max_tokens=2)
    for seed in range(3):
        bench.submit(tokens(16, 10 + seed), max_tokens=1)
        bench.step()
        assert blocked.allocation is None
        assert blocked.num_bypasses == seed + 1
    bench.run()
    assert bench.is_right(blocked)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_what_a_request_claimed_is_forgotten_when_it_goes(num_steps):
    """The first that computes a prefix has it; if it goes, the next one has what is left."""
    cache = Cache(num_pages=64, num_slots=8, page_size=16)
    pending = PendingPrefixes(64)
    first, second, asking = (make_request(cache, id_, tokens(400)) for id_ in "abc")
    first.allocation = cache.admit(first.chain, cache.match(first.chain))
    pending.claim(first)
    if num_steps:
        cache.take_exports(first.allocation, 64)
        cache.commit(first.allocation, 64, {first.allocation.slot_out: 64})
        pending.settle(first)
    assert pending.find(asking, cache.match(asking.chain)).allocation is first.allocation
    pending.drop(first)
    cache.release(first.allocation)
    assert pending.find(asking, cache.match(asking.chain)) is None
    second.allocation = cache.admit(second.chain, cache.match(second.chain))
    pending.claim(second)
    assert pending.find(asking, cache.match(asking.chain)).allocation is second.allocation


def test_a_request_that_was_aborted_is_waited_for_by_nobody():
    bench = Bench(budget=64)
    first = bench.submit(tokens(400))
    bench.step()
    bench.scheduler.finish(first, FinishReason.ABORT)
    other = bench.submit(tokens(400, seed=1))
    bench.step()
    second = bench.submit(tokens(400))
    bench.scheduler.finish(other, FinishReason.ABORT)
    bench.step()
    assert second.allocation is not None
    bench.run()
    assert bench.is_right(second)


def test_a_step_ahead_that_moves_pages_takes_all_that_is_cached_with_it(monkeypatch):
    """Nobody knows which moves were made, though the step that is taken back has none."""
    bench = Bench()
    bench.ask(tokens(100))
    running = bench.submit(tokens(40, seed=1), max_tokens=8)
    plan = bench.scheduler.schedule()
    moves = (PageMove(source=0, target=1),)
    monkeypatch.setattr(bench.cache, "take_moves", lambda: moves)
    assert bench.scheduler.follow(plan).moves == moves
    monkeypatch.undo()
    assert not plan.moves
    bench.scheduler.roll_back(plan)
    assert not bench.cache.tree.nodes
    assert bench.cache.pages.num_free == bench.cache.pages.total
    bench.run()
    assert bench.is_right(running)
