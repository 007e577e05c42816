"""Clients that give up and try again, engines that refuse them, and made-up traffic."""

from math import inf

import pytest

from milepost.cache import Cache
from milepost.simulator.clients import Clients, Patience
from milepost.simulator.cost import read_cost
from milepost.simulator.fleet import EngineLimits
from milepost.simulator.made import MADE, make_trace
from milepost.simulator.policies import POLICIES
from milepost.simulator.seeds import faster
from tests.simulator.traces import Maker, one_engine

COST = read_cost("hybrid-35b-a3b-h200")


def sessions(num, num_turns=2, **options):
    maker = Maker()
    for number in range(num):
        pages = maker.pages(20)
        for turn in range(num_turns):
            fields = {"session": f"{number}", "think_s": 1.0, "arrival_s": 100.0 * turn} | options
            maker.ask(list(pages), **fields)
            pages += maker.pages(3)
    return maker.trace()


def clients(trace, **patience):
    return Clients(trace, closed=True, patience=Patience(**patience))


def test_a_client_tries_again_after_pauses_that_double_and_then_ends_its_session():
    own = clients(sessions(1), timeout_s=10.0)
    sent = []
    while own.next_s < inf:
        now_s = own.next_s
        own.timed_out(now_s)
        sent += [now_s for _ in own.due(now_s)]
    assert sent == [0.0, 10.5, 21.5]
    asked = own.asked
    assert (asked.num_asked, asked.num_retries, asked.num_given_up) == (1, 2, 1)


def test_a_client_comes_again_when_a_refusal_says_unless_that_is_long():
    own = clients(sessions(1), max_retries=2)
    assert own.due(0.0) == [0]
    own.refused(0, 0.0, 7.0)
    assert (own.due(6.9), own.due(7.0)) == ([], [0])
    own.refused(0, 7.0, 300.0)
    assert own.due(8.0) == [0], "a second after the first retry"
    own.begun(0, 9.0)
    assert own.asked.ttft_s == [9.0], "from the question, retries included"
    assert (own.asked.num_within(8.9), own.asked.num_within(9.0)) == (0, 1)
    own.done(0, 20.0)
    assert own.due(20.9) == []
    assert own.due(21.0) == [1], "its session goes on"


def test_each_try_has_its_own_time():
    own = clients(sessions(1), timeout_s=10.0)
    own.due(0.0)
    own.refused(0, 1.0, 5.0)
    assert own.due(6.0) == [0]
    assert own.timed_out(10.0) == [], "that was the first try's"
    assert own.timed_out(16.0) == [0]


def test_an_answer_that_has_begun_is_not_given_up():
    own = clients(sessions(1), timeout_s=10.0)
    own.due(0.0)
    own.begun(0, 9.0)
    assert own.timed_out(11.0) == []
    assert own.asked.num_given_up == 0


def crowd(limits, patience=None):
    """60 prompts at once of 1,281 tokens each, one at a time, with answers of 100 tokens."""
    trace = sessions(60, num_turns=1, output_length=100, arrival_s=0.0)
    cache = Cache(num_pages=2000, num_slots=80, page_size=64)
    found = one_engine(trace, cache, COST, closed=True, limits=limits, patience=patience).run()
    assert not cache.allocations
    assert not found.only.scheduler.has_work
    return found


def test_clients_that_give_up_free_what_they_held_and_are_counted():
    patient = crowd(EngineLimits(max_num_seqs=1))
    assert len(patient.ttft_s) == 60
    found = crowd(EngineLimits(max_num_seqs=1), Patience(timeout_s=2.0, max_retries=1))
    asked = found.asked
    assert len(found.ttft_s) + asked.num_given_up == asked.num_asked == 60
    assert asked.num_given_up > 30
    assert found.end_s < 5.0 < patient.end_s


def test_an_engine_that_limits_the_wait_serves_nobody_later():
    """Whoever is told to come again comes later, and then the first are done."""
    limits = EngineLimits(max_num_seqs=1, max_queue_wait_s=1.0)
    found = crowd(limits, Patience(max_retries=20))
    asked, stats = found.asked, found.only.scheduler.stats
    assert asked.num_refusals == stats.num_refused_early + stats.num_ended_late > 0
    assert stats.num_refused_early > stats.num_ended_late, "most are told at once"
    assert len(found.ttft_s) + asked.num_given_up == 60
    assert len(found.ttft_s) > 50


def test_more_load_moves_the_starts_and_keeps_the_pauses():
    trace = make_trace("agents+chats", 9)
    twice = faster(trace, 2.0)
    for session in {r.session for r in trace.requests}:
        before = [r.arrival_s for r in trace.requests if r.session == session]
        after = [r.arrival_s for r in twice.requests if r.session == session]
        assert after[0] == pytest.approx(before[0] / 2)
        assert [b - after[0] for b in after] == pytest.approx([b - before[0] for b in before])
    arrivals = [r.arrival_s for r in twice.requests]
    assert arrivals == sorted(arrivals)
    assert faster(trace, 1.0) is trace


@pytest.mark.parametrize("name", MADE)
def test_made_up_traffic_is_the_same_again_and_shares_its_prompts(name):
    trace, again = (make_trace(name, 12) for _ in range(2))
    assert [r.page_ids for r in trace.requests] == [r.page_ids for r in again.requests]
    assert len({r.session for r in trace.requests}) == 12
    assert 0.5 < trace.bound() < 1
    trace.link_answers()
    assert any(request.answer_ids for request in trace.requests)
    assert make_trace(name, 12, seed=1).requests[0].page_ids != trace.requests[0].page_ids


@pytest.mark.parametrize("name", MADE)
def test_the_bound_counts_answers_and_no_replay_comes_above_it(name):
    """With memory for everything; a state may lie inside a page, at the end of an answer."""
    trace = make_trace(name, 12)
    prompts_alone = trace.bound()
    trace.link_answers()
    assert trace.bound() > prompts_alone
    cache = POLICIES["auto"].memory(COST, num_pages=10_000, num_slots=2000, page_size=64)
    one_engine(trace, cache, COST, closed=True).run()
    reused = cache.stats.hits / cache.stats.queries
    assert 0.95 * trace.bound() < reused <= trace.bound()
