"""Names of files, from which alone their index is built, and the order in which it reads them.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from milepost.cache.plans import What
from milepost.tiers.tier import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """What a file holds."""

    what: What
    key: bytes
    parent: bytes
    position: int


def name_of(item: Item) -> Name:
    return Name(what=item.what, key=item.key, parent=item.parent, position=item.position)


@dataclass(slots=True, kw_only=True)
class News:
    """What a look at a directory has found."""

    found: list[Name] = field(default_factory=list)
    """In the order in which they are to be filed: where there is no room for all, what is filed
    goes first that nothing hangs on, and then what was filed longest ago.
    """
    loose: list[Name] = field(default_factory=list)
    """Parts that nothing needs, though there was time for what does."""
    lost: list[Name] = field(default_factory=list)
    """Those that were there at the last look."""


class Finds:
    """Gathers what is found, part by part, until all folders have been looked through: a state is
    most often in another one than its pages are. `is_needed` says so of what hangs on nothing that
    is gathered.
    """

    def __init__(self, head: What, is_needed: Callable[[Name], bool]) -> None:
        self._head = head
        self._is_needed = is_needed
        self._new: list[Name] = []
        self._waiting: list[Name] = []
        """Parts of what may have been half written when they were found."""

    def add(self, names: Iterable[Name]) -> None:
        self._new += names

    def end_round(self) -> News:
        """All folders have been looked through since the last time."""
        new, waiting = set(self._new), self._waiting
        found, rest = _with_their_pages([*waiting, *self._new], self._head)
        needed, rest = self._parted(rest)
        self._new, self._waiting = [], [name for name in rest if name in new]
        return News(found=found + needed, loose=[name for name in rest if name not in new])

    def _parted(self, rest: list[Name]) -> tuple[list[Name], list[Name]]:
        """Those that something needs which is filed already, and the others."""
        needed: list[Name] = []
        others: list[Name] = []
        parents: set[bytes] = set()
        for name in sorted(rest, key=_order, reverse=True):
            if name.key in parents or self._is_needed(name):
                needed.append(name)
                parents.add(name.parent)
            else:
                others.append(name)
        return needed, others


def _with_their_pages(names: Iterable[Name], head: What) -> tuple[list[Name], list[Name]]:
    """States, the shallowest first, each behind those of its parts that have not come yet; and what
    none of them needs. Without states the pages at the ends of paths take their place.
    """
    parts = {(name.what, name.key): name for name in names}
    inner = {name.parent for name in parts.values() if name.what == "page"}
    heads = [name for name in parts.values() if name.what == head]
    if head == "page":
        heads = [name for name in heads if name.key not in inner]
    found: list[Name] = []
    for one in sorted(heads, key=_order):
        path = [parts.pop((one.what, one.key))]
        tail = parts.pop(("tail", one.key), None)
        if tail is not None:
            path.append(tail)
        above = one.parent
        while (page := parts.pop(("page", above), None)) is not None:
            path.append(page)
            above = page.parent
        found += reversed(path)
    return found, list(parts.values())


def _order(name: Name) -> tuple[int, bytes, str]:
    return name.position, name.key, name.what
