"""Decides what to store in host memory. Pure.

*Ahead* of their eviction: the states that are likely to be needed (ends of prompts and answers,
marks, branch points), with the pages before them, a few with each plan. At its eviction: any other
state that is expected to save enough. In a model without states in slots every page is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
class _Source:
    """Something on the device that may be copied down."""

    what: What
    key: bytes
    parent: bytes
    tokens: bytes
    """A page's own; of a state the tail."""
    position: int
    id: int
    num_moves: int
    tail_page: int | None = None


class Stores:
    """Names what of `cache` is copied to host memory; `on_named` is told each head
    and its position."""

    def __init__(
        self, cache: Cache, holdings: Holdings, on_named: Callable[[bytes, int], None]
    ) -> None:
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
                    self._enqueue(event.key, event.position, event.id)
                    self._pass_over_above(event)
                case PagesCached() if not self._holdings.has_states:
                    for key, id_ in zip(event.keys, event.ids, strict=True):
                        self._enqueue(key, 0, id_)
                case Departure():
                    self._departures.append(event)
                case Cleared():
                    self.clear()
                    self._departures.clear()

    def _enqueue(self, key: bytes, position: int, id_: int) -> None:
        if not self._holdings.has(self._host, key, position):
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
            source = self._resident(key, id_, num_moves)
            if source is not None and not self._store(source, {}, num_moves, stores):
                break
            queue.pop(key, None)
        return tuple(sorted(stores, key=lambda store: store.num_moves))

    def _keep_leaving(
        self, departures: Sequence[Departure], num_moves: int, stores: list[Store]
    ) -> None:
        leaving = {each.key: each for each in departures if each.what == "page"}
        tails = {each.key: each.id for each in departures if each.what == "tail"}
        for each in departures:
            if each.what != self._holdings.head:
                continue
            queued = [queue.pop(each.key, None) for queue in (self._queue, self._later)]
            if self._holdings.has(self._host, each.key, each.position):
                continue
            is_state = each.what == "state"
            if is_state and each.score < MIN_SCORE and queued == [None, None]:
                continue
            source = _leaving(each, tails.get(each.key) if is_state else None)
            if not self._store(source, leaving, num_moves, stores):
                self._holdings.stats.too_late += 1

    def _resident(self, key: bytes, id_: int, num_moves: int) -> _Source | None:
        """A state, or a page, that is queued, if it is still where it was."""
        if not self._holdings.has_states:
            if self._host.get("page", key) is not None:
                return None
            return self._page(key, {}, num_moves)
        checkpoint = self._cache.tree.at_slot.get(id_)
        if checkpoint is None or checkpoint.key != key:
            return None
        if self._holdings.has(self._host, key, checkpoint.position):
            return None
        return _Source(
            what="state",
            key=key,
            parent=checkpoint.node.digest,
            tokens=checkpoint.tail,
            position=checkpoint.position,
            id=checkpoint.slot,
            num_moves=num_moves,
            tail_page=checkpoint.tail_page,
        )

    def _page(
        self, key: bytes, leaving: Mapping[bytes, Departure], num_moves: int
    ) -> _Source | None:
        """A page on the device, or one that leaves it with this plan."""
        node = self._cache.tree.nodes.get(key)
        if node is None:
            departure = leaving.get(key)
            return _leaving(departure, None) if departure is not None else None
        assert node.parent is not None, "a page has a parent"
        return _Source(
            what="page",
            key=key,
            parent=node.parent.digest,
            tokens=node.tokens,
            position=node.depth * self._size,
            id=node.page,
            num_moves=num_moves,
        )

    def _store(
        self,
        source: _Source,
        leaving: Mapping[bytes, Departure],
        num_moves: int,
        stores: list[Store],
    ) -> bool:
        """Name the copies that something needs, as many as may be under way; False if it has to be
        tried again, or is lost if it leaves. Pages go before the state that needs them. What finds
        no room at all is given up, and so is what has lost a page.
        """
        for parts in self._missing(source, leaving, num_moves):
            num_states = sum(part.what == "state" for part in parts)
            num_pages = len(parts) - num_states
            if not self._may_begin(num_pages, num_states):
                return False
            if not self._host.make_room(num_pages, num_states, parts[0].parent, []):
                return True
            for part in parts:
                self._put(part, stores)
        self._on_named(source.key, source.position)
        return True

    def _missing(
        self, source: _Source, leaving: Mapping[bytes, Departure], num_moves: int
    ) -> list[list[_Source]]:
        """What host memory lacks of what something needs, itself last, with its tail; nothing if a
        page has gone.
        """
        found = [[source]]
        above, depth = source.parent, (source.position - 1) // self._size
        if source.what == "state":
            depth = source.position // self._size
            found = [parts] if (parts := self._with_tail(source)) else []
        while depth and self._host.get("page", above) is None:
            page = self._page(above, leaving, num_moves)
            if page is None:
                return []
            found.append([page])
            above, depth = page.parent, depth - 1
        found.reverse()
        return found

    def _with_tail(self, state: _Source) -> list[_Source]:
        parts = [state] if self._host.get("state", state.key) is None else []
        if state.tail_page is not None and self._host.get("tail", state.key) is None:
            parts.insert(0, replace(state, what="tail", id=state.tail_page))
        return parts

    def _may_begin(self, num_pages: int, num_states: int) -> bool:
        """Whether so much more may be on its way."""
        limits = self._holdings.limits
        if not limits.max_pages_under_way:
            return True
        states = self._num_states_under_way + num_states
        pages = len(self._under_way) - self._num_states_under_way + num_pages
        return pages <= limits.max_pages_under_way and states <= limits.max_states_under_way

    def _put(self, source: _Source, stores: list[Store]) -> None:
        what, key = source.what, source.key
        item = self._host.add(what, key, source.parent, source.tokens, source.position)
        self._host.pin((item,))
        self._under_way[what, key] = item
        self._num_states_under_way += what == "state"
        stores.append(
            Store(key=key, what=what, id=source.id, place=item.place, num_moves=source.num_moves)
        )

    def stored(self, what: What, key: bytes) -> None:
        """A copy has reached its place in host memory."""
        self._holdings.stats.stored += 1
        self._end_store(what, key, is_there=True)

    def not_stored(self, what: What, key: bytes) -> None:
        """A copy did not reach its place, and nobody writes there any more."""
        self._end_store(what, key, is_there=False)

    def _end_store(self, what: What, key: bytes, *, is_there: bool) -> None:
        item = self._under_way.pop((what, key))
        self._num_states_under_way -= what == "state"
        self._host.unpin((item,))
        if is_there:
            self._host.fill(item)
        else:
            self._host.remove(item)

    def forget_all(self) -> None:
        """No copy is on its way, whatever plans said."""
        for what, key in list(self._under_way):
            self.not_stored(what, key)

    def clear(self) -> None:
        """Nothing is wanted any more."""
        self._queue.clear()
        self._later.clear()


def _leaving(departure: Departure, tail_page: int | None) -> _Source:
    return _Source(
        what=departure.what,
        key=departure.key,
        parent=departure.parent,
        tokens=departure.tokens,
        position=departure.position,
        id=departure.id,
        num_moves=departure.num_moves,
        tail_page=tail_page,
    )
