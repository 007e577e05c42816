"""The tiers of one model: decide which pages and states are stored in host memory and on disk, and
which are loaded again. Pure.

An item can be read once its copy is reported (`Stores.stored`, `Writes.written`), and is pinned
while it is read or written. Places are numbers in the host's arena, the same on every rank.
"""

from __future__ import annotations

from milepost.cache import Cache
from milepost.cache.events import Event
from milepost.scheduler.encoders import PLAIN_COST, TowerCost
from milepost.scheduler.plans import Store
from milepost.tiers.holdings import Holdings, MeasuredRates, TierLimits
from milepost.tiers.loads import Loads
from milepost.tiers.reach import Reach
from milepost.tiers.stores import Stores
from milepost.tiers.writes import Writes


class Tiers:
    """A keeper of the scheduler, which stores pages and states evicted from `cache`; `loads` is the
    source that loads them."""

    def __init__(
        self,
        cache: Cache,
        limits: TierLimits,
        rates: MeasuredRates | None = None,
        cost: TowerCost = PLAIN_COST,
    ) -> None:
        self.holdings = Holdings(
            limits,
            rates if rates is not None else MeasuredRates(),
            page_size=cache.page_size,
            has_states=cache.slots_each > 0,
        )
        self.host, self.disk = self.holdings.host, self.holdings.disk
        self.stats = self.holdings.stats
        self.loads = Loads(self.holdings, cost)
        self.writes = Writes(self.holdings)
        self.stores = Stores(cache, self.holdings, self.writes.want)
        self.reach: Reach | None = None
        """The pages that can be resumed from; created once somebody listens to events."""
        self._cache = cache

    def clear(self, *, with_files: bool) -> None:
        """Drops everything in host memory, and with `with_files` everything on disk. No store or
        load may be under way."""
        self.stores.clear()
        self.host.clear()
        if with_files:
            self.writes.clear()

    # --- the keeper's part ------------------------------------------------------------------------

    def listen(self) -> None:
        if self.reach is None:
            self.reach = Reach(self._cache, self.holdings)

    def note(self, events: tuple[Event, ...]) -> None:
        self.stores.note(events)
        if self.reach is not None:
            self.reach.note(events)

    @property
    def is_behind(self) -> bool:
        """Whether there are more events to report."""
        return self.reach is not None and self.reach.is_behind

    def take_events(self) -> tuple[Event, ...]:
        return () if self.reach is None else self.reach.take_events()

    @property
    def has_stores(self) -> bool:
        return self.stores.are_any

    def take_stores(self, num_moves: int) -> tuple[Store, ...]:
        return self.stores.take(num_moves)
