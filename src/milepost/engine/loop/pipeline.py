"""Steps on the device: planned, launched one ahead where possible, collected, and rolled back if
they are interrupted.

Knows nothing of requests: what a step samples goes to the completions. Single-threaded, like the
engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from milepost.config import EngineConfig
from milepost.engine.assembly import EngineParts
from milepost.engine.loop.completions import RunningCompletions
from milepost.engine.loop.failure import FailureLatch
from milepost.engine.loop.pixels import PixelStore
from milepost.engine.off_device import OffDevice
from milepost.errors import EngineDeadError
from milepost.runner.in_flight import InFlightStep
from milepost.runner.runner import RunnerOutput
from milepost.scheduler.plans import StepPlan, StepSampling


class StepPipeline:
    """The steps of one engine. A failure in one ends the engine (`failure`)."""

    def __init__(
        self,
        config: EngineConfig,
        parts: EngineParts,
        completions: RunningCompletions,
        off_device: Sequence[OffDevice],
        latch: FailureLatch,
        pixels: PixelStore,
    ) -> None:
        self.speculation = parts.speculation
        self.in_flight: InFlightStep | None = None
        self._max_num_seqs = config.max_num_seqs
        self._scheduler = parts.scheduler
        self.runner = parts.runner
        self._team = parts.team
        self._runs_ahead = parts.runs_ahead
        self._completions = completions
        self._off_device = off_device
        self._latch = latch
        self._pixels = pixels
        self._pace = Pace()
        self._last_end_s: float | None = None
        """Time at which the last step was collected; None if no work was left then."""

    @property
    def spare_s(self) -> float:
        """Seconds for which no step need be begun: requests added by then are in the step that is
        planned ahead, and the device has work until then."""
        step = self.in_flight
        if step is None or not step.is_timed or _is_mostly_verifying(step.plan):
            return 0.0
        running = self._scheduler.running
        if len(running) + len(self._scheduler.waiting) >= self._max_num_seqs:
            return 0.0  # arrivals have to wait anyway
        will_prefill = bool(self._scheduler.waiting) or any(r.num_left > 1 for r in running)
        elapsed_s = self.runner.elapsed_s(step)
        return self._pace.spare_s(step.plan, elapsed_s, will_prefill=will_prefill)

    def current(self) -> InFlightStep | None:
        """Returns the step in flight, or a new one; None if there is nothing to do."""
        return self.in_flight or self._start()

    def _start(self) -> InFlightStep | None:
        """Plans a step and launches it. Returns None if there is nothing to do."""
        with self._latch.fatal(BaseException):
            plan = self._scheduler.schedule()
            can_wait = self._scheduler.num_loading or self._scheduler.outside.has_lent
            assert plan.sequences or can_wait or not self._scheduler.has_work, (
                "a step does some of the work"
            )
        if not plan.sequences:
            self._only_copy(plan)
            return None
        with self.rolling_back(plan):
            step = self._launch(plan)
            self._begin_loads(plan)
            self._sample(step, num_ahead=0)
        return step

    def collect(self, step: InFlightStep) -> RunnerOutput:
        """Launches the step after one in flight, then waits for that one's tokens."""
        with self.rolling_back(step.plan):
            self.in_flight = self._start_ahead(step)
            self._scheduler.prepare(step.plan)
            output = self.runner.collect(step)
            if step.is_timed:
                self._pace.note_step(step.plan, step.device_s)
            for part in self._off_device:
                part.note_step(step.plan, output.result.seconds)
        return output

    def _start_ahead(self, step: InFlightStep) -> InFlightStep | None:
        """Launches the step after one in flight, if it can be planned without that one's tokens. It
        samples at once, unless sampling needs those tokens; then it samples once they are taken."""
        if not self._runs_ahead or _is_mostly_verifying(step.plan):
            return None
        began_s = perf_counter()
        with self._latch.fatal(BaseException):
            plan = self._scheduler.follow(step.plan)
        if plan is None or not plan.sequences:
            self._only_copy(plan or StepPlan(sequences=()))
            return None
        ahead = self._launch(plan, before=step)
        self._begin_loads(plan)
        if not self._completions.wait_for(1, plan.sequences):
            self._sample(ahead, num_ahead=1)
        self._pace.note_planning(plan, perf_counter() - began_s, is_late=ahead.is_late)
        return ahead

    def advance(self) -> None:
        """Has the next step sample, if it waited for this step's tokens. If drafts kept the next
        step from being launched ahead, launches it, so that it runs while the tokens are handed
        on."""
        ahead = self.in_flight
        if ahead is not None and not ahead.is_sampled:
            with self.rolling_back(ahead.plan):
                self._sample(ahead, num_ahead=0)
        waits = ahead is None and self._runs_ahead and self.speculation is not None
        if waits and self._scheduler.has_work and not self._scheduler.only_folds:
            self.in_flight = self._start()

    def _sample(self, step: InFlightStep, *, num_ahead: int) -> None:
        """Has a launched step sample; `num_ahead` tokens of its sequences are not known yet."""
        rows = self._completions.choices(step.plan, num_ahead)
        num_drafts = 0 if self.speculation is None else self.speculation.num_behind(step.plan)
        self.runner.sample(step, StepSampling(rows=rows, num_drafts=num_drafts))

    def speculate(self, plan: StepPlan, output: RunnerOutput) -> None:
        """Records which drafts were accepted, and proposes new ones."""
        if self.speculation is None:
            return
        now_s, last_s = perf_counter(), self._last_end_s
        has_work = self._scheduler.has_work or any(part.has_work for part in self._off_device)
        self._last_end_s = now_s if has_work else None
        num_tokens = {number: len(run) for number, run in output.sampled.items()}
        self._completions.note_drafts(plan, num_tokens)
        self.speculation.note(plan, num_tokens, None if last_s is None else now_s - last_s)
        self.speculation.learn(output.read_drafts())
        self.speculation.propose(self._completions.possible)

    def settle(self) -> None:
        """Once every answer has ended, collects a step that turned out to be unnecessary, and folds
        states up to the ends of their answers."""
        if self._scheduler.has_work and not self._scheduler.only_folds:
            return
        step, self.in_flight = self.in_flight, None
        if step is not None:
            with self._latch.fatal(BaseException):
                self._scheduler.update(step.plan, self.runner.collect(step).result)
        if self._scheduler.only_folds:
            last = self._start()
            assert last is not None, "a fold is a step"
            with self.rolling_back(last.plan):
                output = self.runner.collect(last)
            with self._latch.fatal(BaseException):
                self._scheduler.update(last.plan, output.result)

    @contextmanager
    def rolling_back(self, plan: StepPlan) -> Iterator[None]:
        """Rolls back the step and its successor if it is interrupted, since states are then half
        written. A failure ends the engine."""
        with self._latch.fatal(Exception):
            try:
                yield
            except (KeyboardInterrupt, SystemExit):
                self.in_flight = None
                if self._latch.is_alive:  # else it was planning that was interrupted
                    self._roll_back(plan)
                raise

    def _roll_back(self, plan: StepPlan) -> None:
        """Rolls back an interrupted step. With several ranks this ends the engine: some have begun
        the step and others have not, and they would wait for each other forever."""
        if self._team is not None:
            self._latch.end(EngineDeadError("a step was interrupted between ranks"))
            return
        for part in self._off_device:
            part.end_loads()
        self._scheduler.roll_back(plan)
        self.runner.roll_back()

    def _launch(self, plan: StepPlan, before: InFlightStep | None = None) -> InFlightStep:
        self._pixels.hand_over(plan, self.runner)
        return self.runner.launch(plan, before=before)

    def _begin_loads(self, plan: StepPlan) -> None:
        for part in self._off_device:
            part.begin_loads(plan.loads, self.runner.fence)

    def _only_copy(self, plan: StepPlan) -> None:
        """Runs a plan that computes nothing, and so has no result."""
        if plan.only_copies:
            with self._latch.fatal(BaseException):
                self._pixels.hand_over(plan, self.runner)
                self.runner.copy(plan)
                self._begin_loads(plan)


def _is_mostly_verifying(plan: StepPlan) -> bool:
    """Whether most of a step's sequences have drafts. If so, the others wait with them instead of
    getting steps of their own in between."""
    return 2 * sum(sequence.num_drafts > 0 for sequence in plan.sequences) > len(plan.sequences)


MARGIN_S = 0.0003
"""Safety margin: a step is planned this much earlier than estimated, and earlier still after a late
one."""
MAX_MARGIN_S = 0.02


class Pace:
    """Decides how long planning the next step can wait while one is in flight.

    If the next step were planned as soon as the current one begins, requests that arrive meanwhile
    would miss it: they would wait for one more step, and prompts that arrived together would be
    computed apart. So the plan is made as late as possible without leaving the device idle or
    delaying the tokens of the step in flight. The end of that step is estimated from the shortest
    times of steps of its size; the time to plan and launch the next one is estimated too. Times are
    given to it; it reads no clock.
    """

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
