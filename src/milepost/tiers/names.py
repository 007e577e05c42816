"""Names of files, which alone suffice to build the index, and the order in which the index takes
them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from milepost.cache.plans import What
from milepost.tiers.tier import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """The name of a file: kind, key, parent and position of the item it holds."""

    what: What
    key: bytes
    parent: bytes
    position: int


def name_of(item: Item) -> FileName:
    return FileName(what=item.what, key=item.key, parent=item.parent, position=item.position)


@dataclass(slots=True, kw_only=True)
class News:
    """Results of a look at a directory."""

    found: list[FileName] = field(default_factory=list)
    """New files, in the order in which to register them: if room runs out, items without dependents
    are evicted first, then those registered longest ago.
    """
    loose: list[FileName] = field(default_factory=list)
    """Parts that nothing needs, although there was time for their heads to appear."""
    lost: list[FileName] = field(default_factory=list)
    """Files that were there at the last look and have gone."""


class Finds:
    """Collects new files, part by part, until all folders have been scanned: a state is rarely in
    the same folder as its pages. `is_needed` tells whether a part is needed
    that no collected item needs.
    """

    def __init__(self, head: What, is_needed: Callable[[FileName], bool]) -> None:
        self._head = head
        self._is_needed = is_needed
        self._new: list[FileName] = []
        self._waiting: list[FileName] = []
        """Parts of items that may have been half written when they were found."""

    def add(self, names: Iterable[FileName]) -> None:
        self._new += names

    def end_round(self) -> News:
        """Returns the news of a complete round through the folders."""
        new, waiting = set(self._new), self._waiting
        whole, rest = _with_their_pages([*waiting, *self._new], self._head)
        needed, rest = self._parted(rest)
        self._new, self._waiting = [], [name for name in rest if name in new]
        return News(found=whole + needed, loose=[name for name in rest if name not in new])

    def _parted(self, rest: list[FileName]) -> tuple[list[FileName], list[FileName]]:
        """Splits parts into those that a registered item needs and the others."""
        needed: list[FileName] = []
        others: list[FileName] = []
        parents: set[bytes] = set()
        for name in sorted(rest, key=_order, reverse=True):
            if name.key in parents or self._is_needed(name):
                needed.append(name)
                parents.add(name.parent)
            else:
                others.append(name)
        return needed, others


def _with_their_pages(
    names: Iterable[FileName], head: What
) -> tuple[list[FileName], list[FileName]]:
    """Returns heads, the shallowest first, each after those of its parts not returned yet, and the
    parts that no head needs. Heads are states or, without states, the last pages of paths.
    """
    parts = {(name.what, name.key): name for name in names}
    inner = {name.parent for name in parts.values() if name.what == "page"}
    heads = [name for name in parts.values() if name.what == head]
    if head == "page":
        heads = [name for name in heads if name.key not in inner]
    found: list[FileName] = []
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


def _order(name: FileName) -> tuple[int, bytes, str]:
    return name.position, name.key, name.what
