"""The virtual-time loop: a trace through the engine's own scheduler and cache, with a cost model in
place of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from milepost.cache import Cache
from milepost.errors import InvalidRequestError, QueueWaitError
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.plans import StepPlan, StepResult
from milepost.scheduler.request import FinishReason, Request
from milepost.scheduler.scheduler import Scheduler
from milepost.simulator.chain import TraceChain
from milepost.simulator.clients import Clients, Goodput, Patience
from milepost.simulator.cost import CostModel
from milepost.simulator.tiers import Copies, TierSizes
from milepost.simulator.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Settings of an engine's scheduler."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_queue_wait_s: float | None = None

    def scheduler(self, cache: PrefixMemory) -> Scheduler:
        """Makes a scheduler with these settings."""
        return Scheduler(
            cache,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_queue_wait_s=self.max_queue_wait_s,
        )


@dataclass(slots=True, kw_only=True)
class Replayed:
    """Outcome of one replay."""

    cache: PrefixMemory
    scheduler: Scheduler
    asked: Goodput
    num_refused: int = 0
    """Requests that the page pool could never hold."""
    refused_tokens: int = 0
    """Prompt tokens of the refused requests."""
    end_s: float = 0.0
    """Time at which the last step ended."""
    busy_s: float = 0.0
    """Time in which steps ran."""
    saved_s: float = 0.0
    """Time that prefilling the hits would have taken besides."""

    @property
    def ttft_s(self) -> list[float]:
        """Times to first token, in order of the tokens."""
        return self.asked.ttft_s


class Replay:
    """One trace through one cache, or through another memory."""

    def __init__(
        self,
        trace: Trace,
        cache: PrefixMemory,
        cost: CostModel,
        *,
        closed: bool,
        limits: EngineLimits = EngineLimits(),
        tiers: TierSizes | None = None,
        patience: Patience | None = None,
    ) -> None:
        scheduler = limits.scheduler(cache)
        self._clients = Clients(trace, closed=closed, patience=patience)
        self.run_so_far = Replayed(cache=cache, scheduler=scheduler, asked=self._clients.asked)
        self._copies: Copies | None = None
        if tiers is not None:
            assert isinstance(cache, Cache), "other memories have no tiers"
            self._copies = Copies(scheduler, cache, tiers, cost)
        self._trace = trace
        self._cost = cost
        self._digests = trace.digests()
        self._live: dict[int, Request] = {}
        """Requests under way, by their number in the trace."""
        self._now_s = 0.0

    def run(self, on_done: Callable[[int], None] | None = None) -> Replayed:
        """Replays everything; `on_done` is told how many requests are over."""
        scheduler = self.run_so_far.scheduler
        num_done = 0
        while True:
            num_done += self._let_clients_act()
            if self._copies is not None:
                self._copies.settle(self._now_s)
            if not scheduler.has_work:
                if self._clients.next_s == inf:
                    return self.run_so_far
                self._now_s = max(self._now_s, self._clients.next_s)
                continue
            num_done += self._step()
            if on_done is not None:
                on_done(num_done)

    # --- clients ----------------------------------------------------------------------------------

    def _let_clients_act(self) -> int:
        """Ends the requests that are given up, and queues new ones; returns how many do not fit."""
        for number in self._clients.timed_out(self._now_s):
            self._end(number)
        run, num_refused = self.run_so_far, self.run_so_far.num_refused
        for number in self._clients.due(self._now_s):
            request = self._request(number)
            try:
                run.scheduler.check_wait(request)
                run.scheduler.add(request)
            except QueueWaitError as error:
                self._clients.refused(number, self._now_s, error.retry_after_s)
            except InvalidRequestError:
                run.num_refused += 1
                run.refused_tokens += self._trace.requests[number].input_length
                self._clients.done(number, self._now_s)
            else:
                self._live[number] = request
        return run.num_refused - num_refused

    def _end_late(self) -> None:
        """Ends the requests that have waited longer for their turn than they may."""
        for request, error in self.run_so_far.scheduler.take_late():
            if request.finish_reason is None:
                number = int(request.id)
                self._end(number)
                self._clients.refused(number, self._now_s, error.retry_after_s)

    def _end(self, number: int) -> None:
        request = self._live.pop(number, None)
        if request is not None:
            self.run_so_far.scheduler.finish(request, FinishReason.ABORT)

    def _request(self, number: int) -> Request:
        asked = self._trace.requests[number]
        chain = TraceChain(asked, self._trace.page_size, self._digests)
        return Request(id=str(number), chain=chain, max_tokens=asked.output_length)

    # --- steps ------------------------------------------------------------------------------------

    def _step(self) -> int:
        """Plans a step, lets time pass and takes the outcome; returns how many requests ended."""
        scheduler = self.run_so_far.scheduler
        plan = scheduler.schedule()
        if self._copies is not None:
            self._copies.begin(plan, self._now_s)
        if not plan.sequences:
            self._wait_for_a_copy()
            return 0
        seconds = self._cost.step_time_s(plan)
        self._now_s += seconds
        self.run_so_far.end_s = self._now_s
        self.run_so_far.busy_s += seconds
        num_ended = 0
        for progress in scheduler.update(plan, outcome(plan, seconds)):
            request, number = progress.request, int(progress.request.id)
            if request.num_output_tokens == 1:
                self._clients.begun(number, self._now_s)
                assert request.report is not None, "a request with a token was admitted"
                self.run_so_far.saved_s += self._cost.prefill_s(0, request.report.state_length)
            if progress.finish_reason is not None:
                del self._live[number]
                self._clients.done(number, self._now_s)
                num_ended += 1
        self._end_late()
        return num_ended

    def _wait_for_a_copy(self) -> None:
        """Lets time pass until something comes from a tier, or a client acts."""
        next_s = min(self._clients.next_s, self._copies.next_s if self._copies else inf)
        assert next_s != inf, "the scheduler has work but plans nothing"
        self._now_s = max(self._now_s, next_s)


def outcome(plan: StepPlan, seconds: float = 1.0) -> StepResult:
    """Makes a runner's report of a step that took this long; every token is 0."""
    return StepResult(
        tokens={s.number: [0] for s in plan.sequences if s.samples},
        written=plan.written,
        seconds=seconds,
    )
