"""What goes down to host memory. Pure.

*Ahead* of their eviction: the states that are likely to be asked for (ends of prompts and answers,
marks, branch points), with the pages before them, a few with each plan. At its eviction: any other
state that is expected to save enough. In a model without states in slots every page goes down.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from milepost.cache import Cache, Kind
from milepost.cache.events import Cleared, Departure, Event, PagesCached, StateCached
from milepost.cache.plans import What
from milepost.scheduler.plans import Store
from milepost.tiers.holdings import Holdings
from milepost.tiers.tier import Item

AHEAD = frozenset(Kind) - {Kind.SPARSE, Kind.PREEMPTED, Kind.LOADED}
"""States that go down ahead of their eviction. Those inside a prompt are soon superseded, for the
most part, and a preempted request is soon back.
"""
MIN_SCORE = 16.0
"""Tokens that another state must be expected to save when it is evicted."""
MAX_QUEUED = 4096
"""States that wait to go down; then the oldest is forgotten."""


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
class _StoreCandidate:
    """A state that may go down."""

    key: bytes
    parent: bytes
    tail: bytes
    position: int
    slot: int
    tail_page: int | None
    num_moves: int


class Stores:
    """Names what of `cache` is copied to host memory; `on_named` is told each head."""

    def __init__(self, cache: Cache, holdings: Holdings, on_named: Callable[[bytes], None]) -> None:
        self._cache = cache
        self._holdings = holdings
        self._host = holdings.host
        self._on_named = on_named
        self._size = cache.page_size
        self._queue: OrderedDict[bytes, int] = OrderedDict()
        """States to go down ahead of their eviction: key -> slot. Without states in slots pages,
        by key.
        """
        self._later: OrderedDict[bytes, int] = OrderedDict()
        """Those that go once nothing else waits."""
        self._departures: list[Departure] = []
        self._under_way: dict[tuple[What, bytes], Item] = {}
        self._num_states_under_way = 0

    def note(self, events: tuple[Event, ...]) -> None:
        """What has come to the device and gone from it."""
        for event in events:
            match event:
                case StateCached() if event.kind in AHEAD:
                    self._enqueue(event.key, event.id)
                    self._pass_over_above(event)
                case PagesCached() if not self._holdings.has_states:
                    for key, id_ in zip(event.keys, event.ids, strict=True):
                        self._enqueue(key, id_)
                case Departure():
                    self._departures.append(event)
                case Cleared():
                    self.clear()
                    self._departures.clear()

    def _enqueue(self, key: bytes, id_: int) -> None:
        if self._host.get(self._holdings.head, key) is None:
            self._queue[key] = id_
            if len(self._queue) > MAX_QUEUED:
                self._queue.popitem(last=False)

    def _pass_over_above(self, event: StateCached) -> None:
        """An answer's end is what the next turn asks for: its prompt's, if that still waits, goes
        behind all others, for who asks the same again.
        """
        checkpoint = self._cache.tree.at_slot.get(event.id)
        if checkpoint is None or checkpoint.key != event.key:
            return
        above = checkpoint.above
        if above is not None and above.kind == Kind.PROMPT_END and len(above.below) == 1:
            slot = self._queue.pop(above.key, None)
            if slot is not None:
                self._later[above.key] = slot
                if len(self._later) > MAX_QUEUED:
                    self._later.popitem(last=False)

    @property
    def are_any(self) -> bool:
        """Whether something waits to go down to host memory."""
        return bool(self._queue or self._later or self._departures)

    def take(self, num_moves: int) -> tuple[Store, ...]:
        """What the next plan copies: what leaves and is not kept yet, then some that may leave."""
        stores: list[Store] = []
        departures, self._departures = self._departures, []
        if departures:
            self._keep_leaving(departures, num_moves, stores)
        while queue := self._queue or self._later:
            key, id_ = next(iter(queue.items()))
            candidate = self._resident(key, id_, num_moves)
            if candidate is not None and not self._store(candidate, {}, num_moves, stores):
                break
            queue.pop(key, None)
        return tuple(sorted(stores, key=lambda store: store.num_moves))

    def _keep_leaving(
        self, departures: Sequence[Departure], num_moves: int, stores: list[Store]
    ) -> None:
        leaving = {each.key: each for each in departures if each.what == "page"}
        tails = {each.key: each.id for each in departures if each.what == "tail"}
        wanted = self._holdings.head
        for each in departures:
            if each.what != wanted:
                continue
            queued = [queue.pop(each.key, None) for queue in (self._queue, self._later)]
            if self._host.get(each.what, each.key) is not None:
                continue
            if wanted == "page":
                candidate: _StoreCandidate | _Page = _page_of(each)
            else:
                if each.score < MIN_SCORE and queued == [None, None]:
                    continue
                candidate = _StoreCandidate(
                    key=each.key,
                    parent=each.parent,
                    tail=each.tokens,
                    position=each.position,
                    slot=each.id,
                    tail_page=tails.get(each.key),
                    num_moves=each.num_moves,
                )
            if not self._store(candidate, leaving, num_moves, stores):
                self._holdings.stats.too_late += 1

    def _resident(self, key: bytes, id_: int, num_moves: int) -> _StoreCandidate | _Page | None:
        """A state, or a page, that is queued, if it is still where it was."""
        tree = self._cache.tree
        if not self._holdings.has_states:
            node = tree.nodes.get(key)
            if node is None or self._host.get("page", key) is not None:
                return None
            return self._page(key, {}, num_moves)
        checkpoint = tree.at_slot.get(id_)
        if checkpoint is None or checkpoint.key != key or self._host.get("state", key) is not None:
            return None
        return _StoreCandidate(
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
        candidate: _StoreCandidate | _Page,
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
        while depth and self._host.get("page", page_key) is None:
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
            self._on_named(candidate.key)
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
        self._on_named(candidate.key)
        return True

    def _may_begin(self, num_pages: int, num_states: int) -> bool:
        """Whether so much more may be on its way."""
        limits = self._holdings.limits
        if not limits.max_pages_under_way:
            return True
        states = self._num_states_under_way + num_states
        pages = len(self._under_way) - self._num_states_under_way + num_pages
        return pages <= limits.max_pages_under_way and states <= limits.max_states_under_way

    def _evict(self, num_pages: int, num_states: int, keep: bytes) -> bool:
        return self._host.make_room(num_pages, num_states, keep) is not None

    def _put(
        self,
        what: What,
        source: _StoreCandidate | _Page,
        id_: int,
        num_moves: int,
        tokens: bytes,
        stores: list[Store],
    ) -> None:
        item = self._host.add(what, source.key, source.parent, tokens, source.position)
        self._host.pin((item,))
        self._under_way[what, source.key] = item
        self._num_states_under_way += what == "state"
        stores.append(
            Store(key=source.key, what=what, id=id_, place=item.place, num_moves=num_moves)
        )

    def stored(self, what: What, key: bytes) -> None:
        """A copy has reached its place in host memory."""
        self._holdings.stats.stored += 1
        self._end_store(what, key, is_there=True)

    def not_stored(self, what: What, key: bytes) -> None:
        """A copy did not reach its place, and nobody writes there any more."""
        self._end_store(what, key, is_there=False)

    def _end_store(self, what: What, key: bytes, *, is_there: bool) -> None:
        """A state and its tail go together, once neither is on its way."""
        item = self._under_way.pop((what, key))
        self._num_states_under_way -= what == "state"
        self._host.unpin((item,))
        if is_there:
            self._host.fill(item)
        parts: tuple[What, ...] = ("page",) if what == "page" else ("state", "tail")
        if any((part, key) in self._under_way for part in parts):
            return
        found = [self._host.get(part, key) for part in parts]
        if not all(part is None or part.is_ready for part in found):
            self._host.remove(item)

    def forget_all(self) -> None:
        """No copy is on its way, whatever plans said."""
        for what, key in list(self._under_way):
            self.not_stored(what, key)

    def clear(self) -> None:
        """Nothing is wanted any more."""
        self._queue.clear()
        self._later.clear()


def _page_of(departure: Departure) -> _Page:
    return _Page(
        key=departure.key,
        parent=departure.parent,
        tokens=departure.tokens,
        position=departure.position,
        id=departure.id,
        num_moves=departure.num_moves,
    )
