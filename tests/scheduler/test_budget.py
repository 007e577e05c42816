"""The tokens of a step, given out one by one: never more than there are."""

from __future__ import annotations

from unittest.mock import Mock

from milepost.scheduler.budget import MAX_IDLE_STEPS, Budget
from milepost.scheduler.encoders import Encoders
from milepost.scheduler.stats import SchedulerStats

GRID = 64


def prefill(num_left: int, num_idle_steps: int = 0) -> Mock:
    """A request with so many tokens to compute, from position 0 on."""
    return Mock(
        num_left=num_left,
        num_idle_steps=num_idle_steps,
        allocation=Mock(planned=0),
        chain=Mock(pictures=()),
    )


def no_pictures() -> Encoders:
    return Encoders(0, 2 * GRID, GRID, SchedulerStats())


def test_starved_prefills_get_grid_steps_as_long_as_there_are_any():
    budget = Budget(2 * GRID + 30, GRID, no_pictures())
    starved = [prefill(1000, MAX_IDLE_STEPS + idle) for idle in (0, 2, 1)]
    budget.give_starved([*starved, prefill(1000)])
    longest, then = starved[1], starved[2]
    assert budget.given == {longest: GRID, then: GRID}, "the longest starved first"
    assert budget.left == 30


def test_a_prompts_end_need_not_lie_on_the_grid():
    budget = Budget(GRID + 30, GRID, no_pictures())
    whole, cut = prefill(20), prefill(1000)
    budget.give_chunk(whole)
    budget.give_chunk(cut)
    assert budget.given == {whole: 20, cut: GRID}
    assert budget.left == 10
