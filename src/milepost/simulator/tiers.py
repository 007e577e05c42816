"""Host memory and a disk in virtual time: the engine's own decisions (`milepost.tiers`), and links
on which a copy takes its bytes over the bandwidth.

There is a link each way to the host and to the disk, and a link copies one item after the other.
Data from the disk crosses the host's link too. Copies do not slow the steps down.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from milepost.cache import Cache
from milepost.cache.plans import What
from milepost.scheduler.plans import Load, StepPlan
from milepost.scheduler.scheduler import Scheduler
from milepost.simulator.cost import CostModel
from milepost.tiers.holdings import MeasuredRates, TierLimits, split
from milepost.tiers.policy import Tiers
from milepost.tiers.tier import Item

MAX_WRITES = 64
"""Largest number of files that are written to the disk at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizes:
    """Sizes in bytes, and bandwidths in bytes per second."""

    host_bytes: int
    disk_bytes: int = 0
    host_bytes_per_s: float = 20e9
    """Bandwidth of each direction."""
    disk_bytes_per_s: float = 2e9


TierLink = Literal["down", "up", "write", "read"]


class Copies:
    """Copies between the tiers of one replay."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: Cache,
        sizes: TierSizes,
        cost: CostModel,
    ) -> None:
        self._scheduler = scheduler
        self._sizes = sizes
        self._page_bytes = cache.page_size * cost.page_token_bytes
        self._state_bytes = cost.state_bytes
        page, state = self._page_bytes, self._state_bytes
        host_pages, host_states = split(sizes.host_bytes, page, state)
        disk_pages, disk_states = split(sizes.disk_bytes, page, state)
        limits = TierLimits(
            page_bytes=self._page_bytes,
            state_bytes=self._state_bytes,
            num_host_pages=host_pages,
            num_host_states=host_states,
            num_disk_pages=disk_pages,
            num_disk_states=disk_states,
            max_pages_under_way=0,
        )
        rates = MeasuredRates(
            tokens_per_s=1 / cost.prefill_token_s,
            host_bytes_per_s=sizes.host_bytes_per_s,
            disk_bytes_per_s=sizes.disk_bytes_per_s,
        )
        self.tiers = Tiers(cache, limits, rates, cost.tower)
        scheduler.outside.add_keeper(self.tiers)
        scheduler.outside.add_source(self.tiers.loads)
        self._free_s: dict[TierLink, float] = dict.fromkeys(("down", "up", "write", "read"), 0.0)
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []
        self._num_begun = 0
        self._num_writes = 0

    @property
    def next_s(self) -> float:
        """Time at which the next copy is over; infinity if none is under way."""
        return self._under_way[0][0] if self._under_way else float("inf")

    def launch(self, plan: StepPlan, now_s: float) -> None:
        """Begins the copies that a plan names."""
        for store in plan.stores:
            end_s = self._cross("down", now_s, self._bytes(store.what))
            self._at(end_s, partial(self.tiers.stores.stored, store.what, store.key))
        for load in plan.loads:
            if load.source == self.tiers.loads.name:
                self._load(load, now_s)
        self._write(now_s)

    def settle(self, now_s: float) -> None:
        """Handles the copies that are over by now."""
        while self.next_s <= now_s:
            end_s, _, done = heapq.heappop(self._under_way)
            done()
            self._write(end_s)

    def _load(self, load: Load, now_s: float) -> None:
        fetches = self.tiers.loads.fetches(load.number)
        if fetches is None:
            self._at(now_s, partial(self._scheduler.failed, load.number))
            return
        from_disk = [fetch.item for fetch in fetches if fetch.is_on_disk]
        read_s = self._cross("read", now_s, sum(self._bytes(item.what) for item in from_disk))
        num_bytes = sum(self._bytes(fetch.item.what) for fetch in fetches)
        end_s = self._cross("up", read_s if from_disk else now_s, num_bytes)
        self._at(end_s, partial(self._arrived, load.number, from_disk))

    def _arrived(self, number: int, from_disk: list[Item]) -> None:
        for item in from_disk:
            self.tiers.host.fill(item)
        self._scheduler.arrived(number)

    def _write(self, now_s: float) -> None:
        """Begins writes to the disk, as many as may be under way."""
        if not self.tiers.writes.are_any or self._num_writes >= MAX_WRITES:
            return
        for item, copy in self.tiers.writes.take(MAX_WRITES - self._num_writes):
            self._num_writes += 1
            end_s = self._cross("write", now_s, self._bytes(item.what))
            self._at(end_s, partial(self._written, item, copy))

    def _written(self, item: Item, copy: Item) -> None:
        self._num_writes -= 1
        self.tiers.writes.written(item, copy, is_there=True)

    def _cross(self, link: TierLink, now_s: float, num_bytes: int) -> float:
        """Returns the time at which these bytes have crossed a link, after all earlier copies."""
        sizes = self._sizes
        rate = sizes.host_bytes_per_s if link in ("down", "up") else sizes.disk_bytes_per_s
        self._free_s[link] = max(self._free_s[link], now_s) + num_bytes / rate
        return self._free_s[link]

    def _at(self, end_s: float, done: Callable[[], None]) -> None:
        self._num_begun += 1
        heapq.heappush(self._under_way, (end_s, self._num_begun, done))

    def _bytes(self, what: What) -> int:
        return self._state_bytes if what == "state" else self._page_bytes
