"""Sliding windows: pages of their own, held by the states that need them and by nobody else."""

from __future__ import annotations

import pytest

from milepost.cache import Cache, Kind
from milepost.cache.plans import HOLE
from milepost.cache.tree import (
    FullAttention,
    Recurrent,
    ShortConvolution,
    SlidingWindow,
    num_window_pages,
    window_of,
    window_pages,
)
from milepost.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, cold_answer, make_request
from tests.invariants import check

PAGE_SIZE = 16


def build(*, window=40, num_pages=40, num_slots=6, max_num_seqs=4, budget=64, **options):
    recurrent = Recurrent(grid=PAGE_SIZE)
    kinds = (FullAttention(), recurrent, SlidingWindow(window=window))
    num_windows = num_window_pages(
        window,
        PAGE_SIZE,
        num_states=num_slots,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    sizes = {"num_pages": num_pages, "num_slots": num_slots, "num_windows": num_windows}
    return Cache(page_size=PAGE_SIZE, kinds=kinds, **sizes, **options)


def run(cache, allocation, end):
    assert cache.extend(allocation, end)
    exports = cache.take_exports(allocation, end)
    written = {allocation.slot_out: end} | {export.slot: export.position for export in exports}
    cache.commit(allocation, end, written)
    check(cache)


def begin(cache, tokens, **options):
    chain = cache.chain(tokens)
    allocation = cache.admit(chain, cache.match(chain), **options)
    check(cache)
    return allocation


def serve(cache, tokens, step=48, **options):
    """Compute a prompt in chunks; the allocation, and where it began."""
    allocation = begin(cache, tokens, **options)
    start = allocation.committed
    while allocation.committed < len(allocation.chain):
        run(cache, allocation, min(allocation.committed + step, len(allocation.chain)))
    return allocation, start


def test_the_longest_window_is_the_models():
    assert window_of((FullAttention(), Recurrent())) == 0
    assert window_of((FullAttention(), SlidingWindow(window=8), SlidingWindow(window=40))) == 40
    with pytest.raises(AssertionError, match="beside pages"):
        Cache(num_pages=4, num_slots=2, kinds=(ShortConvolution(), SlidingWindow()))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 40])
def test_a_state_needs_no_more_pages_than_are_counted(window):
    needed = [
        -(-position // PAGE_SIZE) - (position + 1 - window) // PAGE_SIZE
        for position in range(window, 200)
    ]
    assert window_pages(window, PAGE_SIZE) == (max(needed) if window > 1 else 0)


@pytest.mark.parametrize("window", [1, 16, 40])
def test_a_long_request_holds_its_window_alone(window):
    """100,000 tokens, in chunks and then one by one."""
    cache = build(window=window, num_pages=6300, num_slots=2, mode="none")
    allocation = begin(cache, range(100_000))
    while allocation.committed < 99_900:
        end = min(allocation.committed + 64, 99_900)
        cache.take_exports(allocation, end)
        cache.commit(allocation, end, {allocation.slot_out: end})
        assert cache.windows.num_used <= window // PAGE_SIZE + 2
    for end in range(99_901, 100_000):
        run(cache, allocation, end)
        assert cache.windows.num_used <= window // PAGE_SIZE + 2
    assert cache.windows.num_cached == 0
    cache.release(allocation)
    assert cache.windows.num_free == cache.windows.total


def test_a_state_keeps_the_pages_of_its_window_and_they_go_with_it():
    cache = build(num_slots=3)
    cache.release(serve(cache, range(200))[0], Kind.ANSWER_END)
    check(cache)
    kept = {c.position: c.windows for c in cache.tree.at_slot.values()}
    assert {position: len(pages) for position, pages in kept.items()} == {192: 3, 200: 3}
    assert len(set(kept[192] + kept[200])) == 4, "what both need is there once"
    assert (cache.windows.num_used, cache.windows.num_cached) == (0, 4)
    for first in (1000, 2000):
        cache.release(serve(cache, range(first, first + 60))[0], Kind.ANSWER_END)
    assert cache.stats.checkpoints_evicted["slots"] > 0
    held = {page for c in cache.tree.at_slot.values() for page in c.windows}
    assert (cache.windows.num_used, cache.windows.num_cached) == (0, len(held))
    assert cache.reset()
    assert cache.windows.num_free == cache.windows.total


@pytest.mark.parametrize("position", [*range(30, 50), 79, 80, 81])
def test_a_hit_shares_the_windows_pages_and_copies_the_last(position):
    """Wherever the state lies, at the window's edge or around a page's."""
    cache = build()
    cache.release(serve(cache, range(position))[0], Kind.ANSWER_END)
    kept = {c.position: c for c in cache.tree.at_slot.values()}[position].windows
    allocation = begin(cache, range(100))
    assert allocation.committed == position
    first, inside = max(position - 39, 0) // PAGE_SIZE, position % PAGE_SIZE
    own = allocation.window_table[first:]
    assert allocation.window_table[:first] == [HOLE] * first
    if inside:
        copy = allocation.window_copy
        assert (copy.source, copy.target, copy.num_tokens) == (kept[-1], own[-1], inside)
        assert tuple(own[:-1]) == kept[:-1]
    else:
        assert allocation.window_copy is None
        assert tuple(own) == kept
    run(cache, allocation, 100)
    assert allocation.source is None


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_answers_are_those_of_a_cold_run_when_memory_is_short(max_num_seqs):
    """Preempted, evicted and resumed at every page around the window's edge."""
    cache = build(window=33, num_pages=14, num_slots=3, max_num_seqs=max_num_seqs)
    scheduler = Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    runner = FakeRunner(scheduler, page_size=PAGE_SIZE, kinds=cache.config.kinds)
    prompts = [[n % 4 for n in range(length)] for length in range(20, 70, 7)]
    requests = [
        make_request(cache, str(index), prompt, max_tokens=50)
        for index, prompt in enumerate(prompts * 2)
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan))
        check(cache)
    for request, prompt in zip(requests, prompts * 2, strict=True):
        assert list(request.chain.tokens[len(prompt) :]) == cold_answer(prompt, 50, 4)
    assert max_num_seqs == 1 or any(request.num_preemptions for request in requests)
    assert cache.stats.hits + cache.stats.resumed_hits > 0
