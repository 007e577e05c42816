"""The virtual-time loop: a trace through the engine's own scheduler and cache, with a cost model in
place of a model.

Arrivals are as recorded, or *closed*: a session's first request arrives as recorded, each further
one its think time after the previous answer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from milepost.cache import Cache
from milepost.errors import InvalidRequestError
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.plans import StepPlan, StepResult
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler
from milepost.simulator.chain import TraceChain
from milepost.simulator.cost import CostModel
from milepost.simulator.tiers import Copies, TierSizes
from milepost.simulator.trace import Trace, TraceRequest


@dataclass(slots=True, kw_only=True)
class Replayed:
    """What came of one replay."""

    cache: PrefixMemory
    scheduler: Scheduler
    ttft_s: list[float] = field(default_factory=list)
    """Of each request whose first token came, in order of that."""
    num_refused: int = 0
    """Requests that the page pool could never hold."""
    refused_tokens: int = 0
    """Prompt tokens of the refused requests."""
    end_s: float = 0.0
    busy_s: float = 0.0
    """Time in which steps ran."""
    saved_s: float = 0.0
    """Time that prefilling the hits would have taken besides."""


class Arrivals:
    """When each request comes. `due` returns those that have come; `done` lets a session go on."""

    def __init__(self, trace: Trace, *, closed: bool) -> None:
        self._heap: list[tuple[float, int]] = []
        self._behind: dict[int, int] = {}
        self._requests = trace.requests
        last: dict[tuple[str, str | None], int] = {}
        for number, request in enumerate(trace.requests):
            thread = request.thread if closed else None
            if thread is not None and thread in last:
                self._behind[last[thread]] = number
            else:
                heapq.heappush(self._heap, (request.arrival_s, number))
            if thread is not None:
                last[thread] = number

    @property
    def next_s(self) -> float:
        """When the next request comes; infinity if none is known to."""
        return self._heap[0][0] if self._heap else float("inf")

    def due(self, now_s: float) -> list[tuple[float, int]]:
        """Arrival and number of each request that has come by now."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            found.append(heapq.heappop(self._heap))
        return found

    def done(self, number: int, now_s: float) -> None:
        """A request is over."""
        behind = self._behind.get(number)
        if behind is not None:
            think_s = self._think_s(self._requests[number], self._requests[behind])
            heapq.heappush(self._heap, (now_s + think_s, behind))

    @staticmethod
    def _think_s(before: TraceRequest, after: TraceRequest) -> float:
        """As recorded; where it wasn't, the time between the arrivals."""
        return after.think_s if after.think_s is not None else after.arrival_s - before.arrival_s


class Replay:
    """One trace through one cache, or through what stands in for it."""

    def __init__(
        self,
        trace: Trace,
        cache: PrefixMemory,
        cost: CostModel,
        *,
        closed: bool,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        tiers: TierSizes | None = None,
    ) -> None:
        scheduler = Scheduler(
            cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self.run_so_far = Replayed(cache=cache, scheduler=scheduler)
        self._copies: Copies | None = None
        if tiers is not None:
            assert isinstance(cache, Cache), "other memories have no tiers"
            self._copies = Copies(scheduler, cache, tiers, cost)
        self._trace = trace
        self._cost = cost
        self._digests = trace.digests()
        self._arrivals = Arrivals(trace, closed=closed)
        self._arrived_s: dict[str, float] = {}
        self._now_s = 0.0

    def run(self, on_done: Callable[[int], None] | None = None) -> Replayed:
        """Replay everything; `on_done` is told how many requests are over."""
        scheduler = self.run_so_far.scheduler
        num_done = 0
        while True:
            num_done += self._take_arrivals()
            if self._copies is not None:
                self._copies.settle(self._now_s)
            if not scheduler.has_work:
                if self._arrivals.next_s == float("inf"):
                    self.run_so_far.end_s = self._now_s
                    return self.run_so_far
                self._now_s = self._arrivals.next_s
                continue
            num_done += self._step()
            if on_done is not None:
                on_done(num_done)

    def _take_arrivals(self) -> int:
        """Queue what has come; returns how many were refused."""
        refused: deque[int] = deque()
        for arrived_s, number in self._arrivals.due(self._now_s):
            request = self._request(number)
            try:
                self.run_so_far.scheduler.add(request)
            except InvalidRequestError:
                refused.append(number)
            else:
                self._arrived_s[request.id] = arrived_s
        for number in refused:
            self._arrivals.done(number, self._now_s)
            self.run_so_far.refused_tokens += self._trace.requests[number].input_length
        self.run_so_far.num_refused += len(refused)
        return len(refused)

    def _request(self, number: int) -> Request:
        asked = self._trace.requests[number]
        chain = TraceChain(asked, self._trace.page_size, self._digests)
        return Request(id=str(number), chain=chain, max_tokens=asked.output_length)

    def _step(self) -> int:
        """Plan, let time pass, take the outcome; returns how many requests ended."""
        scheduler = self.run_so_far.scheduler
        plan = scheduler.schedule()
        if self._copies is not None:
            self._copies.begin(plan, self._now_s)
        if not plan.sequences:
            self._wait_for_a_copy()
            return 0
        seconds = self._cost.step_time_s(plan)
        self._now_s += seconds
        self.run_so_far.busy_s += seconds
        num_ended = 0
        for progress in scheduler.update(plan, outcome(plan, seconds)):
            request = progress.request
            if request.num_output_tokens == 1:
                waited_s = self._now_s - self._arrived_s.pop(request.id)
                self.run_so_far.ttft_s.append(waited_s)
                assert request.report is not None, "a request with a token was admitted"
                self.run_so_far.saved_s += self._cost.prefill_s(0, request.report.state_length)
            if progress.finish_reason is not None:
                self._arrivals.done(int(request.id), self._now_s)
                num_ended += 1
        return num_ended

    def _wait_for_a_copy(self) -> None:
        """Nothing can be computed before something has come from a tier, or a request has."""
        next_s = min(self._arrivals.next_s, self._copies.next_s if self._copies else float("inf"))
        assert next_s != float("inf"), "the scheduler has work but plans nothing"
        self._now_s = max(self._now_s, next_s)


def outcome(plan: StepPlan, seconds: float = 1.0) -> StepResult:
    """What a runner reports of a step that took so long: every token is 0."""
    return StepResult(
        tokens={s.number: [0] for s in plan.sequences if s.samples},
        written={
            slot: position
            for s in plan.sequences
            for slot, position in (
                (s.slot_out, s.end),
                *((export.slot, export.position) for export in s.exports),
            )
        },
        seconds=seconds,
    )
