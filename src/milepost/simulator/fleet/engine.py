"""One engine of a fleet: the real scheduler and cache, and the end of its step."""

from __future__ import annotations

from milepost.cache import Cache
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.request import Progress, Request
from milepost.simulator.cost import CostModel
from milepost.simulator.fleet.transfers import Transfers
from milepost.simulator.loop import EngineLimits, outcome
from milepost.simulator.tiers import Copies, TierSizes


class FleetEngine:
    """One engine; the fleet tells it the time."""

    def __init__(
        self,
        number: int,
        cache: Cache,
        cost: CostModel,
        *,
        limits: EngineLimits,
        bytes_per_s: float,
        tiers: TierSizes | None = None,
    ) -> None:
        self.number = number
        self.cache = cache
        self.scheduler = limits.scheduler(cache)
        self.transfers = Transfers(self.scheduler, cache, cost, bytes_per_s)
        self._copies = Copies(self.scheduler, cache, tiers, cost) if tiers is not None else None
        self._cost = cost
        self._step: tuple[StepPlan, float] | None = None
        self._end_s = 0.0
        self.busy_s = 0.0
        """Total time of its steps."""
        self.saved_s = 0.0
        """Time that prefilling its hits would have taken besides."""

    @property
    def next_s(self) -> float:
        """Time of its next work if no request comes; infinity for never."""
        if self._step is not None:
            return self._end_s
        if not self.scheduler.has_work:
            return float("inf")
        return min(self.transfers.next_s, self._copies.next_s if self._copies else float("inf"))

    @property
    def is_stuck(self) -> bool:
        """Whether its work waits for memory that others have borrowed."""
        return self.next_s == float("inf") and self.scheduler.has_work

    def run(self, now_s: float) -> list[Progress]:
        """Takes what is over by now, and begins the next step; returns the requests' progress."""
        found: list[Progress] = []
        if self._step is not None:
            if self._end_s > now_s:
                return found
            plan, seconds = self._step
            self._step = None
            found = self.scheduler.update(plan, outcome(plan, seconds))
            self.scheduler.outside.tell()
        self.transfers.settle(now_s)
        if self._copies is not None:
            self._copies.settle(now_s)
        if self.scheduler.has_work:
            self._begin(now_s)
        return found

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequestError, and QueueWaitError."""
        self.scheduler.check_wait(request)
        self.scheduler.add(request)

    def _begin(self, now_s: float) -> None:
        plan = self.scheduler.schedule()
        if self._copies is not None:
            self._copies.begin(plan, now_s)
        self.transfers.fetch(plan, now_s)
        if plan.sequences:
            seconds = self._cost.step_time_s(plan)
            self._step = plan, seconds
            self._end_s = now_s + seconds
            self.busy_s += seconds
