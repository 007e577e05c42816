"""Which pages and states go down to host memory and to disk, and which come up again. Pure.

Down to the host, *ahead* of their eviction: the states that are likely to be asked for (ends of
prompts and answers, marks, branch points), with the pages before them, a few with each plan. At its
eviction: any other state that is expected to save enough. In a model without states in slots every
page goes down. Down to disk: what is in host memory and is worth a load from there. Up: the state
for which loading saves most against computing, if anything.

An item can be read once its copy is said to be there (`stored`, `written`), and is pinned while
somebody reads or writes it. Places are numbers in the host's arena, the same on every rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

from milepost.cache import Cache, Kind, Lost, Match
from milepost.cache.events import Cleared, Departure, Event, PagesCached, StateCached
from milepost.cache.plans import Arrival, Store, What
from milepost.cache.tree import checkpoint_key
from milepost.scheduler.outside import Offer
from milepost.scheduler.plans import Load
from milepost.scheduler.request import Request
from milepost.tiers.rates import Rates
from milepost.tiers.tier import Item, Tier

AHEAD = frozenset(Kind) - {Kind.SPARSE, Kind.PREEMPTED, Kind.LOADED}
"""States that go down ahead of their eviction. Those inside a prompt are soon superseded, for the
most part, and a preempted request is soon back.
"""
MIN_SCORE = 16.0
"""Tokens that another state must be expected to save when it is evicted."""
MAX_CANDIDATES = 4
"""States of a prompt whose costs are compared, the deepest first."""
MAX_QUEUED = 4096
"""States that wait to go down; then the oldest is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes, in bytes where they say so."""

    page_bytes: int
    state_bytes: int
    num_host_pages: int
    num_host_states: int
    num_disk_pages: int = 0
    num_disk_states: int = 0
    max_pages_under_way: int = 64
    """On their way from the device; 0 bounds nothing."""
    max_states_under_way: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Where an arrival comes from: a place in host memory, which has to be read from disk first if
    `is_on_disk`.
    """

    arrival: Arrival
    item: Item
    is_on_disk: bool


@dataclass(slots=True, kw_only=True)
class TierStats:
    """Counters since the start."""

    stored: int = 0
    """Items that reached host memory."""
    written: int = 0
    """Items that reached the disk."""
    loads: int = 0
    failed_loads: int = 0
    too_late: int = 0
    """States that left the device before there was room to copy them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """A page on the device, by when it may be copied."""

    key: bytes
    parent: bytes
    tokens: bytes
    position: int
    id: int
    num_moves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A state that may go down."""

    key: bytes
    parent: bytes
    tail: bytes
    position: int
    slot: int
    tail_page: int | None
    num_moves: int


@dataclass(slots=True, kw_only=True)
class _Load:
    fetches: list[Fetch] = field(default_factory=list)
    pinned: list[tuple[Tier, Item]] = field(default_factory=list)
    is_possible: bool = True


class Tiers:
    """The keeper of a scheduler, and a source for it, over what `cache` holds."""

    name = "tiers"

    def __init__(self, cache: Cache, limits: Limits, rates: Rates | None = None) -> None:
        self.limits = limits
        self.rates = rates if rates is not None else Rates()
        self.stats = TierStats()
        self.host = Tier(num_pages=limits.num_host_pages, num_states=limits.num_host_states)
        self.disk = Tier(num_pages=limits.num_disk_pages, num_states=limits.num_disk_states)
        self._cache = cache
        self._size = cache.page_size
        self._has_states = cache.slots_each > 0
        self._queue: OrderedDict[bytes, int] = OrderedDict()
        """States to go down ahead of their eviction: key -> slot. Without states in slots pages,
        by key.
        """
        self._departures: list[Departure] = []
        self._loads: dict[int, _Load] = {}
        self._under_way: dict[tuple[What, bytes], Item] = {}
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        """States, or pages where there are none, that may go down to disk."""
        self.gone_from_disk: list[Item] = []
        """Whose files are to be deleted; whoever does so empties it."""

    # --- up ---------------------------------------------------------------------------------------

    def offer(self, request: Request, match: Match) -> Offer:
        """The state for which loading saves most, if it is worth it."""
        chain, here = request.chain, match.state_length
        digests = chain.full_digests()
        first = match.path.num_pages
        readable, known = self._reach(digests, first)
        is_far = (not self._is_on_host(("page", digest)) for digest in digests[first:known])
        num_far = [0, *accumulate(is_far)]  # on disk, of the first pages behind the device's
        best: Offer | None = None
        best_saved, deepest, late = 0.0, here, here
        positions = self._positions(request, digests, readable, known, match)
        for position, key, parts in islice(positions, MAX_CANDIDATES):
            if parts is None:
                late = max(late, position)
                continue
            deepest = max(deepest, position)
            num_pages = max(position // self._size - first, 0)
            num_from_disk = num_far[num_pages]
            rest_from_disk = [what for what in parts if not self._is_on_host((what, key))]
            seconds = self._load_seconds(num_pages, parts, num_from_disk, rest_from_disk)
            saved = self.rates.compute_seconds(position - here) - seconds
            if saved > best_saved:
                num_tokens = position - here
                on_disk = min(num_from_disk * self._size, num_tokens)
                if rest_from_disk:
                    on_disk = num_tokens
                tokens = {"host": num_tokens - on_disk, "disk": on_disk}
                tokens = {place: num for place, num in tokens.items() if num}
                best_saved = saved
                best = Offer(source=self.name, position=position, tokens=tokens)
        lost = [(Lost.NOT_WORTH_LOADING, deepest)] if deepest > here else []
        if late > deepest:
            lost.insert(0, (Lost.LATE_COPY, late))
        return best if best is not None else Offer(source=self.name, lost=tuple(lost))

    def _is_on_host(self, one: tuple[What, bytes]) -> bool:
        return self._ready(self.host.get(*one)) is not None

    def _reach(self, digests: Sequence[bytes], first: int) -> tuple[int, int]:
        """How many of the pages are on the device, or behind those in any tier and can be read; and
        how many with those whose copies are on their way.
        """
        readable = first
        while readable < len(digests) and self._find("page", digests[readable]) is not None:
            readable += 1
        known = readable
        while known < len(digests) and self._is_known("page", digests[known]):
            known += 1
        return readable, known

    def _is_known(self, what: What, key: bytes) -> bool:
        return any(tier.get(what, key) is not None for tier in (self.host, self.disk))

    def _find(self, what: What, key: bytes) -> Item | None:
        """Where something can be read; nowhere while it is on its way to host memory."""
        on_host = self.host.get(what, key)
        return self._ready(on_host if on_host is not None else self.disk.get(what, key))

    @staticmethod
    def _ready(item: Item | None) -> Item | None:
        return item if item is not None and item.is_ready else None

    def _positions(
        self, request: Request, digests: Sequence[bytes], readable: int, known: int, match: Match
    ) -> Iterator[tuple[int, bytes, tuple[What, ...] | None]]:
        """Positions behind the match that can be gone on from with the first `known` pages, the
        deepest first: each with its state's key and what it needs beside pages; None in place of
        that where a copy is not there yet, as behind the first `readable` pages.
        """
        chain, limit, above = request.chain, len(request.chain) - 1, match.state_length
        if not self._has_states:
            for depth in (known, readable):
                position = min(depth * self._size, limit - limit % self._size)
                if position > above:
                    yield position, b"", () if position <= readable * self._size else None
            return
        for pages in range(known, above // self._size - 1, -1):
            page = digests[pages - 1] if pages else chain.root
            start = pages * self._size
            found: dict[int, bytes] = {}
            for tier in (self.host, self.disk):
                for state in tier.states_behind(page):
                    if above < state.position <= limit and self._agrees(request, state, page):
                        found[state.position] = state.key
            for position in sorted(found, reverse=True):
                needs: tuple[What, ...] = ("state",)
                if position > max(start, match.kv_length, above):
                    needs = ("tail", "state")
                is_there = pages <= readable
                is_there = is_there and all(self._find(what, found[position]) for what in needs)
                yield position, found[position], needs if is_there else None

    def _agrees(self, request: Request, state: Item, page: bytes) -> bool:
        """Whether a state is of the prompt's own tokens."""
        begin = state.position - state.position % self._size
        tail = request.chain.token_bytes(begin, state.position)
        return checkpoint_key(page, tail) == state.key

    def _load_seconds(
        self,
        num_pages: int,
        rest: Sequence[What],
        num_pages_from_disk: int,
        rest_from_disk: Sequence[What],
    ) -> float:
        all_bytes = num_pages * self.limits.page_bytes + sum(map(self._bytes, rest))
        disk_bytes = num_pages_from_disk * self.limits.page_bytes
        disk_bytes += sum(map(self._bytes, rest_from_disk))
        return self.rates.load_seconds(all_bytes - disk_bytes, disk_bytes)

    def _bytes(self, what: What) -> int:
        return self.limits.state_bytes if what == "state" else self.limits.page_bytes

    def begin(self, load: Load) -> None:
        """Pin what a load reads; what is on disk gets places in host memory first."""
        self.stats.loads += 1
        state = self._loads[load.number] = _Load()
        missing = []
        for arrival in load.arrivals:
            item = self._ready(self.host.get(arrival.what, arrival.key))
            if item is not None:
                self._fetch(state, arrival, item, is_on_disk=False)
            else:
                missing.append(arrival)
        if missing:
            self._promote(state, missing)

    def _fetch(self, load: _Load, arrival: Arrival, item: Item, *, is_on_disk: bool) -> None:
        self.host.pin((item,))
        if item.what == "state":
            self.host.touch(item)
        load.pinned.append((self.host, item))
        load.fetches.append(Fetch(arrival=arrival, item=item, is_on_disk=is_on_disk))

    def _promote(self, load: _Load, missing: Sequence[Arrival]) -> None:
        """Make places for what is to be read from disk."""
        sources = [self._ready(self.disk.get(each.what, each.key)) for each in missing]
        found = [item for item in sources if item is not None]
        num_states = sum(item.what == "state" for item in found)
        parent = found[0].parent if found else b""
        is_known = len(found) == len(missing) and not any(
            self.host.get(item.what, item.key) for item in found
        )
        room = None
        if is_known:
            room = self.host.make_room(len(found) - num_states, num_states, parent)
        if room is None:
            load.is_possible = False
            return
        for arrival, item in zip(missing, found, strict=True):
            self.disk.pin((item,))
            load.pinned.append((self.disk, item))
            if item.what == "state":
                self.disk.touch(item)
            copy = self.host.add(item.what, item.key, item.parent, item.tokens, item.position)
            self._fetch(load, arrival, copy, is_on_disk=True)

    def fetches(self, number: int) -> list[Fetch] | None:
        """Where what a load fills comes from; None if it cannot be brought."""
        load = self._loads[number]
        return load.fetches if load.is_possible else None

    def read(self, item: Item) -> None:
        """What was on disk is in its place in host memory, and is what it should be."""
        item.is_ready = True

    def end(self, number: int) -> None:
        load = self._loads.pop(number)
        for tier, item in load.pinned:
            tier.unpin((item,))
        for fetch in load.fetches:
            if fetch.is_on_disk and not fetch.item.is_ready and not fetch.item.pins:
                self.host.remove(fetch.item)

    def failed(self, missing: Sequence[tuple[What, bytes]]) -> None:
        """A load fails for want of these files: they are no good, or gone."""
        self.stats.failed_loads += 1
        for what, key in missing:
            item = self.disk.get(what, key)
            if item is not None:
                self.disk.remove(item)

    # --- down -------------------------------------------------------------------------------------

    def note(self, events: tuple[Event, ...]) -> None:
        """What has come to the device and gone from it."""
        for event in events:
            match event:
                case StateCached() if event.kind in AHEAD:
                    self._enqueue(event.key, event.id)
                case PagesCached() if not self._has_states:
                    for key, id_ in zip(event.keys, event.ids, strict=True):
                        self._enqueue(key, id_)
                case Departure():
                    self._departures.append(event)
                case Cleared():
                    self._queue.clear()
                    self._departures.clear()

    def _enqueue(self, key: bytes, id_: int) -> None:
        what: What = "state" if self._has_states else "page"
        if self.host.get(what, key) is None:
            self._queue[key] = id_
            if len(self._queue) > MAX_QUEUED:
                self._queue.popitem(last=False)

    @property
    def has_stores(self) -> bool:
        """Whether something waits to go down to host memory."""
        return bool(self._queue or self._departures)

    def take_stores(self, num_moves: int) -> tuple[Store, ...]:
        """What the next plan copies: what leaves and is not kept yet, then some that may leave."""
        stores: list[Store] = []
        departures, self._departures = self._departures, []
        if departures:
            self._keep_leaving(departures, num_moves, stores)
        while self._queue:
            key, id_ = next(iter(self._queue.items()))
            candidate = self._resident(key, id_, num_moves)
            if candidate is not None and not self._store(candidate, {}, num_moves, stores):
                break
            self._queue.pop(key, None)
        return tuple(sorted(stores, key=lambda store: store.num_moves))

    def _keep_leaving(
        self, departures: Sequence[Departure], num_moves: int, stores: list[Store]
    ) -> None:
        leaving = {each.key: each for each in departures if each.what == "page"}
        tails = {each.key: each.id for each in departures if each.what == "tail"}
        wanted = "state" if self._has_states else "page"
        for each in departures:
            if each.what != wanted:
                continue
            was_queued = self._queue.pop(each.key, None) is not None
            if self.host.get(each.what, each.key) is not None:
                continue
            if wanted == "page":
                candidate: _Candidate | _Page = _page_of(each)
            else:
                if each.score < MIN_SCORE and not was_queued:
                    continue
                candidate = _Candidate(
                    key=each.key,
                    parent=each.parent,
                    tail=each.tokens,
                    position=each.position,
                    slot=each.id,
                    tail_page=tails.get(each.key),
                    num_moves=each.num_moves,
                )
            if not self._store(candidate, leaving, num_moves, stores):
                self.stats.too_late += 1

    def _resident(self, key: bytes, id_: int, num_moves: int) -> _Candidate | _Page | None:
        """A state, or a page, that is queued, if it is still where it was."""
        tree = self._cache.tree
        if not self._has_states:
            node = tree.nodes.get(key)
            if node is None or self.host.get("page", key) is not None:
                return None
            return self._page(key, {}, num_moves)
        checkpoint = tree.at_slot.get(id_)
        if checkpoint is None or checkpoint.key != key or self.host.get("state", key) is not None:
            return None
        return _Candidate(
            key=key,
            parent=checkpoint.node.digest,
            tail=checkpoint.tail,
            position=checkpoint.position,
            slot=checkpoint.slot,
            tail_page=checkpoint.tail_page,
            num_moves=num_moves,
        )

    def _page(self, key: bytes, leaving: Mapping[bytes, Departure], num_moves: int) -> _Page | None:
        """A page on the device, or one that leaves it with this plan."""
        node = self._cache.tree.nodes.get(key)
        if node is not None:
            assert node.parent is not None, "a page has a parent"
            return _Page(
                key=key,
                parent=node.parent.digest,
                tokens=node.tokens,
                position=node.depth * self._size,
                id=node.page,
                num_moves=num_moves,
            )
        departure = leaving.get(key)
        return _page_of(departure) if departure is not None else None

    def _store(
        self,
        candidate: _Candidate | _Page,
        leaving: Mapping[bytes, Departure],
        num_moves: int,
        stores: list[Store],
    ) -> bool:
        """Name the copies that something needs, as many as may be under way; False if it has to be
        tried again, or is lost if it leaves. Pages go before the state that needs them. What finds
        no room at all is given up.
        """
        page_key, depth = candidate.parent, candidate.position // self._size
        missing: list[_Page] = []
        if isinstance(candidate, _Page):
            missing, depth = [candidate], depth - 1
        while depth and self.host.get("page", page_key) is None:
            page = self._page(page_key, leaving, num_moves)
            if page is None:
                return True  # its pages have gone: it is of no use
            missing.append(page)
            page_key, depth = page.parent, depth - 1
        missing.reverse()
        for page in missing:
            if not self._may_begin(1, 0):
                return False
            if not self._evict(1, 0, page.parent):
                return True
            self._put("page", page, page.id, page.num_moves, page.tokens, stores)
        if isinstance(candidate, _Page):
            self._may_write(candidate.key)
            return True
        num_tails = int(candidate.tail_page is not None)
        if not self._may_begin(num_tails, 1):
            return False
        if not self._evict(num_tails, 1, candidate.parent):
            return True
        if candidate.tail_page is not None:
            moves = candidate.num_moves
            self._put("tail", candidate, candidate.tail_page, moves, candidate.tail, stores)
        self._put("state", candidate, candidate.slot, candidate.num_moves, candidate.tail, stores)
        self._may_write(candidate.key)
        return True

    def _may_begin(self, num_pages: int, num_states: int) -> bool:
        """Whether so much more may be on its way."""
        limits = self.limits
        if not limits.max_pages_under_way:
            return True
        states = sum(what == "state" for what, _ in self._under_way)
        pages = len(self._under_way) - states
        return (
            pages + num_pages <= limits.max_pages_under_way
            and states + num_states <= limits.max_states_under_way
        )

    def _evict(self, num_pages: int, num_states: int, keep: bytes) -> bool:
        return self.host.make_room(num_pages, num_states, keep) is not None

    def _put(
        self,
        what: What,
        source: _Candidate | _Page,
        id_: int,
        num_moves: int,
        tokens: bytes,
        stores: list[Store],
    ) -> None:
        item = self.host.add(what, source.key, source.parent, tokens, source.position)
        self.host.pin((item,))
        self._under_way[what, source.key] = item
        stores.append(
            Store(key=source.key, what=what, id=id_, place=item.place, num_moves=num_moves)
        )

    def stored(self, what: What, key: bytes) -> None:
        """A copy has reached its place in host memory."""
        self.stats.stored += 1
        self._end_store(what, key, is_there=True)

    def not_stored(self, what: What, key: bytes) -> None:
        """A copy did not reach its place, and nobody writes there any more."""
        self._end_store(what, key, is_there=False)

    def _end_store(self, what: What, key: bytes, *, is_there: bool) -> None:
        """A state and its tail go together, once neither is on its way."""
        item = self._under_way.pop((what, key))
        self.host.unpin((item,))
        item.is_ready = is_there
        parts: tuple[What, ...] = ("page",) if what == "page" else ("state", "tail")
        if any((part, key) in self._under_way for part in parts):
            return
        found = [self.host.get(part, key) for part in parts]
        if not all(part is None or part.is_ready for part in found):
            self.host.remove(item)

    def forget_stores(self) -> None:
        """No copy is on its way, whatever plans said."""
        for what, key in list(self._under_way):
            self.not_stored(what, key)

    def clear(self) -> None:
        """Forget what host memory holds, but for what is being copied."""
        self._queue.clear()
        self.host.clear()

    # --- to disk ----------------------------------------------------------------------------------

    def _may_write(self, key: bytes) -> None:
        if self.limits.num_disk_pages and self.disk.get(self._head, key) is None:
            self._unwritten[key] = None

    @property
    def _head(self) -> What:
        return "state" if self._has_states else "page"

    @property
    def has_writes(self) -> bool:
        return bool(self._unwritten)

    def take_writes(self, most: int) -> list[tuple[Item, Item]]:
        """Up to about so many items of host memory that are to be written to disk, with what stands
        for each there; both pinned until `written`. Pages go before the state that needs them.
        """
        writes: list[tuple[Item, Item]] = []
        for key in list(self._unwritten):
            if len(writes) >= most:
                break
            head = self.host.get(self._head, key)
            if head is not None and not self._are_ready(head):
                continue  # it is still on its way down
            del self._unwritten[key]
            if head is not None and self._is_worth_writing(head):
                writes += self._write(head)
        return writes

    def _are_ready(self, head: Item) -> bool:
        tail = self.host.get("tail", head.key)
        return head.is_ready and (tail is None or tail.is_ready)

    def _is_worth_writing(self, head: Item) -> bool:
        if not self._has_states:
            return True
        loading = self.rates.load_seconds(0, self.limits.state_bytes)
        return self.rates.compute_seconds(head.position) > loading

    def _write(self, head: Item) -> list[tuple[Item, Item]]:
        path: list[Item] = []
        above, depth = head.parent, head.position // self._size
        if head.what == "page":
            depth -= 1
        while depth and self.disk.get("page", above) is None:
            page = self._ready(self.host.get("page", above))
            if page is None:
                return []
            path.append(page)
            above, depth = page.parent, depth - 1
        path.reverse()
        tail = self.host.get("tail", head.key) if head.what == "state" else None
        path += [tail, head] if tail is not None else [head]
        path = [item for item in path if self.disk.get(item.what, item.key) is None]
        num_states = sum(item.what == "state" for item in path)
        gone = self.disk.make_room(len(path) - num_states, num_states, above)
        if gone is None:
            return []
        self.gone_from_disk += gone
        writes = []
        for item in path:
            copy = self.disk.add(item.what, item.key, item.parent, item.tokens, item.position)
            self.host.pin((item,))
            self.disk.pin((copy,))
            writes.append((item, copy))
        return writes

    def written(self, item: Item, copy: Item, *, is_there: bool) -> None:
        """A file is there, or could not be written."""
        self.host.unpin((item,))
        self.disk.unpin((copy,))
        if is_there:
            copy.is_ready = True
            self.stats.written += 1
        elif self.disk.get(copy.what, copy.key) is copy:
            self.disk.remove(copy)

    def found(self, what: What, key: bytes, parent: bytes, position: int) -> None:
        """A file that is there at the start, or that another engine has written."""
        if self.disk.get(what, key) is not None:
            return
        num_states = int(what == "state")
        gone = self.disk.make_room(1 - num_states, num_states, parent)
        if gone is None:
            return
        self.gone_from_disk += gone
        self.disk.add(what, key, parent, b"", position).is_ready = True


def _page_of(departure: Departure) -> _Page:
    return _Page(
        key=departure.key,
        parent=departure.parent,
        tokens=departure.tokens,
        position=departure.position,
        id=departure.id,
        num_moves=departure.num_moves,
    )
