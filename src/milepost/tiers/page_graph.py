"""Pages by what they depend on: which are whole, and which a state makes reachable. Pure.

`reach` says what these words mean, and which items there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from milepost.cache.events import Event, PagesReachable, PagesUnreachable, Where

PLACES: Final[tuple[Where, ...]] = ("host", "disk")


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
    """Maps a place to the number of this page's states there, plus the pages directly after it that
    are reachable through it; 0 unless the page is whole."""


class PageGraph:
    """The pages after `root`, with the items that can be loaded on each."""

    def __init__(self, root: bytes, page_size: int) -> None:
        self._root, self._page_size = root, page_size
        self._pages = {root: _Page(root, is_there=True, is_whole=True)}
        self._page_of: dict[bytes, bytes] = {}
        self._events: list[Event] = []

    def take_events(self) -> tuple[Event, ...]:
        """Returns the pages that have become reachable or unreachable since the last call."""
        events, self._events = tuple(self._events), []
        return events

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

    def add(self, key: bytes, parent: bytes, position: int, tokens: bytes) -> None:
        """Adds a page that can be read."""
        page = self._page(key)
        if not page.is_there:
            page.parent, page.position, page.tokens = parent, position, tokens
            page.is_there = True
            above = self._page(parent)
            above.below[key] = None
            if above.is_whole:
                self._make_whole(page)

    def drop(self, key: bytes) -> None:
        """Takes away a page that can no longer be read."""
        page = self._pages.get(key)
        if page is None or not page.is_there:
            return
        if page.is_whole:
            self._break(page)
        page.is_there = False
        page.tokens = b""
        above = self._pages[page.parent]
        del above.below[key]
        self._forget(above)
        self._forget(page)

    def hang(self, key: bytes, at: bytes, places: tuple[Where, ...]) -> None:
        """Updates the places of an item that belongs to the page `at`."""
        page = self._page(at)
        before = page.states.pop(key, ())
        self._page_of.pop(key, None)
        if places:
            page.states[key] = places
            self._page_of[key] = at
        if page.is_whole:
            for where in PLACES:
                if where in places and where not in before:
                    self._raise(page, where)
                elif where in before and where not in places:
                    self._lower(page, where)
        self._forget(page)

    def page_of(self, key: bytes) -> bytes | None:
        """Returns the page that an item hangs on."""
        return self._page_of.get(key)

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
            position=run[0].position - self._page_size,
            is_salted=False,
            where=where,
        )
