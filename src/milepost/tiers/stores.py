"""Decides what to store in host memory. Pure.

States that are likely to be needed (ends of prompts and answers, marks, branch points) are stored
*ahead* of their eviction, with the pages before them, a few with each plan. Any other state is
stored when it is evicted, if it is expected to save enough. In a model without states in slots,
every page is stored.
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
"""Kinds of states that are stored ahead of their eviction. Most states inside a prompt are soon
superseded, and a preempted request soon resumes.
"""
MIN_SCORE = 16.0
"""Tokens that any other state must be expected to save to be stored when it is evicted."""
MAX_QUEUED = 4096
"""Largest number of states that wait to be stored; beyond that the oldest is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """An item on the device that may be copied to host memory."""

    what: What
    key: bytes
    parent: bytes
    tokens: bytes
    """A page's own tokens, or a state's tail."""
    position: int
    id: int
    num_moves: int
    tail_page: int | None = None
    windows: tuple[int, ...] = ()
    """Ids of the window pages of a state."""


class Stores:
    """Names the items of `cache` to copy to host memory. Calls `on_named` with each head and its
    position.
    """

    def __init__(
        self, cache: Cache, holdings: Holdings, on_named: Callable[[bytes, int], None]
    ) -> None:
        self._cache = cache
        self._holdings = holdings
        self._host = holdings.host
        self._on_named = on_named
        self._size = cache.page_size
        self._queue: OrderedDict[bytes, int] = OrderedDict()
        """Maps the keys of states to store ahead of their eviction to slots. Without states in
        slots, pages by key."""
        self._later: OrderedDict[bytes, int] = OrderedDict()
        """States to store once `_queue` is empty."""
        self._departures: list[Departure] = []
        self._under_way: dict[tuple[What, bytes], Item] = {}
        self._num_states_under_way = 0

    def note(self, events: tuple[Event, ...]) -> None:
        """Records which items were cached on the device or evicted from it."""
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
        """Lowers the priority of a prompt's end when its answer's end is cached: the next turn asks
        for the answer's end. If the prompt's end still waits, it goes after all others, for repeats
        of the same prompt.
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
        """Whether anything waits to be stored in host memory."""
        return bool(self._queue or self._later or self._departures)

    def take(self, num_moves: int) -> tuple[Store, ...]:
        """Returns the copies for the next plan: evicted items that are not stored yet first, then
        some that wait.
        """
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
        """Returns a queued state or page if it is still where it was."""
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
            windows=checkpoint.windows,
        )

    def _page(
        self, key: bytes, leaving: Mapping[bytes, Departure], num_moves: int
    ) -> _Source | None:
        """Returns a page that is on the device or leaves it with this plan."""
        node = self._cache.tree.nodes.get(key)
        if node is None:
            departure = leaving.get(key)
            return _leaving(departure, None) if departure is not None else None
        assert node.parent is not None, "a page has a parent"
        return _Source(
            what="page",
            key=key,
            parent=node.parent.digest,
            tokens=node.content,
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
        """Adds the copies that an item needs, as many as may be under way. Returns False if the
        item must be tried again, or is lost if it leaves. Pages go before the state that needs
        them. An item is dropped if it finds no room at all or has lost a page.
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
        """Returns an item and the pages it needs, as far as host memory lacks them, the item last,
        with its tail. Returns nothing if a page has gone."""
        needed = [[source]]
        above, depth = source.parent, (source.position - 1) // self._size
        if source.what == "state":
            depth = source.position // self._size
            needed = [parts] if (parts := self._with_tail(source)) else []
        while depth and self._host.get("page", above) is None:
            page = self._page(above, leaving, num_moves)
            if page is None:
                return []
            needed.append([page])
            above, depth = page.parent, depth - 1
        needed.reverse()
        return needed

    def _with_tail(self, state: _Source) -> list[_Source]:
        parts = [state] if self._host.get("state", state.key) is None else []
        if state.tail_page is not None and self._host.get("tail", state.key) is None:
            parts.insert(0, replace(state, what="tail", id=state.tail_page, windows=()))
        return parts

    def _may_begin(self, num_pages: int, num_states: int) -> bool:
        """Whether `num_pages` and `num_states` more items may be on their way."""
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
        place, moves = item.place, source.num_moves
        store = Store(
            key=key, what=what, id=source.id, place=place, num_moves=moves, windows=source.windows
        )
        stores.append(store)

    def stored(self, what: What, key: bytes) -> None:
        """Reports that a copy has reached its place in host memory."""
        self._holdings.stats.stored += 1
        self._end_store(what, key, is_there=True)

    def not_stored(self, what: What, key: bytes) -> None:
        """Reports that a copy failed and nothing writes to its place any more."""
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
        """Drops all copies that are on their way."""
        for what, key in list(self._under_way):
            self.not_stored(what, key)

    def clear(self) -> None:
        """Drops all items that wait to be stored."""
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
        windows=departure.windows,
    )
