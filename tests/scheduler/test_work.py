"""What a step costs does not grow with what waits: counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from hashlib import blake2b

import pytest

from milepost.scheduler.admission_round import MAX_CHANGES, MAX_LOOKS, MAX_PASSED_OVER
from milepost.scheduler.request import FinishReason
from tests.fakes import make_request, outcome
from tests.scheduler.test_fairness import Load

FEW, MANY = 300, 3000
"""Requests that wait; more than a step looks at."""


def queue_up(load: Load, num: int, prompt: list[int]) -> None:
    """Requests that share a prompt but for their last tokens."""
    for number in range(num):
        own = [*prompt, 7_000_000 + number]
        load.scheduler.add(make_request(load.cache, f"w{number}", own, max_tokens=40))


def waiting_for_a_prefix(num: int) -> Load:
    """All share what one that runs has yet to compute."""
    load = Load(budget=128, max_num_seqs=8)
    shared = list(range(400))
    load.scheduler.add(make_request(load.cache, "first", shared))
    load.step()
    queue_up(load, num, shared)
    return load


def waiting_for_tokens(num: int) -> Load:
    """One that runs takes all tokens of a step."""
    load = Load(budget=128, max_num_seqs=8)
    load.ask(5000)
    load.step()
    queue_up(load, num, list(range(200)))
    return load


def waiting_for_room(num: int) -> Load:
    """Others hold the pages, and what is cached besides is many states."""
    load = Load(budget=512, max_num_seqs=8, num_pages=600, slots=300)
    for _ in range(100):
        load.ask(70, max_tokens=1)
    while load.scheduler.has_work:
        load.step()
    for _ in range(2):
        load.ask(4000, max_tokens=200)
    while any(request.num_output_tokens < 2 for request in load.scheduler.running) or (
        load.scheduler.waiting
    ):
        load.step()
    queue_up(load, num, list(range(2000)))
    return load


def waiting_for_a_seat(num: int) -> Load:
    load = Load(budget=128, max_num_seqs=2)
    for _ in range(2):
        load.ask(20, max_tokens=500)
    load.step()
    queue_up(load, num, list(range(200)))
    return load


def work_of_steps(load: Load, num_steps: int) -> list[Counter[str]]:
    """What each of so many steps calls, by name; steps are planned alone."""
    found = []
    for _ in range(num_steps):
        calls: Counter[str] = Counter()

        def count(frame, event, _argument, calls=calls):
            if event == "call":
                calls["all"] += 1
                calls[frame.f_code.co_name] += 1

        sys.setprofile(count)
        plan = load.scheduler.schedule()
        sys.setprofile(None)
        load.scheduler.update(plan, outcome(plan))
        found.append(calls)
    return found


@pytest.mark.parametrize(
    "made",
    [waiting_for_a_prefix, waiting_for_tokens, waiting_for_room, waiting_for_a_seat],
)
def test_a_step_does_the_same_however_many_wait(made):
    few, many = (work_of_steps(made(num), 12) for num in (FEW, MANY))
    for less, more in zip(few, many, strict=True):
        assert more["match"] == less["match"] <= MAX_LOOKS + 8
        assert more["is_expected"] == less["is_expected"]
        assert more["all"] <= less["all"] + 60, "but for the search in the queue"
        assert more["is_blocked"] <= MAX_PASSED_OVER


def test_digests_are_made_while_the_step_runs(monkeypatch):
    """A new prompt that is alone is planned by that of its first page, which is not known."""
    num_made = 0

    def count(*args, **options):
        nonlocal num_made
        num_made += 1
        return blake2b(*args, **options)

    monkeypatch.setattr("milepost.cache.tree.chain.blake2b", count)
    load = Load(budget=8192, max_num_seqs=8)
    num_pages = 5000 // load.cache.page_size
    load.ask(5000)
    plan = load.scheduler.schedule()
    assert num_made == 2, "the root's, and the first page's"
    load.scheduler.prepare(plan)
    assert num_made == 1 + num_pages
    load.scheduler.update(plan, outcome(plan))
    assert num_made == 1 + num_pages


def test_who_waits_for_a_prefix_is_looked_up_once():
    load = waiting_for_a_prefix(FEW)
    looks = [work["match"] for work in work_of_steps(load, 2)]
    assert looks == [MAX_LOOKS, MAX_LOOKS]
    load = waiting_for_a_prefix(10)
    looks = [work["match"] for work in work_of_steps(load, 2)]
    assert looks == [10, 0]


def test_who_waits_for_one_less_urgent_is_looked_up_once():
    """It comes before the other in each step, and finds all of its tokens left."""
    load = Load(budget=128, max_num_seqs=20)
    shared = list(range(600))
    load.scheduler.add(make_request(load.cache, "first", shared, priority=1))
    load.step()
    queue_up(load, 10, shared)
    assert [work["match"] for work in work_of_steps(load, 3)] == [10, 0, 0]
    assert load.scheduler.stats.num_waits == 30


def test_who_finds_no_room_is_looked_up_once():
    load = waiting_for_room(10)
    before = work_of_steps(load, 1)[0]
    assert before["match"] == 10
    later = work_of_steps(load, 3)
    assert all(work["match"] <= 1 for work in later), "the first may look again as it ages"


def test_a_queue_of_thousands_is_searched_and_not_walked():
    counts = []
    for num in (FEW, MANY):
        load = waiting_for_a_seat(num)
        middle = next(request for request in load.scheduler.waiting if request.id == f"w{num // 2}")
        calls = 0

        def count(_frame, event, _argument):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        load.scheduler.finish(middle, FinishReason.ABORT)
        late = load.ask(20)
        sys.setprofile(None)
        assert late.allocation is None
        counts.append(calls)
    assert counts[1] <= counts[0] + 20


def test_a_step_begins_and_evicts_a_bounded_number():
    """The rest follows in the next step. Each needs two pages of a full cache, for which a state or
    two have to go.
    """
    load = Load(budget=4096, max_num_seqs=200, num_pages=400, slots=400)
    for _ in range(400):
        load.ask(30, max_tokens=1)
    while load.scheduler.has_work:
        load.step()
    stats = load.cache.stats
    for number in range(150):
        own = [7_000_000 + number] * 17
        load.scheduler.add(make_request(load.cache, f"w{number}", own, max_tokens=1))
    changes = []
    while load.scheduler.waiting:
        before = stats.num_evicted - len(load.scheduler.waiting)
        load.step()
        changes.append(stats.num_evicted - len(load.scheduler.waiting) - before)
    assert max(changes) <= MAX_CHANGES + 2
    assert len(changes) <= 2 * 150 * 3 / MAX_CHANGES
    assert min(changes[:-1]) >= MAX_CHANGES
