"""Decides how long planning the next step can wait while one is in flight.

If the next step were planned as soon as the current one begins, requests that arrive meanwhile
would miss it: they would wait for one more step, and prompts that arrived together would be
computed apart. So the plan is made as late as possible without leaving the device idle or delaying
the tokens of the step in flight. The end of that step is estimated from the shortest times of steps
of its size; the time to plan and launch the next one is estimated too.
"""

from __future__ import annotations

from milepost.scheduler.plans import StepPlan

MARGIN_S = 0.0003
"""Safety margin: a step is planned this much earlier than estimated, and earlier still after a late
one."""
MAX_MARGIN_S = 0.02


class Pace:
    """Estimates step times from the steps before. Times are given to it; it reads no clock."""

    def __init__(self) -> None:
        self._taken_s: dict[tuple[int, int], float] = {}
        """Estimated step time by size: close to the shortest of the recent steps."""
        self._planning_s = {True: 0.0, False: 0.0}
        """Estimated time to plan and launch a step, with and without prefills: close to the longest
        of the recent ones."""
        self._margin_s = MARGIN_S

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Records the time that a step took on the device."""
        size = _size(plan)
        self._taken_s[size] = min(seconds, 1.05 * self._taken_s.get(size, seconds))

    def note_planning(self, plan: StepPlan, seconds: float, *, is_late: bool) -> None:
        """Records the time to plan and launch a step, and whether the device ran out of work
        meanwhile."""
        prefills = _prefills(plan)
        self._planning_s[prefills] = max(seconds, 0.85 * self._planning_s[prefills])
        grown = min(2 * self._margin_s, MAX_MARGIN_S)
        self._margin_s = grown if is_late else max(0.98 * self._margin_s, MARGIN_S)

    def spare_s(self, plan: StepPlan, elapsed_s: float, *, will_prefill: bool) -> float:
        """Returns for how many seconds nothing need be planned after a step that has run for
        `elapsed_s`; 0 for an unknown size. The step's tokens are read after the next one is
        launched, and launching one that prefills takes longer."""
        taken_s = self._taken_s.get(_size(plan), 0.0)
        planning_s = self._planning_s[will_prefill]
        return max(taken_s - elapsed_s - planning_s - self._margin_s, 0.0)


def _prefills(plan: StepPlan) -> bool:
    return not all(each.is_decode for each in plan.sequences)


def _size(plan: StepPlan) -> tuple[int, int]:
    """Returns a step's size: its prefill tokens and its other sequences, each to within a factor of
    two. Steps of one size take about the same time."""
    num_prefilled = sum(each.num_tokens for each in plan.sequences if not each.is_decode)
    return num_prefilled.bit_length(), sum(each.is_decode for each in plan.sequences).bit_length()
