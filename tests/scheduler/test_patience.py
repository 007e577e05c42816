"""Who waits so that what others are likely to need is not evicted, and for how long."""

import random

import pytest

from tests.scheduler.test_peers import Bench


def tokens(num, seed):
    return random.Random(seed).choices(range(1000), k=num)


def full_of_chats(num_chats=3, budget=512, **options):
    """64 pages, filled by chats that have each gone on once."""
    bench = Bench(num_pages=64, num_slots=40, budget=budget, **options)
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


def set_pace(bench, token_s):
    """A token takes so long, and steps compute prompts all the time."""
    admission = bench.scheduler._admission
    admission.token_s, admission.busy_share = token_s, 1.0
    admission.ran = lambda _, seconds: setattr(admission, "now_s", admission.now_s + seconds)


def held_back(num_others, **options):
    """A newcomer that is held back while others wait, and the chats, of which one runs."""
    bench, chats = full_of_chats(**options)
    bench.submit(chats[0], max_tokens=600)
    bench.step()
    set_pace(bench, 1 / 100)
    newcomer = bench.submit(tokens(300, 9), max_tokens=2)
    others = [bench.submit(tokens(300, seed), max_tokens=2) for seed in range(10, 10 + num_others)]
    bench.step()
    return bench, chats, newcomer, others


def test_a_newcomer_for_whom_nobody_else_waits_is_not_held_back():
    _, _, newcomer, _ = held_back(0)
    assert newcomer.allocation is not None


def test_where_waits_are_limited_a_newcomer_is_not_held_back():
    """Held past the limit it would be refused, with all that its client asks later."""
    _, _, newcomer, _ = held_back(2, max_queue_wait_s=1000.0)
    assert newcomer.allocation is not None


def test_known_chats_go_on_while_a_newcomer_is_held_back():
    bench, chats, newcomer, _ = held_back(2)
    assert newcomer.allocation is None, "the other chats are likely to go on"
    follow_up = bench.submit(chats[1], max_tokens=2)
    bench.step()
    bench.step()
    bench.step()
    assert follow_up.report is not None
    assert follow_up.report.reused > 200
    assert newcomer.allocation is None


def steps_held_back(num_others):
    """Returns the number of steps until a newcomer begins, and what it displaces just before."""
    bench, _, newcomer, others = held_back(num_others)
    for other in others:
        other.queued_s = 1e9  # never its turn
    num_steps, displaced = 1, 0.0
    while newcomer.report is None:
        displaced = bench.cache.displaced(bench.cache.match(newcomer.chain))
        bench.step()
        num_steps += 1
    return num_steps, displaced


def test_a_newcomer_waits_as_long_as_all_who_wait_lose_by_what_it_displaces():
    """A step takes a second, a token a hundredth; what it displaces is some 300 tokens."""
    for num_waiting in (3, 9):
        num_steps, displaced = steps_held_back(num_waiting - 1)
        assert 200 < displaced < 320
        assert abs(num_steps - displaced / 100 * num_waiting) <= 3


def test_newcomers_that_displace_something_come_one_at_a_time():
    """The time that one has waited counts from when the one before displaced something."""
    bench, _, newcomer, (second, *_) = held_back(4)
    second.queued_s = newcomer.queued_s
    begun = {}
    for num_steps in range(60):
        for request in (newcomer, second):
            if request.report is not None:
                begun.setdefault(request, num_steps)
        bench.step()
    assert len(begun) == 2
    assert abs(begun[newcomer] - begun[second]) > 5


@pytest.mark.parametrize(("priority", "is_admitted"), [(-1, True), (0, False)])
def test_who_is_more_urgent_than_one_that_runs_does_not_wait(priority, is_admitted):
    """Of those that run one may be more urgent still."""
    bench, chats = full_of_chats()
    for number, other in enumerate((-5, 0)):
        bench.submit(chats[number], max_tokens=300, priority=other)
    bench.step()
    set_pace(bench, 1 / 100)
    newcomer = bench.submit(tokens(300, 9), max_tokens=2, priority=priority)
    for seed in range(10, 14):
        bench.submit(tokens(500, seed), max_tokens=2)
    bench.step()
    assert (newcomer.allocation is not None) is is_admitted


def test_a_newcomer_is_hardly_held_back_while_few_prompts_are_computed():
    """What it displaces is computed again at nobody's expense."""
    bench, _, newcomer, _ = held_back(9)
    bench.scheduler._admission.busy_share = 0.05
    newcomer.blocked_at = None
    for _ in range(3):
        bench.step()
    assert newcomer.report is not None


def test_how_busy_the_machine_is_follows_its_steps():
    bench, _ = full_of_chats()
    admission = bench.scheduler._admission
    for _ in range(40):
        admission.ran(0, 2.0)
    assert admission.busy_share < 0.1
    for _ in range(40):
        admission.ran(4096, 2.0)
    assert admission.busy_share > 0.9
    assert abs(admission.token_s - 2.0 / 4096) < 1e-4


def test_no_client_waits_for_longer_than_it_may(monkeypatch):
    """However much a newcomer displaces, and however many wait."""
    monkeypatch.setattr("milepost.scheduler.admission.MAX_HOLD_BACK_S", 20.0)
    bench, _, newcomer, _ = held_back(30)
    set_pace(bench, 100.0)
    newcomer.blocked_at = None
    bench.step()
    assert newcomer.held_until_s == newcomer.queued_s + 20.0
    num_steps = 1
    while newcomer.report is None:
        bench.step()
        num_steps += 1
    assert 15 <= num_steps <= 22


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
