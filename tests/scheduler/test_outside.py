"""Requests whose pages and states come from outside: what they hold and block, how it ends."""

from __future__ import annotations

import random

import pytest

from milepost.cache import Cache, Lost
from milepost.scheduler.outside import MAX_LOADING, Offer
from milepost.scheduler.request import FinishReason
from milepost.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, cold_answer, make_request, run_all
from tests.invariants import check
from tests.scheduler import fuzz
from tests.scheduler.oracle import OracleSource

PAGE_SIZE = 16


class Bench:
    """A scheduler with a source that has the first `position` tokens of every prompt."""

    def __init__(self, position: int, *, num_pages: int = 64, num_slots: int = 12) -> None:
        self.cache = Cache(num_pages=num_pages, num_slots=num_slots, page_size=PAGE_SIZE)
        self.scheduler = Scheduler(self.cache, max_num_seqs=10, max_num_batched_tokens=128)
        self.runner = FakeRunner(self.scheduler, page_size=PAGE_SIZE)
        self.source = OracleSource(self.runner, random.Random(0), share=1.0)
        self.position = position
        self.num_asked = 0
        self.source.offer = self.offer
        self.scheduler.outside.add_source(self.source)

    def offer(self, request, match):
        self.num_asked += 1
        end = min(self.position, len(request.chain) - 1)
        return Offer(source="oracle", position=end, tokens={"oracle": end - match.state_length})

    def add(self, prompt, **options):
        request = make_request(self.cache, f"r{len(prompt)}", prompt, **options)
        self.scheduler.add(request)
        return request

    def step(self):
        plan = self.scheduler.schedule()
        check(self.cache)
        if plan.sequences:
            self.scheduler.update(plan, self.runner.run(plan))
        self.source.launch(plan)
        check(self.cache)
        return plan


def test_what_comes_from_outside_is_not_computed_and_is_told_apart():
    bench = Bench(50)
    request = bench.add([1] * 60)
    plan = bench.step()
    assert plan.only_copies
    assert [(load.number, load.position, len(load.arrivals)) for load in plan.loads] == [(0, 50, 5)]
    assert request.report is None, "nobody knows yet what will have come"
    bench.source.bring(0)
    run_all(bench.scheduler, bench.runner)
    assert request.output_token_ids == cold_answer([1] * 60, 4, 4)
    assert bench.runner.num_tokens == 10 + 3
    assert (request.report.reused, request.report.loaded) == (50, {"oracle": 50})
    stats = bench.cache.stats
    assert (stats.queries, stats.hits, stats.loaded) == (60, 50, {"oracle": 50})


def test_a_request_that_loads_blocks_nobody():
    bench = Bench(50)
    loading, bench.position = bench.add([1] * 60), 50
    bench.step()
    bench.position = 0
    other = bench.add([2] * 70)
    while other.finish_reason is None:
        bench.step()
    assert loading.is_loading
    assert other.output_token_ids == cold_answer([2] * 70, 4, 4)


def test_what_does_not_come_is_computed():
    bench = Bench(50)
    request = bench.add([1] * 60)
    bench.step()
    bench.source.lose(0)
    run_all(bench.scheduler, bench.runner)
    assert request.output_token_ids == cold_answer([1] * 60, 4, 4)
    assert request.report.lost == {Lost.LATE_COPY: 50, Lost.UNSEEN: 10}
    assert bench.cache.stats.hits == 0


@pytest.mark.parametrize("comes", [True, False])
def test_an_aborted_request_holds_its_memory_until_nobody_writes_it(comes):
    bench = Bench(50)
    request = bench.add([1] * 60)
    bench.step()
    assert bench.scheduler.finish(request, FinishReason.ABORT)
    assert bench.cache.pages.num_used == 4
    assert bench.scheduler.has_work
    assert not bench.cache.reset()
    (bench.source.bring if comes else bench.source.lose)(0)
    check(bench.cache)
    assert not bench.scheduler.has_work
    assert bench.cache.pages.num_used == bench.cache.slots.num_used == 0


def test_so_many_load_at_a_time_and_the_others_wait_for_their_turn():
    bench = Bench(40, num_pages=200, num_slots=20)
    for first in range(MAX_LOADING + 1):
        bench.add([first, *[1] * 50])
    assert len(bench.step().loads) == MAX_LOADING
    asked = bench.num_asked
    for _ in range(3):
        assert not bench.step().sequences
    assert bench.num_asked == asked, "its pages are not walked again in each step"
    bench.source.bring(3)
    assert [load.number for load in bench.step().loads] == [MAX_LOADING]


def test_a_decode_takes_no_memory_from_a_request_that_loads():
    """It gives up its own, which nobody writes, rather than what is being filled."""
    bench = Bench(0, num_pages=8)
    first = bench.add([1] * 60, max_tokens=30)
    bench.step()
    bench.position = 50
    loading = bench.add([2] * 64)
    bench.step()
    bench.position = 0
    for _ in range(8):
        bench.step()
    assert loading.is_loading
    assert first.num_preemptions == 1
    bench.source.bring(1)
    run_all(bench.scheduler, bench.runner)
    assert first.output_token_ids == cold_answer([1] * 60, 30, 4)


def test_a_state_that_was_loaded_stays_for_others_where_a_slot_is_free():
    bench = Bench(48)
    bench.add([1] * 60)
    bench.step()
    bench.source.bring(0)
    run_all(bench.scheduler, bench.runner)
    assert bench.cache.match(bench.cache.chain([*[1] * 48, 2, 2])).state_length == 48


def test_what_is_lent_stays_where_it_is():
    bench = Bench(0)
    bench.add([1] * 60, marks=(59,))
    run_all(bench.scheduler, bench.runner)
    chain = bench.cache.chain([1] * 60)
    loan = bench.cache.lend(chain)
    check(bench.cache)
    assert (loan.position, len(loan.pages)) == (59, 4)
    assert bench.runner.positions[loan.slot] == 59
    for first in range(20):
        bench.add([2, first] * 40)
    run_all(bench.scheduler, bench.runner)
    assert bench.runner.positions[loan.slot] == 59
    assert bench.cache.match(chain).state_length == 59
    assert not bench.cache.reset()
    bench.cache.take_back(loan)
    check(bench.cache)
    assert bench.cache.lend(bench.cache.chain([3, 3])) is None
    assert bench.cache.reset()


@pytest.mark.parametrize(("length", "num_tokens"), [(100, 4), (60, 30)])
def test_a_request_that_is_alone_waits_for_what_is_lent(length, num_tokens):
    """To begin, or where its answer outgrows the rest of the memory."""
    bench = Bench(0, num_pages=8)
    bench.add([1] * 60, marks=(59,))
    run_all(bench.scheduler, bench.runner)
    loan = bench.cache.lend(bench.cache.chain([1] * 60))
    request = bench.add([2] * length, max_tokens=num_tokens)
    while bench.step().sequences:
        assert request.finish_reason is None
    assert request.allocation is None
    assert request.num_preemptions == (length == 60)
    assert not bench.step().sequences
    bench.cache.take_back(loan)
    run_all(bench.scheduler, bench.runner)
    assert request.output_token_ids == cold_answer([2] * length, num_tokens, 4)


@pytest.mark.parametrize("seed", [99, 65, 7, 13, 20])
def test_random_runs_with_loads(seed):
    """Seeds that have found something once, or load much."""
    assert fuzz.run(seed, 200).source is not None
