"""Decides what to load: the state that saves the most time over computing, if any. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from milepost.cache import Lost, Match
from milepost.cache.plans import Arrival, What
from milepost.cache.tree import checkpoint_key
from milepost.scheduler.encoders import PLAIN_COST, TowerCost
from milepost.scheduler.outside import Offer
from milepost.scheduler.plans import Load
from milepost.scheduler.request import Request
from milepost.tiers.holdings import Holdings, ready
from milepost.tiers.tier import Item, Tier

MAX_CANDIDATES = 4
"""Largest number of states of a prompt whose costs are compared, the deepest first."""
MAX_OFFERED = 16_384
"""Largest number of requests whose offers are remembered: more than ever wait, fewer than arrive
between two changes of a tier.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Source of an arrival: a place in host memory, which is filled from disk first if
    `is_on_disk`.
    """

    arrival: Arrival
    item: Item
    is_on_disk: bool


_Asked = tuple[int, int, int, int]
"""Length of a request, and lengths of its parts that the device has."""


@dataclass(slots=True, kw_only=True)
class _Load:
    fetches: list[Fetch] = field(default_factory=list)
    pinned: list[tuple[Tier, Item]] = field(default_factory=list)
    is_possible: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """How far the cached pages of a prompt extend."""

    first: int
    """Number of pages that the device has."""
    readable: int
    """Number of pages that can be read: on the device, or after those in any tier."""
    known: int
    """Number of pages as in `readable`, including those whose copies are on their way."""
    far: Sequence[int]
    """Number of pages before each page that is only on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoadCandidate:
    """A position after the match from which a request can continue."""

    position: int
    rest: Sequence[Item] | None
    """Items needed besides pages; None if one of the copies has not arrived."""


class Loads:
    """A source of the scheduler: offers the parts of a prompt that `holdings` have, and names where
    each is."""

    name = "tiers"

    def __init__(self, holdings: Holdings, cost: TowerCost = PLAIN_COST) -> None:
        self._holdings = holdings
        self._cost = cost
        self._size = holdings.page_size
        self._loads: dict[int, _Load] = {}
        self._offered: dict[int, tuple[_Asked, Offer]] = {}
        """Maps the number of a request to its offer, valid until a tier changes: many requests
        wait, and each step looks at them."""
        self._num_changes = 0

    # --- what is offered --------------------------------------------------------------------------

    def offer(self, request: Request, match: Match) -> Offer:
        """Returns the offer that saves the most time, if any does."""
        num_changes = self._holdings.host.num_changes + self._holdings.disk.num_changes
        if num_changes != self._num_changes or len(self._offered) >= MAX_OFFERED:
            self._num_changes = num_changes
            self._offered.clear()
        asked = (len(request.chain), match.path.num_pages, match.state_length, match.kv_length)
        known = self._offered.get(request.number)
        if known is not None and known[0] == asked:
            return known[1]
        offer = self._find(request, match)
        self._offered[request.number] = asked, offer
        return offer

    def _find(self, request: Request, match: Match) -> Offer:
        here, rates = match.state_length, self._holdings.rates
        digests = request.chain.full_digests()
        reach = self._reach(digests, match.path.num_pages)
        best: Offer | None = None
        best_saved, deepest, late, num_compared = 0.0, here, here, 0
        for each in self._candidates(request, digests, reach, match):
            if each.rest is None:
                late = max(late, each.position)
                continue
            num_compared += 1
            deepest = max(deepest, each.position)
            num_pages = max(each.position // self._size - reach.first, 0)
            num_far = bisect_left(reach.far, reach.first + num_pages)
            seconds = self._holdings.load_seconds(num_pages, num_far, each.rest)
            work = self._cost.between(request.chain.pictures, here, each.position)
            saved = rates.compute_seconds(each.position - here + work) - seconds
            if saved > best_saved:
                best_saved = saved
                tokens = self._by_tier(each, here, num_far)
                best = Offer(source=self.name, position=each.position, tokens=tokens)
            if num_compared == MAX_CANDIDATES:
                break
        if best is not None:
            return best
        lost = [(Lost.NOT_WORTH_LOADING, deepest)] if deepest > here else []
        if late > deepest:
            lost.insert(0, (Lost.LATE_COPY, late))
        return Offer(source=self.name, lost=tuple(lost))

    def _by_tier(self, candidate: _LoadCandidate, here: int, num_far: int) -> dict[str, int]:
        """Returns how many of a load's tokens would come from each tier."""
        num_tokens = candidate.position - here
        from_disk = min(num_far * self._size, num_tokens)
        if not all(self._holdings.is_on_host(item.what, item.key) for item in candidate.rest or ()):
            from_disk = num_tokens
        tokens = {"host": num_tokens - from_disk, "disk": from_disk}
        return {place: num for place, num in tokens.items() if num}

    def _reach(self, digests: Sequence[bytes], first: int) -> _Reach:
        host, disk = self._holdings.host, self._holdings.disk
        on_host, on_disk = host.pages, disk.pages
        known, far = first, []
        for digest in islice(digests, first, None):
            if digest not in on_host:
                if digest not in on_disk:
                    break
                far.append(known)
            known += 1
        readable = known
        are_ready = host.unready.isdisjoint(digests) and disk.unready.isdisjoint(digests)
        if self._holdings.disk_rests or not are_ready:
            for index in range(first, known):
                if self._holdings.find("page", digests[index]) is None:
                    readable = index
                    break
        return _Reach(first=first, readable=readable, known=known, far=far)

    def _candidates(
        self, request: Request, digests: Sequence[bytes], reach: _Reach, match: Match
    ) -> Iterator[_LoadCandidate]:
        """Yields the candidates within reach, the deepest first."""
        chain, limit, above = request.chain, request.chain.last_resume, match.state_length
        if not self._holdings.has_states:
            for depth in (reach.known, reach.readable):
                position = min(depth * self._size, limit - limit % self._size)
                if position > above:
                    is_there = position <= reach.readable * self._size
                    yield _LoadCandidate(position=position, rest=() if is_there else None)
            return
        on_host, on_disk = self._holdings.host.state_positions, self._holdings.disk.state_positions
        for num_pages in range(reach.known, above // self._size - 1, -1):
            page = digests[num_pages - 1] if num_pages else chain.root
            if page not in on_host and page not in on_disk:
                continue
            begin = num_pages * self._size
            positions = {*on_host.get(page, ()), *on_disk.get(page, ())}
            for position in sorted(positions, reverse=True):
                if not above < position <= limit:
                    continue
                key = checkpoint_key(page, chain.content(begin, position))
                has_tail = position > max(begin, match.kv_length, above)
                rest = self._rest(key, has_tail=has_tail)
                if rest is not None:
                    is_there = num_pages <= reach.readable and all(rest)
                    there = [item for item in rest if item is not None]
                    yield _LoadCandidate(position=position, rest=there if is_there else None)

    def _rest(self, key: bytes, *, has_tail: bool) -> list[Item | None] | None:
        """Returns the items a state needs besides pages, None for each that cannot be read. Returns
        None if there is no such state.
        """
        holdings = self._holdings
        if holdings.host.get("state", key) is None and holdings.disk.get("state", key) is None:
            return None
        needs: tuple[What, ...] = ("tail", "state") if has_tail else ("state",)
        return [holdings.find(what, key) for what in needs]

    # --- what is brought --------------------------------------------------------------------------

    def begin(self, load: Load) -> None:
        """Pins the sources of a load. Items on disk get places in host memory first."""
        self._holdings.stats.loads += 1
        state = self._loads[load.number] = _Load()
        missing = []
        for arrival in load.arrivals:
            item = ready(self._holdings.host.get(arrival.what, arrival.key))
            if item is not None:
                self._fetch(state, arrival, item, is_on_disk=False)
            else:
                missing.append(arrival)
        if missing:
            self._promote(state, missing)

    def _fetch(self, load: _Load, arrival: Arrival, item: Item, *, is_on_disk: bool) -> None:
        host = self._holdings.host
        host.pin((item,))
        host.touch(item)
        load.pinned.append((host, item))
        load.fetches.append(Fetch(arrival=arrival, item=item, is_on_disk=is_on_disk))

    def _promote(self, load: _Load, missing: Sequence[Arrival]) -> None:
        """Allocates places in host memory for items to be read from disk."""
        host, disk = self._holdings.host, self._holdings.disk
        sources = [self._holdings.find(each.what, each.key) for each in missing]
        items = [item for item in sources if item is not None]
        num_states = sum(item.what == "state" for item in items)
        parent = items[0].parent if items else b""
        are_all = len(items) == len(missing)
        if not are_all or not host.make_room(len(items) - num_states, num_states, parent, []):
            load.is_possible = False
            return
        for arrival, item in zip(missing, items, strict=True):
            disk.pin((item,))
            load.pinned.append((disk, item))
            disk.touch(item)
            copy = host.add(item.what, item.key, item.parent, item.tokens, item.position)
            self._fetch(load, arrival, copy, is_on_disk=True)

    def fetches(self, number: int) -> list[Fetch] | None:
        """Returns the sources of a load, or None if it cannot be done."""
        load = self._loads[number]
        return load.fetches if load.is_possible else None

    def end(self, number: int) -> None:
        """Unpins a load's sources and drops the places that were not filled."""
        load = self._loads.pop(number)
        for tier, item in load.pinned:
            tier.unpin((item,))
        for fetch in load.fetches:
            if fetch.is_on_disk and not fetch.item.is_ready and not fetch.item.pins:
                self._holdings.host.remove(fetch.item)

    def failed(self, missing: Sequence[tuple[What, bytes]]) -> None:
        """Counts a failed load and removes the items whose files are missing or unusable."""
        self._holdings.stats.failed_loads += 1
        for what, key in missing:
            item = self._holdings.disk.get(what, key)
            if item is not None:
                self._holdings.disk.remove(item)
