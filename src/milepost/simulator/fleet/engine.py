"""One engine of a fleet: the real scheduler and cache, and when its step ends."""

from __future__ import annotations

from milepost.cache import Cache
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.request import Progress, Request
from milepost.scheduler.scheduler import Scheduler
from milepost.simulator.cost import CostModel
from milepost.simulator.fleet.transfers import Transfers
from milepost.simulator.loop import outcome
from milepost.simulator.tiers import Copies, TierSizes


class FleetEngine:
    """Told the time by whoever runs the fleet."""

    def __init__(
        self,
        number: int,
        cache: Cache,
        cost: CostModel,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        bytes_per_s: float,
        tiers: TierSizes | None = None,
    ) -> None:
        self.number = number
        self.cache = cache
        self.scheduler = Scheduler(
            cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self.transfers = Transfers(self.scheduler, cache, cost, bytes_per_s)
        self._copies = Copies(self.scheduler, cache, tiers, cost) if tiers is not None else None
        self._cost = cost
        self._step: tuple[StepPlan, float] | None = None
        self._end_s = 0.0
        self.busy_s = 0.0
        """What its steps have taken."""

    @property
    def next_s(self) -> float:
        """When it has something to do, if nobody sends it anything; infinity for never."""
        if self._step is not None:
            return self._end_s
        if not self.scheduler.has_work:
            return float("inf")
        return min(self.transfers.next_s, self._copies.next_s if self._copies else float("inf"))

    @property
    def is_stuck(self) -> bool:
        """Whether it has work for which there is no room before something comes back."""
        return self.next_s == float("inf") and self.scheduler.has_work

    def run(self, now_s: float) -> list[Progress]:
        """Take what is over by now, and begin the next step; returns what requests progressed."""
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
        """Queue a request. Raises InvalidRequestError."""
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
