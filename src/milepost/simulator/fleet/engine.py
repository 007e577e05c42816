"""One engine in virtual time: the real scheduler and cache, the end of its step, and its transfers
from other engines.

Transfers are the scheduler's own loads, over one link per engine. A link carries one transfer after
the other, and what is read stays lent until it has arrived.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from milepost.cache import Cache, Match
from milepost.cache.allocation import Loan
from milepost.scheduler.encoders import PLAIN_COST, TowerCost
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.outside import Offer
from milepost.scheduler.plans import Load, StepPlan, StepResult
from milepost.scheduler.request import Progress, Request
from milepost.scheduler.scheduler import Scheduler
from milepost.simulator.cost import CostModel
from milepost.simulator.tiers import Copies, TierSizes

LEAST_TOKENS = 64
"""Fewer tokens are computed rather than read, as in the engine."""


@dataclass(slots=True, kw_only=True)
class _Wanted:
    request: Request
    loan: Loan
    give_back: Callable[[], None]


class Transfers:
    """Reads pages and states that other engines lend to one engine."""

    name = "remote"

    def __init__(
        self, scheduler: Scheduler, cache: Cache, cost: CostModel, bytes_per_s: float
    ) -> None:
        self._scheduler = scheduler
        self._page_bytes = cache.page_size * cost.page_token_bytes
        self._state_bytes = cost.state_bytes
        self._bytes_per_s = bytes_per_s
        self._wanted: dict[int, _Wanted] = {}
        self._under_way: list[tuple[float, int]] = []
        self._fetching: set[int] = set()
        self._free_s = 0.0
        self.num_bytes = 0
        scheduler.outside.add_source(self)

    @property
    def next_s(self) -> float:
        """Time at which the next transfer is over; infinity if none is under way."""
        return self._under_way[0][0] if self._under_way else float("inf")

    def want(self, request: Request, loan: Loan, give_back: Callable[[], None]) -> None:
        """Lets a request that was just added read a loan, and end it by `give_back`."""
        wanted = _Wanted(request=request, loan=loan, give_back=give_back)
        self._wanted[request.number] = wanted

    def offer(self, request: Request, match: Match) -> Offer:
        """Offers the loan of a request, if it is worth its bytes."""
        wanted = self._wanted.get(request.number)
        if wanted is None:
            return Offer(source=self.name)
        position = wanted.loan.position
        num_tokens = position - match.state_length
        if num_tokens < LEAST_TOKENS or position >= len(request.chain):
            return Offer(source=self.name)
        return Offer(source=self.name, position=position, tokens={self.name: num_tokens})

    def begin(self, load: Load) -> None:
        self._fetching.add(load.number)

    def end(self, number: int) -> None:
        self._fetching.discard(number)
        self._give_back(number)

    def launch(self, plan: StepPlan, now_s: float) -> None:
        """Begins the transfers that a plan names."""
        for load in plan.loads:
            if load.source != self.name:
                continue
            states = sum(arrival.what == "state" for arrival in load.arrivals)
            pages = len(load.arrivals) - states
            num_bytes = pages * self._page_bytes + states * self._state_bytes
            self.num_bytes += num_bytes
            self._free_s = max(self._free_s, now_s) + num_bytes / self._bytes_per_s
            heapq.heappush(self._under_way, (self._free_s, load.number))

    def settle(self, now_s: float) -> None:
        """Handles the transfers that are over by now, and ends needless loans."""
        while self.next_s <= now_s:
            self._scheduler.arrived(heapq.heappop(self._under_way)[1])
        for number, wanted in list(self._wanted.items()):
            is_begun = wanted.request.allocation is not None
            if number not in self._fetching and (is_begun or wanted.request.finish_reason):
                self._give_back(number)

    def _give_back(self, number: int) -> None:
        self._wanted.pop(number).give_back()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Settings of an engine's scheduler."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_queue_wait_s: float | None = None
    encoder_cache_size: int = 32_768
    """Tokens of pictures whose encoder outputs stay on the device."""

    def scheduler(self, cache: PrefixMemory, tower: TowerCost = PLAIN_COST) -> Scheduler:
        """Makes a scheduler with these settings, for a model with this vision tower."""
        return Scheduler(
            cache,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            encoder_cache_size=self.encoder_cache_size,
            tower_cost=tower,
            max_queue_wait_s=self.max_queue_wait_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Number and settings of the engines."""

    num_engines: int = 1
    num_prefill: int = 0
    """Number of these engines that only prefill; the others then only decode."""
    limits: EngineLimits = field(default_factory=EngineLimits)
    bytes_per_s: float = 50e9
    """Bandwidth of each engine's link, for reads from other engines."""


class FleetEngine:
    """One engine; the fleet tells it the time. With `bytes_per_s` it reads from other engines. Only
    a `Cache` has tiers and transfers."""

    def __init__(
        self,
        number: int,
        cache: PrefixMemory,
        cost: CostModel,
        *,
        limits: EngineLimits,
        bytes_per_s: float | None = None,
        tiers: TierSizes | None = None,
    ) -> None:
        self.number = number
        self.cache = cache
        self.scheduler = limits.scheduler(cache, cost.tower)
        self.transfers: Transfers | None = None
        self._outside: list[Transfers | Copies] = []
        if bytes_per_s is not None:
            assert isinstance(cache, Cache), "other memories lend nothing"
            self.transfers = Transfers(self.scheduler, cache, cost, bytes_per_s)
            self._outside.append(self.transfers)
        if tiers is not None:
            assert isinstance(cache, Cache), "other memories have no tiers"
            self._outside.append(Copies(self.scheduler, cache, tiers, cost))
        self._cost = cost
        self._step: tuple[StepPlan, float] | None = None
        self._end_s = 0.0
        self.busy_s = 0.0
        """Total time of its steps."""
        self.saved_s = 0.0
        """Additional time that prefilling its hits would have taken."""

    @property
    def next_s(self) -> float:
        """Time of its next work if no request comes; infinity for never."""
        if self._step is not None:
            return self._end_s
        if not self.scheduler.has_work:
            return inf
        return min((part.next_s for part in self._outside), default=inf)

    @property
    def is_stuck(self) -> bool:
        """Whether its work waits for memory that others have borrowed."""
        return self.next_s == inf and self.scheduler.has_work

    def run(self, now_s: float) -> list[Progress]:
        """Handles what is over by now, and begins the next step. Returns the requests' progress."""
        progress: list[Progress] = []
        if self._step is not None:
            if self._end_s > now_s:
                return progress
            plan, seconds = self._step
            self._step = None
            progress = self.scheduler.update(plan, outcome(plan, seconds))
            self.scheduler.outside.tell()
        for part in self._outside:
            part.settle(now_s)
        if self.scheduler.has_work:
            self._begin(now_s)
        return progress

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequestError, and QueueWaitError."""
        self.scheduler.check_wait(request)
        self.scheduler.add(request)

    def _begin(self, now_s: float) -> None:
        plan = self.scheduler.schedule()
        for part in self._outside:
            part.launch(plan, now_s)
        if plan.sequences:
            seconds = self._cost.step_time_s(plan)
            self._step = plan, seconds
            self._end_s = now_s + seconds
            self.busy_s += seconds


def outcome(plan: StepPlan, seconds: float = 1.0) -> StepResult:
    """Makes a runner's report of a step that took `seconds`; every token is 0."""
    return StepResult(
        tokens={s.number: [0] for s in plan.sequences if s.samples},
        written=plan.written,
        seconds=seconds,
    )
