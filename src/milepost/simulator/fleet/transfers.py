"""Transfers between engines in virtual time: the scheduler's own loads, over one link per engine.

A link carries one transfer after the other, and what is read stays lent until it has arrived.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from milepost.cache import Cache, Match
from milepost.cache.allocation import Loan
from milepost.scheduler.outside import Offer
from milepost.scheduler.plans import Load, StepPlan
from milepost.scheduler.request import Request
from milepost.scheduler.scheduler import Scheduler
from milepost.simulator.cost import CostModel

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

    def fetch(self, plan: StepPlan, now_s: float) -> None:
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
