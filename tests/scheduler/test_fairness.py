"""Nobody starves: every request is admitted, and whatever runs computes, within bounds that no load
moves.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.cache import Cache
from milepost.errors import ConfigError
from milepost.scheduler.admission import MAX_BYPASSED
from milepost.scheduler.budget import MAX_IDLE_STEPS
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler
from tests.fakes import make_request, outcome

GRID = 64

MAX_STEPS = 60
"""Of a second each, for which others may go first here."""


@pytest.fixture(autouse=True, scope="module")
def hold_back_for_steps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("milepost.scheduler.admission.MAX_HOLD_BACK_S", float(MAX_STEPS))
        yield


class Load:
    """A scheduler without a runner; each prompt has tokens of its own, unless they are given."""

    def __init__(self, *, budget: int, max_num_seqs: int, num_pages: int = 4096, slots: int = 600):
        self.cache = Cache(num_pages=num_pages, num_slots=slots, page_size=16)
        self.scheduler = Scheduler(
            self.cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self._num = 0

    def ask(self, num_tokens: int, **options) -> Request:
        self._num += 1
        own = self._num * 1_000_000
        request = make_request(self.cache, str(self._num), range(own, own + num_tokens), **options)
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        self.scheduler.update(plan, outcome(plan))
        return plan


def steps_until_admitted(load: Load, request: Request, num_short: int = 1) -> int:
    """With `num_short` short prompts more in each step."""
    for num_steps in range(2000):
        if request.report is not None:
            return num_steps
        for _ in range(num_short):
            load.ask(20, max_tokens=30)
        load.step()
    raise AssertionError("it starves")


@pytest.mark.parametrize(("budget", "num_decodes"), [(64, 4), (64, 63), (128, 100), (164, 100)])
def test_decodes_leave_room_for_a_long_prompt(budget, num_decodes):
    load = Load(budget=budget, max_num_seqs=num_decodes + 1)
    decodes = [load.ask(10, max_tokens=3000) for _ in range(num_decodes)]
    while any(request.num_output_tokens == 0 for request in decodes):
        load.step()
    before = [request.num_output_tokens for request in decodes]
    long = load.ask(2000, max_tokens=4)
    num_steps = steps_until_admitted(load, long, num_short=0)
    assert num_steps <= 2
    while long.num_output_tokens == 0:
        load.step()
        num_steps += 1
    assert num_steps <= 2 * (2000 / GRID + 2), "a grid step in one of two"
    progress = [r.num_output_tokens - b for r, b in zip(decodes, before, strict=True)]
    assert min(progress) >= num_steps // 2, "a token in one of two steps"


def test_short_prompts_do_not_pass_a_long_one_for_ever():
    load = Load(budget=128, max_num_seqs=12)
    for _ in range(8):
        load.ask(10, max_tokens=40)
    running = load.ask(1500, max_tokens=4)
    load.step()
    load.step()
    assert running.allocation is not None
    assert steps_until_admitted(load, load.ask(2000)) < 1500 / GRID + 60


def test_what_is_passed_over_for_want_of_tokens_ages():
    """One that was passed over for long enough holds the queue."""
    load = Load(budget=130, max_num_seqs=40)
    first = load.ask(60_000, max_tokens=4)
    load.step()
    assert first.allocation is not None
    load.ask(500)
    for _ in range(MAX_STEPS):
        short = load.ask(1, max_tokens=1)
        load.step()
        assert short.report is not None
    late = load.ask(1, max_tokens=1)
    load.step()
    assert late.allocation is late.report is None, "it waits behind the long one"


def test_it_ages_by_the_requests_that_go_first_too(monkeypatch):
    monkeypatch.setattr("milepost.scheduler.admission.MAX_HOLD_BACK_S", 1e9)
    load = Load(budget=130, max_num_seqs=40, num_pages=60, slots=100)
    load.ask(30, max_tokens=900)
    load.step()
    long = load.ask(930)
    for num_short in range(MAX_BYPASSED):
        assert long.num_bypasses == num_short
        load.ask(1, max_tokens=1)
        load.step()
    late = load.ask(1, max_tokens=1)
    load.step()
    assert late.report is None


def test_who_waits_again_ages_anew():
    """It was passed over for long before it ran; once it has been preempted others may pass it."""
    load = Load(budget=130, max_num_seqs=40)
    first = load.ask((MAX_STEPS + 2) * 128, max_tokens=1)
    load.step()
    long = load.ask(500)
    load.ask(1, max_tokens=1)
    while long.allocation is None:
        load.step()
    assert first.finish_reason is not None
    load.scheduler.roll_back(load.scheduler.schedule())
    urgent = load.ask(5000, priority=-1)
    shorts = [load.ask(1, max_tokens=1) for _ in range(2)]
    load.step()
    assert urgent.allocation is not None
    assert long.allocation is None
    assert all(short.report is not None for short in shorts)


@pytest.mark.parametrize("num_urgent", [1, 3])
def test_a_running_prefill_computes_whatever_is_more_urgent(num_urgent):
    load = Load(budget=128, max_num_seqs=8)
    patient = load.ask(3000, max_tokens=2, priority=1)
    load.step()
    idle, longest = 0, 0
    while patient.num_output_tokens == 0:
        while len(load.scheduler.waiting) < num_urgent:
            load.ask(500, max_tokens=2)
        plan = load.step()
        served = any(sequence.number == patient.number for sequence in plan.sequences)
        idle = 0 if served else idle + 1
        longest = max(longest, idle)
        assert idle <= MAX_IDLE_STEPS + 2 * 8
    assert longest >= MAX_IDLE_STEPS, "urgent ones go first"


def _num_tokens(plan: StepPlan) -> dict[int, int]:
    return {sequence.number: sequence.num_tokens for sequence in plan.sequences}


def test_an_urgent_prompt_goes_before_the_next_chunk_of_a_less_urgent_one():
    load = Load(budget=512, max_num_seqs=4, num_pages=20_000)
    slow = load.ask(200_000, max_tokens=2, priority=1)
    load.step()
    urgent = load.ask(60, max_tokens=2)
    plan = load.step()
    assert urgent.num_output_tokens == 1
    assert _num_tokens(plan) == {urgent.number: 60, slow.number: 448}


def test_running_prefills_are_served_by_priority():
    load = Load(budget=512, max_num_seqs=4, num_pages=20_000)
    slow = load.ask(5000, max_tokens=2, priority=1)
    load.step()
    urgent = load.ask(700, max_tokens=2)
    load.step()
    plan = load.step()
    assert _num_tokens(plan) == {urgent.number: 188, slow.number: 320}


def test_short_prompts_take_half_of_a_step_at_most_before_the_others():
    load = Load(budget=512, max_num_seqs=8, num_pages=20_000)
    long = load.ask(5000, max_tokens=2)
    load.step()
    shorts = [load.ask(num, max_tokens=2) for num in (100, 90, 80, 70)]
    first = {shorts[3].number: 70, shorts[2].number: 80, shorts[1].number: 90}
    assert _num_tokens(load.step()) == first | {long.number: 256}, "240 of 512, and 16 off the grid"
    assert shorts[0].report is None


def test_who_has_waited_longest_for_what_it_costs_goes_first():
    """Where something runs: one with twice as much to compute, but that has waited longer."""
    load = Load(budget=4096, max_num_seqs=2, num_pages=20_000)
    running, last = load.ask(10, max_tokens=40), load.ask(3000, max_tokens=12)
    load.step()
    long = load.ask(2200, max_tokens=1)
    for _ in range(8):
        load.step()
    shorts = [load.ask(1100, max_tokens=1) for _ in range(3)]
    while last.finish_reason is None:
        load.step()
    load.step()
    assert running.finish_reason is None
    assert long.report is not None
    assert all(request.report is None for request in shorts)


def test_where_nothing_runs_the_one_with_least_to_compute_begins():
    load = Load(budget=128, max_num_seqs=1, num_pages=20_000)
    long, short = load.ask(5000), load.ask(500)
    load.step()
    assert short.allocation is not None
    assert long.allocation is None


def test_equals_are_served_in_order_of_arrival():
    load = Load(budget=512, max_num_seqs=1, num_pages=20_000)
    first, second = load.ask(600), load.ask(600)
    load.step()
    assert second.allocation is None
    assert first.allocation is not None


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "named"),
    [
        (63, 4, "max_num_batched_tokens=63"),
        (100, 101, "max_num_batched_tokens=100 with max_num_seqs=101"),
    ],
)
def test_budgets_that_cannot_make_progress_are_refused(budget, max_num_seqs, named):
    with pytest.raises(ConfigError, match=named):
        Load(budget=budget, max_num_seqs=max_num_seqs)


def _num_steps(request: Request) -> int:
    """Steps for which a request may keep its seat."""
    return 2 * (request.num_tokens // GRID + 2) + 3 * request.max_tokens


@given(
    seed=st.integers(0, 2**32),
    budget=st.sampled_from([64, 70, 100, 130, 512]),
    max_num_seqs=st.integers(1, 12),
    num_pages=st.sampled_from([40, 80, 4096]),
    num_slots=st.sampled_from([2, 5, 600]),
)
@settings(max_examples=12)
def test_bounds_for_random_loads(seed, budget, max_num_seqs, num_pages, num_slots):
    """Prompts of 1 to 600 tokens keep coming, more than can be served. A running decode computes in
    one of two steps, a running prefill within MAX_IDLE_STEPS + 2 x max_num_seqs. A request is
    admitted before those ahead of it have had all their steps, MAX_STEPS have passed, and those
    that went before it in these have had theirs.
    """
    rng = random.Random(seed)
    load = Load(budget=budget, max_num_seqs=max_num_seqs, num_pages=num_pages, slots=num_slots)
    longest_answer = 30
    asked: list[Request] = []
    idle: dict[Request, int] = {}
    waited: dict[Request, int] = {}
    bounds: dict[Request, int] = {}
    for _ in range(150):
        if rng.random() < 0.3:
            num_tokens = rng.choice([1, 20, 63, 64, 300, 600])
            request = load.ask(num_tokens, max_tokens=rng.randint(1, longest_answer))
            ahead = [r for r in asked if r.finish_reason is None]
            bounds[request] = sum(map(_num_steps, ahead)) + MAX_STEPS
            asked.append(request)
        plan = load.step()
        served = {sequence.number for sequence in plan.sequences}
        for request in asked:
            if request.report is None:
                waited[request] = waited.get(request, 0) + 1
                if waited[request] == MAX_STEPS:
                    passed = [r for r in load.scheduler.running if r.number > request.number]
                    bounds[request] += sum(map(_num_steps, passed))
                assert waited[request] <= bounds[request]
            if request.allocation is None or request.number in served:
                idle[request] = 0
                continue
            idle[request] = idle.get(request, 0) + 1
            is_decode = request.num_left == 1
            assert idle[request] <= (1 if is_decode else MAX_IDLE_STEPS + 2 * max_num_seqs)
