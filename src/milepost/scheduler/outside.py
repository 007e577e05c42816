"""Loads from outside the device, and copies to it: tiers, other engines.

A *source* offers to fill a request's pages and slot beyond what the device has cached. While it
does so, the admitted request is loading: nothing is planned for it until the source reports that
all has arrived, or that it will not. The request holds memory and counts as running, but blocks
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
"""Requests that load at a time: more would hold memory, at the expense of what is cached, while
they wait for the same link.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Offer of a source, by name, of a part of a prompt."""

    source: str

    position: int = 0
    """Position to go on from; nothing is offered unless that is after its match."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Those that would come from it, by where it has them, for the report."""
    lost: tuple[tuple[Lost, int], ...] = ()
    """Reasons why later tokens are not offered, each with the position that it is good up to; the
    furthest first.
    """


class Source(Protocol):
    """Offers what it has, and fills what a plan names. Whoever runs it reports to the scheduler:
    `arrived` or `failed` for each load that has begun, once, when nobody writes any more.
    """

    name: str

    def offer(self, request: Request, match: Match) -> Offer:
        """Returns what it has of a request's tokens, after what the device has. Costs no more than
        a match; the request may be asked for again and again.
        """
        ...

    def begin(self, load: Load) -> None:
        """A plan names this load: what it reads has to stay until `end`."""
        ...

    def end(self, number: int) -> None:
        """The load of this request is over."""
        ...


class Keeper(Protocol):
    """Decides what is worth keeping outside the device, and hears of all events first."""

    @property
    def has_stores(self) -> bool:
        """Whether it wants something copied, plan or not."""
        ...

    def listen(self) -> None:
        """Report from now on what this keeper stores, since there is a listener."""
        ...

    def note(self, events: tuple[Event, ...]) -> None:
        """Note what came and went."""
        ...

    def take_events(self) -> tuple[Event, ...]:
        """Returns what has become true of what it keeps: nothing unless somebody listens."""
        ...

    def take_stores(self, num_moves: int) -> tuple[Store, ...]:
        """Returns what the next plan, with `num_moves` moves of pages, is to copy first."""
        ...


class Outside:
    """The sources and the keeper of one scheduler, and the requests that load. Most often there
    are none; where there are, the memory has to be a `Cache`.
    """

    def __init__(self, memory: PrefixMemory) -> None:
        self._memory = memory
        self.loading: dict[int, tuple[Request, Offer]] = {}
        """Keyed by request number."""
        self.max_loading = MAX_LOADING
        self._sources: dict[str, Source] = {}
        self._keeper: Keeper | None = None
        self._listeners: list[Callable[[tuple[Event, ...]], None]] = []
        self._loads: list[Load] = []
        self._offers: dict[int, Offer] = {}
        """Offers that requests, by number, wait to load: finding one takes a walk over a prompt's
        pages, and it is asked for in each step.
        """

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
        """Have all that comes and goes told, on the device and in what the keeper keeps, at least
        with each plan: first what is there already. All listeners are added before the first
        request comes.
        """
        self._listeners.append(listener)
        self.cache.listen()
        if self._keeper is not None:
            self._keeper.listen()

    def tell(self) -> None:
        """Tell what has come and gone since the last time."""
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
        """Whether something is to be copied though nothing runs."""
        self.tell()
        return self._keeper is not None and self._keeper.has_stores

    @property
    def has_lent(self) -> bool:
        """Whether others may be reading what is cached: it makes no room before they are done."""
        return isinstance(self._memory, Cache) and bool(self._memory.loans)

    @property
    def has_sources(self) -> bool:
        """Whether prompts are looked up outside the device too."""
        return bool(self._sources)

    @property
    def may_load(self) -> bool:
        """Whether another request may begin to load."""
        return len(self.loading) < self.max_loading

    def find(self, request: Request, match: Match) -> Offer | None:
        """The deepest offer, if there is any source; while nothing may be loaded the one before, as
        long as the device has less.
        """
        known = self._offers.get(request.number)
        if known is not None and known.position > match.state_length:
            return known
        offers = [source.offer(request, match) for source in self._sources.values()]
        best = max(offers, key=lambda offer: offer.position, default=None)
        if best is not None and best.position > match.state_length and not self.may_load:
            self._offers[request.number] = best
        return best

    def begin(self, request: Request, offer: Offer) -> None:
        """Note that an admitted request loads; the next plan says what."""
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
        """It does not come."""
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
        """Those that have begun since they were last taken."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def take_stores(self, num_moves: int) -> tuple[Store, ...]:
        """Returns what the next plan is to copy; tells whoever listens what has come and gone."""
        self.tell()
        return self._keeper.take_stores(num_moves) if self._keeper is not None else ()


def explained(match: Match, offer: Offer) -> Match:
    """A match whose report says why tokens that a source has are not loaded."""
    report = match.report
    for reason, end in offer.lost:
        report = report.with_lost(reason, end)
    return replace(match, report=report)
