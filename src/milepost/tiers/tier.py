"""Contents of one tier: pages and states by key, and the places they occupy.

A page depends on the page before it, and a state on its last full page, as in the device's tree,
but by key: the parent may be elsewhere. Nothing is evicted before its dependents. Pages without
dependents go first, then states that a deeper one has superseded, then the least recently used
states. Pinned items, which are being read or written, stay. Pages and states have separate budgets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from milepost.cache.plans import What


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """A page, a tail's page or a state."""

    key: bytes
    what: What
    parent: bytes
    """Key of the page before it, or of the root."""
    tokens: bytes
    """A page's own tokens, or the tail's, packed; empty if only the file's name was read."""
    position: int
    """Number of tokens up to its end."""
    place: int
    is_ready: bool = False
    """Whether its contents are there; set by `Tier.fill`."""
    pins: int = 0
    is_gone: bool = False
    """Whether it was removed; its place stays taken while it is pinned."""


@dataclass(slots=True, kw_only=True)
class FreePlaces:
    """Free places of one kind."""

    capacity: int
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = list(range(self.capacity - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.capacity - len(self.free)


class OnChange(Protocol):
    """A callback for items that become readable in a tier, or stop being so."""

    def __call__(self, what: What, key: bytes, *, is_there: bool) -> None: ...


class Tier:
    """A tier with room for `num_pages` pages and `num_states` states."""

    def __init__(self, *, num_pages: int, num_states: int) -> None:
        self.budgets = {
            "pages": FreePlaces(capacity=num_pages),
            "states": FreePlaces(capacity=num_states),
        }
        self.num_evicted = 0
        self.num_changes = 0
        """Number of changes to the items that are there and can be read."""
        self.on_change: OnChange | None = None
        self.unready: set[bytes] = set()
        """Keys of pages whose contents are not there."""
        self._items: dict[What, dict[bytes, Item]] = {"page": {}, "tail": {}, "state": {}}
        self._states_on: dict[bytes, dict[int, dict[bytes, Item]]] = {}
        """Maps a page or root to the states that belong to it, by position. Any number of states
        may end at one position, after different tokens."""
        self._dependents: dict[bytes, int] = {}
        """Number of pages and states that depend on a page, which may be absent."""
        self._loose: OrderedDict[bytes, Item] = OrderedDict()
        """Pages without dependents, and tails without a state."""
        self._superseded: OrderedDict[bytes, Item] = OrderedDict()
        self._newest: OrderedDict[bytes, Item] = OrderedDict()
        """States that are not superseded, the least recently used first, as in `_superseded`."""

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __iter__(self) -> Iterator[Item]:
        for items in self._items.values():
            yield from items.values()

    def get(self, what: What, key: bytes) -> Item | None:
        return self._items[what].get(key)

    @property
    def pages(self) -> Mapping[bytes, Item]:
        """Pages by key."""
        return self._items["page"]

    def is_needed(self, what: What, key: bytes) -> bool:
        """Whether a page has dependents, or a tail's state is there."""
        return key in (self._items["state"] if what == "tail" else self._dependents)

    @property
    def state_positions(self) -> Mapping[bytes, Collection[int]]:
        """Maps a page or root to the positions of the states that belong to it."""
        return self._states_on

    # --- what comes -------------------------------------------------------------------------------

    def make_room(self, num_pages: int, num_states: int, keep: bytes, gone: list[Item]) -> bool:
        """Evicts until `num_pages` and `num_states` places are free. Returns False if that is
        impossible. Evicted items are added to `gone` in either case. The page `keep`, the parent of
        the new items, stays.
        """
        pages, states = self.budgets["pages"], self.budgets["states"]
        if num_pages <= len(pages.free) and num_states <= len(states.free):
            return True
        if num_pages > pages.capacity or num_states > states.capacity:
            return False
        kept = self._items["page"].get(keep)
        if kept is not None:
            self.pin((kept,))
        try:
            while len(states.free) < num_states:
                if not self._evict_state(gone):
                    return False
            while len(pages.free) < num_pages:
                if not (self._evict_page(gone) or self._evict_state(gone)):
                    return False
        finally:
            if kept is not None:
                self.unpin((kept,))
        return True

    def add(self, what: What, key: bytes, parent: bytes, tokens: bytes, position: int) -> Item:
        """Adds an item, for which there must be room. Its contents are not there yet."""
        place = self._budget(what).free.pop()
        item = Item(
            key=key, what=what, parent=parent, tokens=tokens, position=position, place=place
        )
        assert key not in self._items[what], "an item is there once"
        self._items[what][key] = item
        self.num_changes += 1
        if what == "page":
            self.unready.add(key)
        if what != "tail":
            self._count_dependent(parent, +1)
            self._mark_current(parent)
        if what != "state" and not self.is_needed(what, key):
            self._loose[key] = item
        elif what == "state":
            self._loose.pop(key, None)  # its tail is needed now
            self._states_on.setdefault(parent, {}).setdefault(position, {})[key] = item
            self._newest[key] = item
            self._supersede(item)
        return item

    def fill(self, item: Item) -> None:
        """Marks an item's contents as there."""
        item.is_ready = True
        if item.what == "page":
            self.unready.discard(item.key)
        self.num_changes += 1
        if self.on_change is not None:
            self.on_change(item.what, item.key, is_there=True)

    def _supersede(self, newer: Item) -> None:
        """Marks the next shallower state on the path as superseded: it will hardly be asked for
        again, as long as no other path branches off there or before.
        """
        page = newer.parent
        while self._dependents[page] <= 2:
            shallower = [
                state for state in self._states_of(page) if state.position < newer.position
            ]
            if shallower:
                self._reorder(shallower[0], self._newest, self._superseded)
                return
            above = self._items["page"].get(page)
            if above is None or self._dependents[page] > 1:
                return
            page = above.parent

    def _mark_current(self, page: bytes) -> None:
        """Makes a page's states current again: a new branch starts there, so they may be asked for.
        With more than three dependents they have been revived before.
        """
        if page in self._states_on and self._dependents[page] <= 3:
            for state in self._states_of(page):
                self._reorder(state, self._superseded, self._newest)

    def _states_of(self, page: bytes) -> Iterator[Item]:
        """Yields the states that belong to a page."""
        for states in self._states_on.get(page, {}).values():
            yield from states.values()

    @staticmethod
    def _reorder(
        state: Item, left: OrderedDict[bytes, Item], joined: OrderedDict[bytes, Item]
    ) -> None:
        if left.pop(state.key, None) is not None:
            joined[state.key] = state

    def touch(self, item: Item) -> None:
        """Notes that a state or a page was used: its path is likely to be used again."""
        for order in (self._loose, self._superseded, self._newest):
            if item.key in order:
                order.move_to_end(item.key)

    # --- what goes --------------------------------------------------------------------------------

    def pin(self, items: Iterable[Item]) -> None:
        for item in items:
            item.pins += 1

    def unpin(self, items: Iterable[Item]) -> None:
        for item in items:
            item.pins -= 1
            assert item.pins >= 0, "an item is unpinned as often as it was pinned"
            if item.is_gone and not item.pins:
                self._free(item)

    def _free(self, item: Item) -> None:
        self._budget(item.what).free.append(item.place)

    def _budget(self, what: What) -> FreePlaces:
        return self.budgets["states" if what == "state" else "pages"]

    def remove(self, item: Item) -> None:
        """Removes an item that is no longer there, whatever depends on it."""
        del self._items[item.what][item.key]
        self.num_changes += 1
        item.is_gone = True
        if not item.pins:
            self._free(item)
        if item.what == "state":
            self._superseded.pop(item.key, None)
            self._newest.pop(item.key, None)
            self._forget_state(item)
            tail = self._items["tail"].get(item.key)
            if tail is not None:
                self._loose[tail.key] = tail
        else:
            self._loose.pop(item.key, None)
        if item.what == "page":
            self.unready.discard(item.key)
        if item.what != "tail":
            self._count_dependent(item.parent, -1)
        if item.is_ready and self.on_change is not None:
            self.on_change(item.what, item.key, is_there=False)

    def clear(self) -> None:
        """Removes all items."""
        for item in list(self):
            self.remove(item)

    def _evict_page(self, gone: list[Item]) -> bool:
        item = next((item for item in self._loose.values() if not item.pins), None)
        return item is not None and self._evict(item, gone)

    def _evict_state(self, gone: list[Item]) -> bool:
        for order in (self._superseded, self._newest):
            for item in order.values():
                tail = self._items["tail"].get(item.key)
                if not item.pins and not (tail is not None and tail.pins):
                    return self._evict(item, gone)
        return False

    def _evict(self, item: Item, gone: list[Item]) -> bool:
        """Evicts an item, and a state's tail with it."""
        tail = self._items["tail"].get(item.key) if item.what == "state" else None
        for each in (item, tail):
            if each is not None:
                self.remove(each)
                gone.append(each)
        self.num_evicted += 1
        return True

    def _forget_state(self, state: Item) -> None:
        on_page = self._states_on[state.parent]
        siblings = on_page[state.position]
        del siblings[state.key]
        if not siblings:
            del on_page[state.position]
        if not on_page:
            del self._states_on[state.parent]

    def _count_dependent(self, page: bytes, num: int) -> None:
        """Adds `num` to the number of a page's dependents."""
        left = self._dependents.get(page, 0) + num
        if left:
            self._dependents[page] = left
            self._loose.pop(page, None)
            return
        del self._dependents[page]
        above = self._items["page"].get(page)
        if above is not None:
            self._loose[page] = above
