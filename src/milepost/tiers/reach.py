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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from milepost.cache import Cache
from milepost.cache.events import (
    Cleared,
    Departure,
    Event,
    PagesCached,
    PagesReachable,
    PagesUnreachable,
    Where,
)
from milepost.cache.plans import What
from milepost.tiers.holdings import Holdings, ready
from milepost.tiers.names import FileName, name_of
from milepost.tiers.tier import Item

PLACES: Final[tuple[Where, ...]] = ("host", "disk")
MAX_AT_ONCE = 1000
"""Most additions processed at a time: a step waits for them, and a directory may have a million
files.
"""


@dataclass(slots=True, eq=False)
class _Page:
    """A page that can be read or has dependents."""

    key: bytes
    parent: bytes = b""
    position: int = 0
    tokens: bytes = b""
    is_there: bool = False
    is_whole: bool = False
    below: dict[bytes, None] = field(default_factory=dict)
    """Readable pages directly after this one."""
    states: dict[bytes, tuple[Where, ...]] = field(default_factory=dict)
    """Items on this page that can be loaded once it is whole, with their places."""
    num_reaching: dict[Where, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    """Place -> number of this page's states there, plus the pages directly after it that are
    reachable through it; 0 unless the page is whole.
    """


class Reach:
    """Tracks the pages that `holdings` make reachable for `cache`."""

    def __init__(self, cache: Cache, holdings: Holdings) -> None:
        self._cache, self._holdings = cache, holdings
        self._root = cache.chain(()).root
        self._pages: dict[bytes, _Page] = {}
        self._states: dict[bytes, bytes] = {}
        """State -> the page it belongs to."""
        self._come: dict[tuple[bool, bytes], None] = {}
        """(whether it is a state, key) of items that became readable in one more memory."""
        self._gone: dict[tuple[bool, bytes], None] = {}
        """(whether it is a state, key) of items that are readable in one memory less."""
        self._events: list[Event] = []
        self._unread: deque[FileName] = deque()
        self._disk_rests = holdings.disk_rests
        for tier in (holdings.host, holdings.disk):
            tier.on_change = self._note_item
        self._begin()

    def _begin(self) -> None:
        """Starts over, with nothing reported."""
        root = _Page(self._root, is_there=True, is_whole=True)
        self._pages = {self._root: root}
        self._states.clear()
        self._unread.clear()
        self._gone.clear()
        self._come = dict.fromkeys((False, key) for key in self._cache.tree.nodes)
        for tier in (self._holdings.host, self._holdings.disk):
            for item in tier:
                self._note_item(item.what, item.key, is_there=True)

    # --- what has changed -------------------------------------------------------------------------

    def note(self, events: Iterable[Event]) -> None:
        """Notes items that have come to the device or gone from it."""
        for event in events:
            match event:
                case PagesCached():
                    self._come.update(dict.fromkeys((False, key) for key in event.keys))
                case Departure(what="page"):
                    self._gone[False, event.key] = None
                case Cleared():
                    self._begin()

    def _note_item(self, what: What, key: bytes, *, is_there: bool) -> None:
        """Notes that an item can be read from a tier, or no longer. A tail has its state's key."""
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
        events, self._events = tuple(self._events), []
        return events

    def _take_in(self, is_state: bool, key: bytes) -> None:
        """Updates a page or a state to the current contents."""
        if is_state:
            self._set_state(key)
            return
        found = self._find(key)
        if found is None:
            self._drop_page(key)
        else:
            self._add_page(key, *found)

    # --- what is there ----------------------------------------------------------------------------

    def _find(self, key: bytes) -> tuple[bytes, int, bytes] | None:
        """Returns parent, position and tokens of a page that can be read somewhere and whose tokens
        are known.
        """
        node = self._cache.tree.nodes.get(key)
        if node is not None and node.parent is not None:
            return node.parent.digest, node.depth * self._cache.page_size, node.tokens
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
        found = [ready(holdings.host.get(what, key))]
        if not holdings.disk_rests:
            found.append(ready(holdings.disk.get(what, key)))
        return [item for item in found if item is not None]

    def _places(self, what: What, key: bytes) -> tuple[Where, ...]:
        """Returns the places from which an item can be loaded, as far as that does not depend on
        other pages.
        """
        found = self._items(what, key)
        if what == "state" and found and found[0].position % self._holdings.page_size:
            found = found if self._items("tail", key) else []
        host = self._holdings.host.get(what, key)
        return tuple("host" if item is host else "disk" for item in found)

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

    # --- pages and states come and go -------------------------------------------------------------

    def _page(self, key: bytes) -> _Page:
        """Returns a page; an absent one is created if it is unknown."""
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = _Page(key)
        return page

    def _forget(self, page: _Page) -> None:
        """Forgets a page if it is absent and nothing depends on it."""
        if not (page.is_there or page.below or page.states):
            del self._pages[page.key]

    def _add_page(self, key: bytes, parent: bytes, position: int, tokens: bytes) -> None:
        page = self._page(key)
        if not page.is_there:
            page.parent, page.position, page.tokens = parent, position, tokens
            page.is_there = True
            above = self._page(parent)
            above.below[key] = None
            if above.is_whole:
                self._make_whole(page)
        if not self._holdings.has_states:
            self._hang(key, page, self._places("page", key))

    def _drop_page(self, key: bytes) -> None:
        page = self._pages.get(key)
        if page is None or not page.is_there:
            return
        if not self._holdings.has_states:
            self._hang(key, page, ())
        if page.is_whole:
            self._break(page)
        page.is_there = False
        page.tokens = b""
        above = self._pages[page.parent]
        del above.below[key]
        self._forget(above)
        self._forget(page)

    def _set_state(self, key: bytes) -> None:
        item = self._holdings.host.get("state", key) or self._holdings.disk.get("state", key)
        at = self._states.get(key) if item is None else item.parent
        if at is not None:
            page = self._page(at)
            self._hang(key, page, self._places("state", key))
            self._forget(page)

    def _hang(self, key: bytes, page: _Page, places: tuple[Where, ...]) -> None:
        """Updates the places of an item that belongs to a page."""
        before = page.states.pop(key, ())
        self._states.pop(key, None)
        if places:
            page.states[key] = places
            self._states[key] = page.key
        if page.is_whole:
            for where in PLACES:
                if where in places and where not in before:
                    self._raise(page, where)
                elif where in before and where not in places:
                    self._lower(page, where)

    # --- what that makes reachable ----------------------------------------------------------------

    def _make_whole(self, top: _Page) -> None:
        """Marks a page, and those after it, as whole."""
        below = list(self._from(top))
        for page in below:
            page.is_whole = True
        for page in below:
            for places in page.states.values():
                for where in places:
                    self._raise(page, where)

    def _break(self, top: _Page) -> None:
        """Marks a page that goes, and those after it, as not whole."""
        below = list(self._from(top))
        for page in below:
            for places in page.states.values():
                for where in places:
                    self._lower(page, where)
        for page in below:
            page.is_whole = False

    def _from(self, top: _Page) -> Iterator[_Page]:
        left = [top]
        while left:
            page = left.pop()
            yield page
            left += [self._pages[key] for key in page.below]

    def _raise(self, page: _Page, where: Where) -> None:
        """Counts one more way to reach a whole page, and the pages before it that become
        reachable.
        """
        run = []
        while True:
            page.num_reaching[where] += 1
            if page.num_reaching[where] > 1 or page.key == self._root:
                break
            run.append(page)
            page = self._pages[page.parent]
        if run:
            self._events.append(self._reached(run[::-1], where))

    def _lower(self, page: _Page, where: Where) -> None:
        run = []
        while True:
            page.num_reaching[where] -= 1
            if page.num_reaching[where] or page.key == self._root:
                break
            run.append(page.key)
            page = self._pages[page.parent]
        if run:
            self._events.append(PagesUnreachable(keys=tuple(run), where=where))

    def _reached(self, run: Sequence[_Page], where: Where) -> PagesReachable:
        return PagesReachable(
            keys=tuple(page.key for page in run),
            parent=run[0].parent,
            tokens=b"".join(page.tokens for page in run),
            position=run[0].position - self._holdings.page_size,
            is_salted=False,
            where=where,
        )
