"""Steps that verify drafts: whatever is proposed, answers are those of the model alone, and nothing
that is cached is lost.
"""

from __future__ import annotations

import pytest

from milepost.cache import Cache
from milepost.scheduler.request import FinishReason
from milepost.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, cold_answer, make_request, step
from tests.invariants import check

PAGE_SIZE = 16
PROMPT = [1, 2, 3] * 9


class Bench:
    """One request with a long answer, some steps into it."""

    def __init__(self, *, max_tokens=40, num_pages=40, budget=128, num_others=0, lookahead=0):
        self.cache = Cache(num_pages=num_pages, num_slots=6, page_size=PAGE_SIZE)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            num_lookahead_tokens=lookahead,
        )
        self.runner = FakeRunner(self.scheduler, page_size=PAGE_SIZE)
        self.answer = cold_answer(PROMPT, max_tokens, self.runner.vocab_size)
        self.request = self.add("a", PROMPT, max_tokens)
        self.others = [self.add(f"o{n}", [n] * 20, max_tokens) for n in range(num_others)]
        self.step()

    def add(self, id_, prompt, max_tokens):
        request = make_request(self.cache, id_, prompt, max_tokens=max_tokens)
        self.scheduler.add(request)
        return request

    def propose(self, num, wrong_at=None):
        """What comes next, with a mistake."""
        first = self.request.num_output_tokens
        drafts = self.answer[first : first + num]
        drafts += [0] * (num - len(drafts))
        if wrong_at is not None:
            drafts[wrong_at] = (drafts[wrong_at] + 1) % self.runner.vocab_size
        self.scheduler.propose(self.request, drafts)

    def step(self):
        before = self.request.num_output_tokens
        step(self.scheduler, self.runner)
        assert self.request.output_token_ids == self.answer[: self.request.num_output_tokens]
        return self.request.num_output_tokens - before

    def finish(self):
        while self.scheduler.has_work:
            self.step()
        assert self.cache.pages.num_used == self.cache.slots.num_used == 0


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3, None])
def test_a_step_yields_the_drafts_before_the_first_mistake_and_one_more(wrong_at):
    bench = Bench()
    bench.propose(4, wrong_at)
    assert bench.step() == (4 if wrong_at is None else wrong_at) + 1
    bench.propose(4, wrong_at)
    bench.step()
    bench.finish()
    assert bench.request.output_token_ids == bench.answer


@pytest.mark.parametrize("max_tokens", range(2, 9))
def test_the_answers_end_is_kept_wherever_in_a_run_it_falls(max_tokens):
    """Its last tokens are folded in first, by a step that computes nothing."""
    bench = Bench(max_tokens=max_tokens)
    while bench.request.finish_reason is None:
        bench.propose(3)
        bench.step()
    bench.finish()
    following = bench.cache.chain([*PROMPT, *bench.answer, 0])
    assert bench.cache.match(following).state_length >= len(PROMPT) + max_tokens - 1


def test_drafts_that_no_longer_stand_are_not_verified():
    bench = Bench()
    bench.propose(4)
    drafts = bench.request.drafts
    bench.step()
    bench.request.drafts = drafts
    assert bench.step() == 1
    assert bench.scheduler.stats.num_draft_tokens == 4
    bench.finish()


def test_an_answer_has_no_more_drafts_than_tokens_left_and_none_at_its_last():
    bench = Bench(max_tokens=4)
    bench.propose(9)
    assert bench.step() == 3
    assert bench.scheduler.stats.num_draft_tokens == 2
    assert bench.request.finish_reason is FinishReason.LENGTH


def test_drafts_take_what_the_step_has_left():
    bench = Bench(budget=64, num_others=1)
    bench.add("long", [3] * 60, 4)
    bench.propose(20)
    plan = bench.scheduler.schedule()
    assert plan.num_tokens <= 64
    drafting = next(s for s in plan.sequences if s.num_drafts)
    assert drafting.number == bench.request.number
    assert drafting.num_drafts == 64 - 60 - 2
    bench.scheduler.update(plan, bench.runner.run(plan))
    bench.finish()


def test_others_run_ahead_of_a_request_whose_drafts_are_verified():
    bench = Bench(num_others=1)
    bench.propose(3)
    plan = bench.scheduler.schedule()
    follow = bench.scheduler.follow(plan)
    assert [s.number for s in follow.sequences] == [bench.others[0].number]
    outcomes = [bench.runner.run(plan), bench.runner.run(follow)]
    bench.scheduler.update(plan, outcomes[0])
    bench.scheduler.update(follow, outcomes[1])
    check(bench.cache)
    assert bench.request.output_token_ids == bench.answer[:5]
    bench.finish()


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_request_that_is_aborted_leaves_what_is_final(is_under_way):
    bench = Bench()
    bench.propose(4, 2)
    plan = bench.scheduler.schedule()
    if is_under_way:
        bench.scheduler.finish(bench.request, FinishReason.ABORT)
    bench.scheduler.update(plan, bench.runner.run(plan))
    if not is_under_way:
        bench.scheduler.finish(bench.request, FinishReason.ABORT)
    bench.finish()
    num_final = len(PROMPT) + (1 if is_under_way else 3)
    following = bench.cache.chain([*PROMPT, *bench.answer])
    assert bench.cache.match(following).state_length == num_final


def test_page_tables_reach_ahead_for_drafts_to_come():
    """As far as the answer may go, and not further."""
    bench = Bench(lookahead=3)
    longest = len(PROMPT) + 40
    while bench.request.allocation is not None:
        reach = min(bench.request.num_computed_tokens + 3, longest)
        table = bench.request.allocation.page_table
        assert len(table) == -(-reach // PAGE_SIZE)
        bench.propose(1)
        bench.step()


def test_nobody_gives_way_to_drafts_to_come():
    """Two requests that fit to the last page."""
    bench = Bench(max_tokens=37, num_pages=8, num_others=1, lookahead=16)
    bench.finish()
    assert bench.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_that_is_over_gives_nobody_its_memory_before_its_end_is_folded_in(is_aborted):
    """Another request needs a page that is not there, in the step that folds; it waits for it."""
    cache = Cache(num_pages=4, num_slots=6, page_size=PAGE_SIZE)
    scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=128)
    runner = FakeRunner(scheduler, page_size=PAGE_SIZE)
    grows = make_request(cache, "grows", [1] * 31, max_tokens=12)
    ends = make_request(cache, "ends", [2] * 20, max_tokens=9 if is_aborted else 5)
    for request in (grows, ends):
        scheduler.add(request)
    step(scheduler, runner)
    scheduler.propose(ends, cold_answer([2] * 20, 5, runner.vocab_size)[1:4])
    step(scheduler, runner)
    if is_aborted:
        scheduler.finish(ends, FinishReason.ABORT)
    assert ends.finish_reason is not None
    assert ends in scheduler.running, "its end is to be folded in"
    step(scheduler, runner)
    assert ends not in [*scheduler.waiting, *scheduler.running]
    assert ends.num_preemptions == 0
    follow_up = cache.chain([*[2] * 20, *ends.output_token_ids, 0])
    assert cache.match(follow_up).state_length >= 24
    while scheduler.has_work:
        step(scheduler, runner)
    assert grows.output_token_ids == cold_answer([1] * 31, 12, runner.vocab_size)
