"""When a step can be planned before the tokens of the one before it are known."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from milepost.cache import Cache
from milepost.cache.memory import UnifiedPool
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.request import FinishReason
from milepost.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, Loop, cold_answer, make_request
from tests.invariants import check
from tests.scheduler.oracle import OracleSource


def loop_of(*, num_pages: int = 32, num_slots: int = 8, mode: str = "auto", **options) -> Loop:
    cache = Cache(num_pages=num_pages, num_slots=num_slots, page_size=16, mode=mode, block_size=64)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 128} | options
    scheduler = Scheduler(cache, **options)
    return Loop(scheduler, FakeRunner(scheduler, page_size=16))


def add(loop: Loop, id_: str, prompt: list[int], **options):
    request = make_request(loop.scheduler.cache, id_, prompt, **options)
    loop.scheduler.add(request)
    return request


def run(loop: Loop) -> None:
    while loop.scheduler.has_work:
        loop.step(is_ahead=True)


def ask(loop: Loop, id_: str, prompt: list[int], **options):
    request = add(loop, id_, prompt, **options)
    run(loop)
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


def test_the_next_chunk_of_a_prefill_follows():
    """It stands behind what is planned, reads the state that is being written, and copies
    nothing; the decode behind the last chunk follows too.
    """
    loop = loop_of(max_num_batched_tokens=64)
    ask(loop, "z", [1] * 30, max_tokens=2, marks=(24,))
    request = add(loop, "a", [1] * 150, max_tokens=8)
    plans = [loop.step(is_ahead=True) for _ in range(4)]
    (first, *others) = [plan.sequences[0] for plan in plans]
    assert [(s.start, s.end) for s in (first, *others)] == [
        (24, 64),
        (64, 128),
        (128, 150),
        (150, 151),
    ]
    assert first.slot_in != first.slot_out
    assert first.page_copy is not None
    assert all(s.slot_in == s.slot_out == first.slot_out for s in others)
    assert all(s.page_copy is None for s in others)
    assert [s.is_ahead for s in (first, *others)] == [False] * 3 + [True]
    run(loop)
    assert request.output_token_ids == cold_answer([1] * 150, 8, 4)


def test_decodes_and_prefills_follow_together():
    """Sequences whose token is not known yet stand first."""
    loop = loop_of(max_num_batched_tokens=128)
    short, long = add(loop, "a", [1] * 20, max_tokens=9), add(loop, "b", [2] * 300, max_tokens=9)
    plans = [loop.step(is_ahead=True) for _ in range(4)]
    assert [[(s.number, s.is_ahead) for s in plan.sequences] for plan in plans] == [
        [(short.number, False), (long.number, False)],
        [(short.number, True), (long.number, False)],
        [(short.number, True), (long.number, False)],
        [(short.number, True), (long.number, False)],
    ]
    run(loop)
    assert short.output_token_ids == cold_answer([1] * 20, 9, 4)
    assert long.output_token_ids == cold_answer([2] * 300, 9, 4)


def test_a_waiting_request_is_admitted_ahead():
    loop = loop_of()
    first = add(loop, "a", [1] * 20, max_tokens=8)
    loop.step(is_ahead=True)
    second = add(loop, "b", [2] * 20, max_tokens=8)
    loop.step(is_ahead=True)
    assert [s.number for s in loop.step(is_ahead=True).sequences] == [0, 1]
    run(loop)
    assert first.output_token_ids == cold_answer([1] * 20, 8, 4)
    assert second.output_token_ids == cold_answer([2] * 20, 8, 4)


def test_one_that_ends_for_certain_leaves_its_seat_to_the_step_ahead():
    loop = loop_of(max_num_seqs=1)
    add(loop, "a", [1] * 20, max_tokens=2)
    add(loop, "b", [2] * 20, max_tokens=2)
    plans = []
    while loop.scheduler.has_work:
        plans.append([s.number for s in loop.step(is_ahead=True).sequences])
    assert plans == [[0], [0], [1], [1]]


def test_a_prefix_in_flight_is_waited_for_and_not_computed_twice():
    """Also where the step that passes it is planned, so that its state can't be asked for: then KV
    at least is shared.
    """
    loop = loop_of(num_pages=64)
    shared = [random.Random(3).randrange(4) for _ in range(230)]
    request = add(loop, "a", shared, max_tokens=3)
    loop.step(is_ahead=True)
    assert request.allocation.planned == 230, "in flight"
    other = add(loop, "b", [*shared[:200], 9, 9], max_tokens=3)
    run(loop)
    assert other.report.kv_length == 192
    assert loop.scheduler.stats.num_waits == 1


def test_an_answer_about_to_be_kept_is_waited_for():
    """A request has ended, and the step in flight takes its state one token further: who goes on
    from there finds it a step later."""
    loop = loop_of(num_pages=64)
    prompt = [1] * 40
    answer = cold_answer(prompt, 8, 4)
    first = add(loop, "a", prompt, max_tokens=30)
    first.stop_token_ids, first.min_tokens = frozenset(answer[7:8]), 8
    add(loop, "b", [2] * 20, max_tokens=30)
    while first.finish_reason is None:
        loop.step(is_ahead=True)
    assert first.allocation is not None
    turn = add(loop, "c", [*prompt, *answer, 3, 3], max_tokens=2)
    run(loop)
    assert turn.report.reused == len(prompt) + len(answer)


@pytest.mark.parametrize("mode", ["align", "auto"])
def test_waiting_requests_begin_however_long_others_decode(mode):
    """In mode `align` nobody waits for a prefix in flight, so a step is planned for them."""
    loop = loop_of(mode=mode, num_pages=64)
    add(loop, "a", [1] * 20, max_tokens=200)
    loop.step(is_ahead=True)
    second = add(loop, "b", [2] * 20, max_tokens=2)
    for _ in range(3):
        loop.step(is_ahead=True)
    assert second.report is not None


def test_in_mode_align_a_request_begins_once_the_prefix_in_flight_is_cached():
    """Beside the step that computes it, the request would compute it a second time."""
    loop = loop_of(mode="align", num_pages=64, max_num_batched_tokens=256)
    shared = [random.Random(3).randrange(4) for _ in range(130)]
    add(loop, "a", shared)
    plan = loop.scheduler.schedule()
    result = loop.runner.run(plan)
    other = add(loop, "b", [*shared, 9])
    assert loop.scheduler.follow(plan) is None
    loop.scheduler.update(plan, result)
    run(loop)
    assert other.report.reused == 128


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
        loop.scheduler.finish(request, FinishReason.STOP)
    assert request.finish_reason is FinishReason.STOP
    assert request.allocation is not None
    loop.step(is_ahead=True)
    assert request.allocation is None
    # The token that ended it was consumed: the state is behind it.
    follow_up = loop.scheduler.cache.chain([*prompt, answer[0], 3])
    assert loop.scheduler.cache.match(follow_up).state_length == len(prompt) + 1
    while loop.scheduler.has_work:
        loop.step(is_ahead=True)
    assert other.output_token_ids == cold_answer([2] * 20, 8, 4)


# --- two steps taken back -------------------------------------------------------------------------


def busy_unified_pool(seed: int, longest: int = 20) -> Loop:
    """One memory, so small that pages are moved now and then; answers up to `longest` tokens."""
    cache = Cache(storage=UnifiedPool(14, 3), page_size=16)
    scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=128)
    loop = Loop(scheduler, FakeRunner(scheduler, page_size=16, pages_each=3))
    rng = random.Random(seed)
    known = [[0]]
    for number in range(40):
        base = rng.choice(known)
        own = rng.choices(range(4), k=rng.randint(1, 90))
        known.append([*base[: rng.randint(0, 150)], *own])
        add(loop, f"r{number}", known[-1], max_tokens=rng.randint(1, longest))
    return loop


def steps_whose_followers_move_pages(loop: Loop) -> Iterator[StepPlan]:
    """Plans that move no pages, while the step planned behind each does."""
    scheduler, runner = loop.scheduler, loop.runner
    while scheduler.has_work:
        plan = scheduler.schedule()
        result = runner.run(plan)
        behind = scheduler.follow(plan)
        if behind is not None and behind.moves and not plan.moves:
            yield plan
            continue
        taken = [(plan, result)]
        if behind is not None:
            taken.append((behind, runner.run(behind)))
        for step in taken:
            scheduler.update(*step)


def test_moves_of_the_step_ahead_may_be_half_done_when_both_are_taken_back():
    found = 0
    for seed in range(6):
        loop = busy_unified_pool(seed)
        for plan in steps_whose_followers_move_pages(loop):
            loop.scheduler.roll_back(plan)
            check(loop.scheduler.cache)
            assert not loop.scheduler.running
            assert not loop.scheduler.cache.tree.nodes, "nobody knows what is where"
            found += 1
    assert found >= 3


def copies_beside_steps(loop: Loop, source: OracleSource) -> Iterator[tuple[StepPlan, StepPlan]]:
    """Plans that move no pages, each with copies alone that were planned beside it and do."""
    scheduler, runner = loop.scheduler, loop.runner
    while scheduler.has_work:
        plan = scheduler.schedule()
        result = runner.run(plan)
        source.launch(plan)
        beside = scheduler.follow(plan) if plan.sequences else None
        if beside is not None and beside.only_copies and beside.moves and not plan.moves:
            yield plan, beside
            continue
        taken = [(plan, result)] if plan.sequences else []
        if beside is not None:
            taken.append((beside, runner.run(beside)))
            source.launch(beside)
        for step in taken:
            if step[0].sequences:
                scheduler.update(*step)
        for number in list(source.under_way):
            source.bring(number)


def test_moves_of_copies_planned_beside_a_step_may_be_half_done_when_it_is_taken_back():
    """The step itself moves nothing, and only it is taken back."""
    found = 0
    for seed in range(24):
        loop = busy_unified_pool(seed, longest=1)
        source = OracleSource(loop.runner, random.Random(seed), share=0.9)
        loop.scheduler.outside.add_source(source)
        for plan, _ in copies_beside_steps(loop, source):
            for number in [*source.begun, *source.under_way]:
                source.lose(number)
            loop.scheduler.roll_back(plan)
            check(loop.scheduler.cache)
            assert not loop.scheduler.running
            assert not loop.scheduler.cache.tree.nodes, "nobody knows what is where"
            found += 1
    assert found >= 2


def test_both_steps_are_taken_back_together():
    """Also a request that only the second computes for, and what both export."""
    loop = loop_of(max_num_batched_tokens=128, num_pages=64)
    first = add(loop, "a", [1] * 200, max_tokens=4, marks=(64, 192))
    plan = loop.scheduler.schedule()
    second = add(loop, "b", [2] * 20, max_tokens=4)
    behind = loop.scheduler.follow(plan)
    assert sorted(s.number for s in behind.sequences) == [0, 1]
    assert len(first.allocation.exports) == 2
    loop.scheduler.roll_back(plan)
    check(loop.scheduler.cache)
    assert first.allocation is second.allocation is None
    assert loop.scheduler.cache.slots.num_used == 0
    run(loop)
    assert first.output_token_ids == cold_answer([1] * 200, 4, 4)
    assert second.output_token_ids == cold_answer([2] * 20, 4, 4)


def test_one_that_computes_in_neither_step_goes_on():
    loop = loop_of(max_num_batched_tokens=64, num_pages=64)
    patient = add(loop, "a", [1] * 300, max_tokens=4, priority=1)
    loop.step(is_ahead=False)
    urgent = add(loop, "b", [2] * 300, max_tokens=4)
    plan = loop.scheduler.schedule()
    loop.scheduler.follow(plan)
    loop.scheduler.roll_back(plan)
    check(loop.scheduler.cache)
    assert urgent.allocation is None
    assert patient.allocation is not None
    run(loop)
    assert patient.output_token_ids == cold_answer([1] * 300, 4, 4)


def test_an_abort_during_a_step_ahead_keeps_what_the_step_uses():
    loop = loop_of(max_num_batched_tokens=64, num_pages=64)
    request = add(loop, "a", [1] * 300, max_tokens=4)
    loop.step(is_ahead=True)
    other = add(loop, "b", [2] * 20, max_tokens=4)
    loop.scheduler.finish(request, FinishReason.ABORT)
    assert request.allocation is not None
    loop.step(is_ahead=True)
    assert request.allocation is None
    run(loop)
    assert other.output_token_ids == cold_answer([2] * 20, 4, 4)
    chain = loop.scheduler.cache.chain([1] * 300)
    assert loop.scheduler.cache.match(chain).state_length == 128
