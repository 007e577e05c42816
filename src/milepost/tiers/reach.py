"""Finds the pages that a prompt can use through a state in host memory or on disk. Pure.

A page is *whole* if it and all pages before it can be read, on the device, in host memory or from
disk. A state can be loaded if its page is whole and its own contents, and its tail's, can be read.
Then all pages up to it are reachable through the memory that holds the state. Without states in
slots, every whole page is reachable through its own memory. Salted pages are left out: they have
another root.

Changes are only noted, and processed when somebody asks, with the contents at that time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from milepost.cache import Cache
from milepost.cache.events import Cleared, Departure, Event, PagesCached, Where
from milepost.cache.plans import What
from milepost.tiers.file_format import FileName, name_of
from milepost.tiers.holdings import Holdings, ready
from milepost.tiers.page_graph import PageGraph
from milepost.tiers.tier import Item

MAX_AT_ONCE = 1000
"""Largest number of additions processed at a time: a step waits for them, and a directory may have
a million files.
"""


class Reach:
    """Tracks the pages that `holdings` make reachable for `cache`."""

    def __init__(self, cache: Cache, holdings: Holdings) -> None:
        self._cache, self._holdings = cache, holdings
        self._root = cache.chain(()).root
        self._come: dict[tuple[bool, bytes], None] = {}
        """(whether it is a state, key) of items that became readable in one more memory."""
        self._gone: dict[tuple[bool, bytes], None] = {}
        """(whether it is a state, key) of items that are readable in one memory less."""
        self._unread: deque[FileName] = deque()
        self._disk_rests = holdings.disk_rests
        for tier in (holdings.host, holdings.disk):
            tier.on_change = self._note_item
        self._begin()

    def _begin(self) -> None:
        """Starts over, with nothing reported."""
        self._graph = PageGraph(self._root, self._holdings.page_size)
        self._unread.clear()
        self._gone.clear()
        self._come = dict.fromkeys((False, key) for key in self._cache.tree.nodes)
        for tier in (self._holdings.host, self._holdings.disk):
            for item in tier:
                self._note_item(item.what, item.key, is_there=True)

    # --- what has changed -------------------------------------------------------------------------

    def note(self, events: Iterable[Event]) -> None:
        """Records which items were cached on the device or evicted from it."""
        for event in events:
            match event:
                case PagesCached():
                    self._come.update(dict.fromkeys((False, key) for key in event.keys))
                case Departure(what="page"):
                    self._gone[False, event.key] = None
                case Cleared():
                    self._begin()

    def _note_item(self, what: What, key: bytes, *, is_there: bool) -> None:
        """Records that an item became readable from a tier, or ceased to be. A tail has its state's
        key."""
        changed = self._come if is_there else self._gone
        changed[what != "page", key] = None

    @property
    def is_behind(self) -> bool:
        """Whether some changes have not been processed."""
        has_changed = self._holdings.disk_rests != self._disk_rests
        return bool(self._come or self._gone) or has_changed

    def take_events(self) -> tuple[Event, ...]:
        """Returns the pages that have become reachable or unreachable since the last call; after a
        `Cleared`, all that are reachable. Removals are processed first and completely, so no event
        depends on an item that has gone.
        """
        if self._holdings.disk_rests != self._disk_rests:
            self._disk_rests = self._holdings.disk_rests
            for item in self._holdings.disk:
                self._note_item(item.what, item.key, is_there=not self._disk_rests)
        gone, self._gone = self._gone, {}
        for is_state, key in gone:
            self._take_in(is_state, key)
        for is_state, key in list(islice(self._come, MAX_AT_ONCE)):
            del self._come[is_state, key]
            self._take_in(is_state, key)
        return self._graph.take_events()

    def _take_in(self, is_state: bool, key: bytes) -> None:
        """Updates a page or a state to the current contents."""
        if is_state:
            self._set_state(key)
            return
        known, has_states = self._find(key), self._holdings.has_states
        if known is not None:
            self._graph.add(key, *known)
            if not has_states:
                self._graph.hang(key, key, self._places("page", key))
            return
        if not has_states and self._graph.page_of(key) is not None:
            self._graph.hang(key, key, ())
        self._graph.drop(key)

    def _set_state(self, key: bytes) -> None:
        item = self._holdings.host.get("state", key) or self._holdings.disk.get("state", key)
        at = self._graph.page_of(key) if item is None else item.parent
        if at is not None:
            self._graph.hang(key, at, self._places("state", key))

    # --- what is there ----------------------------------------------------------------------------

    def _find(self, key: bytes) -> tuple[bytes, int, bytes] | None:
        """Returns parent, position and tokens of a page that can be read somewhere and whose tokens
        are known.
        """
        node = self._cache.tree.nodes.get(key)
        if node is not None and node.parent is not None:
            return node.parent.digest, node.depth * self._cache.page_size, node.content
        for item in self._items("page", key):
            if item.tokens:
                return item.parent, item.position, item.tokens
        on_disk = ready(self._holdings.disk.get("page", key))
        if on_disk is not None and not on_disk.tokens:
            self._unread.append(name_of(on_disk))
        return None

    def _items(self, what: What, key: bytes) -> list[Item]:
        """Returns the copies that can be read in host memory and on disk."""
        holdings = self._holdings
        copies = [ready(holdings.host.get(what, key))]
        if not holdings.disk_rests:
            copies.append(ready(holdings.disk.get(what, key)))
        return [item for item in copies if item is not None]

    def _places(self, what: What, key: bytes) -> tuple[Where, ...]:
        """Returns the places from which an item can be loaded, as far as that does not depend on
        other pages.
        """
        copies = self._items(what, key)
        if what == "state" and copies and copies[0].position % self._holdings.page_size:
            copies = copies if self._items("tail", key) else []
        host = self._holdings.host.get(what, key)
        return tuple("host" if item is host else "disk" for item in copies)

    @property
    def are_unread(self) -> bool:
        """Whether there are files whose tokens are unknown."""
        return bool(self._unread)

    def take_unread(self, most: int) -> list[FileName]:
        """Returns at most `most` pages on disk that cannot be reported before their tokens are
        known. The caller reads the tokens and calls `learn`.
        """
        return [self._unread.popleft() for _ in range(min(most, len(self._unread)))]

    def learn(self, key: bytes, tokens: bytes) -> None:
        """Takes a page's tokens, read from its file."""
        for tier in (self._holdings.host, self._holdings.disk):
            item = tier.get("page", key)
            if item is not None and not item.tokens:
                item.tokens = tokens
        self._come[False, key] = None
