"""When a step can be planned before the tokens of the one before it are known."""

from __future__ import annotations

import pytest

from milepost.cache import Cache
from milepost.scheduler.request import FinishReason
from milepost.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, Loop, cold_answer, make_request


def loop_of(*, num_pages: int = 32, num_slots: int = 8, mode: str = "auto", **options) -> Loop:
    cache = Cache(num_pages=num_pages, num_slots=num_slots, page_size=16, mode=mode, block_size=64)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 128} | options
    return Loop(Scheduler(cache, **options), FakeRunner(page_size=16))


def add(loop: Loop, id_: str, prompt: list[int], **options):
    request = make_request(loop.scheduler.cache, id_, prompt, **options)
    loop.scheduler.add(request)
    return request


def is_ahead(plan) -> list[bool]:
    return [sequence.is_ahead for sequence in plan.sequences]


def test_decodes_follow_until_the_answers_are_long_enough():
    loop = loop_of()
    short, long = add(loop, "a", [1] * 20, max_tokens=3), add(loop, "b", [2] * 20, max_tokens=5)
    plans = []
    while loop.scheduler.has_work:
        plans.append(is_ahead(loop.step(is_ahead=True)))
    assert plans == [[False] * 2, [True] * 2, [True] * 2, [True], [True]]
    assert short.output_token_ids == cold_answer([1] * 20, 3, 4)
    assert long.output_token_ids == cold_answer([2] * 20, 5, 4)


def test_a_prefill_under_way_is_not_followed():
    loop = loop_of(max_num_batched_tokens=64)
    add(loop, "a", [1] * 100)
    assert loop.scheduler.follow(loop.scheduler.schedule()) is None


def test_a_request_that_could_be_admitted_is_planned_for_first():
    loop = loop_of()
    add(loop, "a", [1] * 20, max_tokens=8)
    loop.step(is_ahead=True)
    assert loop.under_way is not None
    add(loop, "b", [2] * 20, max_tokens=8)
    loop.step(is_ahead=True)
    assert loop.under_way is None
    assert [s.request.id for s in loop.step(is_ahead=True).sequences] == ["a", "b"]


def test_states_of_answers_are_not_planned_ahead():
    loop = loop_of(mode="all")
    add(loop, "a", [1] * 20)
    assert loop.scheduler.follow(loop.scheduler.schedule()) is None


def test_memory_that_is_missing_is_found_by_a_planned_step():
    loop = loop_of(num_pages=4, num_slots=2)
    first = add(loop, "a", [1] * 30, max_tokens=30)
    second = add(loop, "b", [2] * 15, max_tokens=30)
    while loop.scheduler.has_work:
        loop.step(is_ahead=True)
    assert first.num_preemptions + second.num_preemptions > 0
    assert first.output_token_ids == cold_answer([1] * 30, 30, 4)
    assert second.output_token_ids == cold_answer([2] * 15, 30, 4)


@pytest.mark.parametrize("ends_itself", [True, False])
def test_what_ended_keeps_its_memory_until_the_step_ahead_is_over(ends_itself):
    loop = loop_of()
    prompt = [1] * 20
    answer = cold_answer(prompt, 8, 4)
    request = add(loop, "a", prompt, max_tokens=8)
    other = add(loop, "b", [2] * 20, max_tokens=8)
    if ends_itself:
        request.stop_token_ids = frozenset(answer[:1])
    loop.step(is_ahead=True)
    if not ends_itself:
        loop.scheduler.finish("a", FinishReason.STOP)
    assert request.finish_reason is FinishReason.STOP
    assert request.lease is not None
    loop.step(is_ahead=True)
    assert request.lease is None
    # The token that ended it was consumed: the state is behind it.
    follow_up = loop.scheduler.cache.chain([*prompt, answer[0], 3])
    assert loop.scheduler.cache.match(follow_up).state_length == len(prompt) + 1
    while loop.scheduler.has_work:
        loop.step(is_ahead=True)
    assert other.output_token_ids == cold_answer([2] * 20, 8, 4)
