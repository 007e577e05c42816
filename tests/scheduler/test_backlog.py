"""How long a request would wait, and which have waited too long. A step takes a second."""

import random
import re

import pytest

from milepost.errors import QueueWaitError
from milepost.scheduler.request import FinishReason
from tests.fakes import make_request
from tests.scheduler.test_peers import Bench

SERVICE_S = 10
"""Each request takes so many steps, one after the other."""


def tokens(num, seed):
    return random.Random(seed).choices(range(1000), k=num)


def queue_of(num_waiting, max_queue_wait_s, **options):
    """One seat, a rate that was measured over a minute, and requests that begin to wait now."""
    bench = Bench(max_num_seqs=1, max_queue_wait_s=max_queue_wait_s, num_slots=40, **options)
    for seed in range(6):
        bench.submit(tokens(60, seed), max_tokens=SERVICE_S)
    bench.run()
    for seed in range(10, 11 + num_waiting):
        bench.submit(tokens(60, seed), max_tokens=SERVICE_S)
        bench.step()
    return bench


def newcomer(bench, *, length=60, **options):
    return make_request(bench.cache, "new", tokens(length, 99), max_tokens=2, **options)


def refusal(bench, **options):
    with pytest.raises(QueueWaitError) as caught:
        bench.scheduler.check_wait(newcomer(bench, **options))
    return caught.value


def test_a_request_is_refused_if_those_before_it_take_too_long():
    """Two before it take 20 seconds, three 30."""
    bench = queue_of(2, 25.0)
    bench.scheduler.check_wait(newcomer(bench))
    bench = queue_of(3, 25.0)
    error = refusal(bench)
    wait_s = int(re.search(r"about (\d+) s", str(error))[1])
    assert 26 <= wait_s <= 31
    assert abs(error.retry_after_s - (wait_s - 25)) <= 1, "until the others take 25 s"
    assert bench.scheduler.stats.num_refused_early == 1


def test_without_the_setting_nobody_is_refused_or_ended():
    bench = queue_of(6, None)
    bench.scheduler.check_wait(newcomer(bench))
    assert not bench.scheduler.take_late()


def test_whoever_is_alone_in_the_queue_is_not_refused():
    bench = queue_of(0, 0.5)
    bench.scheduler.check_wait(newcomer(bench))


def test_a_short_request_passes_long_ones_and_an_urgent_one_all():
    """As the order of admissions has it: by the time waited for what a request costs."""
    bench = queue_of(0, 25.0, num_pages=2000)
    for seed in range(20, 26):
        bench.submit(tokens(4000, seed), max_tokens=SERVICE_S)
    assert refusal(bench, length=4000)
    bench.scheduler.check_wait(newcomer(bench, length=60))
    full = queue_of(4, 25.0)
    full.scheduler.check_wait(newcomer(full, priority=-1))
    assert refusal(full, priority=0)


def test_what_is_cached_of_a_request_does_not_count():
    """A conversation that goes on costs its last tokens, and passes those that cost more."""
    bench = queue_of(0, 25.0, num_pages=2000)
    chat = tokens(3000, 5)
    bench.ask(chat, max_tokens=4)
    for seed in range(20, 30):
        bench.submit(tokens(2000, seed), max_tokens=SERVICE_S)
    bench.scheduler.check_wait(make_request(bench.cache, "on", [*chat, 1, 2], max_tokens=2))
    assert refusal(bench, length=3000)


def test_those_that_have_waited_too_long_are_named_once_and_no_others():
    bench = Bench(max_num_seqs=1, max_queue_wait_s=12.5, num_slots=40)
    for seed in range(4):
        bench.submit(tokens(60, seed), max_tokens=SERVICE_S)
    late = []
    for step in range(60):
        if bench.scheduler.has_work:
            bench.step()
        for request, error in bench.scheduler.take_late():
            assert request.report is None
            assert error.retry_after_s >= 1
            bench.scheduler.finish(request, FinishReason.ABORT)
            late.append((step, request.id))
    assert late == [(12, "r3"), (12, "r4")], "the first two begin at 0 and 10"
    assert bench.scheduler.stats.num_ended_late == 2


def test_the_queue_is_read_once_for_all_that_are_late(monkeypatch):
    """Ending a full queue in one step takes time in proportion to its length."""
    num_late = 100
    bench = Bench(max_num_seqs=1, max_queue_wait_s=12.5, num_slots=40)
    for seed in range(1 + num_late):
        bench.submit(tokens(60, seed), max_tokens=4 * SERVICE_S)
    for _ in range(13):
        bench.step()
    num_costs, num_matches = 0, 0
    num_left, match = bench.scheduler.waiting.num_left, bench.cache.match

    def count_costs(request):
        nonlocal num_costs
        num_costs += 1
        return num_left(request)

    def count_matches(*arguments):
        nonlocal num_matches
        num_matches += 1
        return match(*arguments)

    monkeypatch.setattr(bench.scheduler.waiting, "num_left", count_costs)
    monkeypatch.setattr(bench.cache, "match", count_matches)
    assert len(bench.scheduler.take_late()) == num_late
    assert num_costs == 2 * num_late, "once to put it in line, and once to find its place"
    assert not num_matches


def test_the_latest_of_many_that_are_late_are_told_to_wait_for_those_before_them():
    """Each takes 10 seconds, and all that are late might come again."""
    bench = queue_of(5, 25.0)
    while not (late := bench.scheduler.take_late()):
        bench.step()
    (request, error) = late[0]
    others = len(bench.scheduler.waiting) - 1
    assert request in list(bench.scheduler.waiting)
    assert abs(error.retry_after_s - others * SERVICE_S) <= SERVICE_S / 2


def test_a_request_that_was_preempted_is_not_late():
    """It has begun: its client has tokens."""
    bench = Bench(max_num_seqs=4, max_queue_wait_s=0.5, num_pages=20, num_slots=8)
    requests = [bench.submit(tokens(60, seed), max_tokens=60) for seed in range(3)]
    while not bench.scheduler.stats.num_preemptions:
        bench.step()
    bench.step()
    bench.step()
    assert any(request.reservation is not None for request in requests), "one waits again"
    assert not bench.scheduler.take_late()


def test_the_rate_is_that_of_the_last_half_minute():
    """Requests of 10 seconds, then of 3: the estimate follows."""
    bench = queue_of(3, 25.0)
    assert refusal(bench)
    for seed in range(40, 60):
        bench.submit(tokens(60, seed), max_tokens=3)
        for _ in range(3):
            bench.step()
    while len(bench.scheduler.waiting) > 3:
        bench.step()
    bench.scheduler.check_wait(newcomer(bench))
