"""Who waits so that what others are likely to need is not evicted, and for how long."""

import random

import pytest

from milepost.scheduler.admission import MAX_HOLD_BACK_S
from tests.scheduler.test_peers import Bench


def tokens(num, seed):
    return random.Random(seed).choices(range(1000), k=num)


def full_of_chats(num_chats=3, budget=512):
    """64 pages, filled by chats that have each gone on once."""
    bench = Bench(num_pages=64, num_slots=40, budget=budget)
    chats = [tokens(256, seed) for seed in range(num_chats)]
    for _ in range(2):
        for number, chat in enumerate(chats):
            request = bench.ask(chat, max_tokens=4)
            chats[number] = [*chat, *request.output_token_ids, *tokens(8, number)]
    return bench, chats


def test_a_request_that_is_alone_never_waits():
    bench, _ = full_of_chats()
    newcomer = bench.submit(tokens(500, 9), max_tokens=2)
    bench.step()
    assert newcomer.allocation is not None


def test_a_newcomer_is_not_held_back_while_the_machine_idles():
    """Nobody else waits, so nobody would go first."""
    bench, chats = full_of_chats()
    bench.submit(chats[0], max_tokens=300)
    bench.step()
    newcomer = bench.submit(tokens(300, 9), max_tokens=2)
    bench.step()
    assert newcomer.allocation is not None


@pytest.mark.parametrize(("num_others", "is_admitted"), [(512, True), (513, False)])
def test_a_backlog_is_more_than_four_steps_of_the_tokens_of_others(num_others, is_admitted):
    """The newcomer's own 600 do not count."""
    bench, chats = full_of_chats(budget=128)
    bench.submit(chats[0], max_tokens=300)
    bench.step()
    newcomer = bench.submit(tokens(600, 9), max_tokens=2)
    bench.submit(tokens(num_others, 10), max_tokens=2)
    bench.step()
    assert (newcomer.allocation is not None) is is_admitted


def test_with_a_backlog_a_newcomer_lets_known_chats_go_first_but_not_forever(monkeypatch):
    monkeypatch.setattr("milepost.scheduler.admission.BACKLOG_STEPS", 0)
    bench, chats = full_of_chats()
    bench.submit(chats[0], max_tokens=300)
    bench.step()
    newcomer = bench.submit(tokens(300, 9), max_tokens=2)
    bench.submit(tokens(500, 10), max_tokens=2)
    bench.step()
    assert newcomer.allocation is None, "the other chats are likely to go on"
    follow_up = bench.submit(chats[1], max_tokens=2)
    bench.step()
    assert follow_up.allocation is not None
    assert follow_up.report.reused > 200
    num_steps = 0
    while newcomer.allocation is None:
        bench.step()
        num_steps += 1
    assert num_steps <= MAX_HOLD_BACK_S, "a step takes a second here"


@pytest.mark.parametrize(("priority", "is_admitted"), [(-1, True), (0, False)])
def test_who_is_more_urgent_than_one_that_runs_does_not_wait(monkeypatch, priority, is_admitted):
    """Of those that run one may be more urgent still."""
    monkeypatch.setattr("milepost.scheduler.admission.BACKLOG_STEPS", 0)
    bench, chats = full_of_chats()
    for number, other in enumerate((-5, 0)):
        bench.submit(chats[number], max_tokens=300, priority=other)
    bench.step()
    newcomer = bench.submit(tokens(300, 9), max_tokens=2, priority=priority)
    bench.submit(tokens(500, 10), max_tokens=2)
    bench.step()
    assert (newcomer.allocation is not None) is is_admitted


def test_none_is_admitted_for_whom_the_step_has_no_tokens():
    """A long prompt's chunk ends on the grid; what is left of the budget behind it is too little
    for another long one, which would hold pages and compute next to nothing."""
    bench = Bench(budget=512, num_pages=200, num_slots=20)
    bench.submit(tokens(20, 1), max_tokens=300)
    bench.step()
    first, second = (bench.submit(tokens(1000, seed), max_tokens=2) for seed in (2, 3))
    plan = bench.step()
    assert sorted(s.num_tokens for s in plan.sequences) == [1, 448], "63 tokens are left"
    assert first.allocation is not None
    assert second.allocation is None
    short = bench.submit(tokens(60, 4), max_tokens=2)
    plan = bench.step()
    assert sorted(s.num_tokens for s in plan.sequences) == [1, 60, 448], "all that it needs"
    assert short.report is not None
    assert second.allocation is None
    bench.run()
    assert all(map(bench.is_right, (first, second, short)))
