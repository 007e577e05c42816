"""Loads from outside the device and copies to it: tiers, other engines.

A *source* offers to fill a request's pages and slot beyond what the device has cached. Meanwhile
the admitted request is loading: it gets no tokens until the source reports that everything has
arrived, or that the load has failed. The request holds memory and counts as running, but blocks
nobody: later ones are admitted, and what it was admitted with is kept.

A *keeper* names what to copy from the device before a plan overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from milepost.cache import Cache, Lost, Match
from milepost.cache.events import Event
from milepost.scheduler.memory import PrefixMemory
from milepost.scheduler.plans import Load, Store
from milepost.scheduler.request import Request

MAX_LOADING = 8
"""Largest number of requests that load at a time. More would wait for the same link, and hold
memory meanwhile at the expense of the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Tokens of a prompt that a source offers to load."""

    source: str

    position: int = 0
    """Position to continue from; nothing is offered unless it is after the match."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Place (such as "disk") -> number of tokens that would be loaded from there, for
    the report."""
    lost: tuple[tuple[Lost, int], ...] = ()
    """Reasons why later tokens are not offered, each with the position up to which it applies; the
    furthest first."""


class Source(Protocol):
    """Offers parts of prompts, and fills the pages and slots that a plan names. For each load that
    has begun, its owner calls the scheduler's `arrived` or `failed` once, when nothing writes any
    more."""

    name: str

    def offer(self, request: Request, match: Match) -> Offer:
        """Returns what the source has of a request's tokens after those on the device. Costs no
        more than a match, since it may be called in every step."""
        ...

    def begin(self, load: Load) -> None:
        """Records that a plan names this load. What it reads must stay available until `end`."""
        ...

    def end(self, number: int) -> None:
        """Records that the load of this request is over."""
        ...


class Keeper(Protocol):
    """Decides what is worth keeping outside the device. It hears of all events before
    any listener."""

    @property
    def has_stores(self) -> bool:
        """Whether something is waiting to be copied, even if nothing is planned."""
        ...

    def listen(self) -> None:
        """Starts recording events of what is stored, since there is a listener."""
        ...

    def note(self, events: tuple[Event, ...]) -> None:
        """Takes the cache's events: what was cached and evicted."""
        ...

    def take_events(self) -> tuple[Event, ...]:
        """Returns the events of stored items since the last call; none unless there is a
        listener."""
        ...

    def take_stores(self, num_moves: int) -> tuple[Store, ...]:
        """Returns the items for the next plan to copy first; the plan has `num_moves`
        page moves."""
        ...


class Outside:
    """The sources and the keeper of one scheduler, and the requests that load. Most schedulers have
    none; those that do run on a `Cache`."""

    def __init__(self, memory: PrefixMemory) -> None:
        self._memory = memory
        self.loading: dict[int, tuple[Request, Offer]] = {}
        """Loading requests with their offers, by request number."""
        self.max_loading = MAX_LOADING
        self._sources: dict[str, Source] = {}
        self._keeper: Keeper | None = None
        self._listeners: list[Callable[[tuple[Event, ...]], None]] = []
        self._loads: list[Load] = []
        self._offers: dict[int, Offer] = {}
        """Request number -> the offer that a waiting request would load. Finding one takes a walk
        over a prompt's pages, and it is needed in each step."""

    @property
    def cache(self) -> Cache:
        assert isinstance(self._memory, Cache), "comparisons have one memory"
        return self._memory

    def add_source(self, source: Source) -> None:
        self._sources[source.name] = source

    def add_keeper(self, keeper: Keeper) -> None:
        assert self._keeper is None, "one keeper decides what leaves"
        self._keeper = keeper
        self.cache.listen()
        if self._listeners:
            keeper.listen()

    def add_listener(self, listener: Callable[[tuple[Event, ...]], None]) -> None:
        """Adds a listener, which is told of everything cached and evicted on the device, and of
        everything stored and dropped by the keeper, at least with each plan. It is first told what
        is cached already. Add all listeners before the first request."""
        self._listeners.append(listener)
        self.cache.listen()
        if self._keeper is not None:
            self._keeper.listen()

    def tell(self) -> None:
        """Tells the listeners what has changed since the last call."""
        if self._keeper is None and not self._listeners:
            return
        events = self.cache.take_events()
        if self._keeper is not None:
            if events:
                self._keeper.note(events)
            events += self._keeper.take_events()
        if events:
            for listener in self._listeners:
                listener(events)

    @property
    def has_stores(self) -> bool:
        """Whether something is waiting to be copied, even if nothing runs."""
        self.tell()
        return self._keeper is not None and self._keeper.has_stores

    @property
    def has_lent(self) -> bool:
        """Whether other engines may be reading cached items, which cannot be evicted until they are
        done."""
        return isinstance(self._memory, Cache) and bool(self._memory.loans)

    @property
    def has_sources(self) -> bool:
        """Whether prompts are also looked up outside the device."""
        return bool(self._sources)

    @property
    def may_load(self) -> bool:
        """Whether another request may begin to load."""
        return len(self.loading) < self.max_loading

    def find(self, request: Request, match: Match) -> Offer | None:
        """Returns the deepest offer of the sources; None if there is none. While no further load
        may begin, returns the previous offer if it is still deeper than what the device has."""
        known = self._offers.get(request.number)
        if known is not None and known.position > match.state_length:
            return known
        offers = [source.offer(request, match) for source in self._sources.values()]
        best = max(offers, key=lambda offer: offer.position, default=None)
        if best is not None and best.position > match.state_length and not self.may_load:
            self._offers[request.number] = best
        return best

    def begin(self, request: Request, offer: Offer) -> None:
        """Records that an admitted request loads; the next plan contains the load."""
        allocation = request.allocation
        assert allocation is not None
        load = Load(
            number=request.number,
            source=offer.source,
            position=offer.position,
            arrivals=allocation.arrivals,
        )
        self._sources[offer.source].begin(load)
        self.loading[request.number] = request, offer
        self._loads.append(load)

    def arrived(self, number: int) -> Request:
        """Ends a load whose data has arrived, and returns its request."""
        request, offer = self._end(number)
        assert request.allocation is not None
        self.cache.loaded(request.allocation, offer.tokens)
        return request

    def failed(self, number: int) -> Request:
        """Ends a load that has failed, and returns its request."""
        request, _ = self._end(number)
        assert request.allocation is not None
        self.cache.load_failed(request.allocation)
        return request

    def _end(self, number: int) -> tuple[Request, Offer]:
        request, offer = self.loading.pop(number)
        self._offers.clear()
        self._sources[offer.source].end(number)
        return request, offer

    def take_loads(self) -> tuple[Load, ...]:
        """Returns the loads that have begun since the last call."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def take_stores(self, num_moves: int) -> tuple[Store, ...]:
        """Returns the items for the next plan to copy, and tells the listeners what has changed."""
        self.tell()
        return self._keeper.take_stores(num_moves) if self._keeper is not None else ()


def explained(match: Match, offer: Offer | None) -> Match:
    """Returns the match with a report that says why tokens of a source are not loaded."""
    report = match.report
    for reason, end in offer.lost if offer is not None else ():
        report = report.with_lost(reason, end)
    return replace(match, report=report)
