"""Keeps the ids that are free: in a list or, for the pages of a unified pool, by unit. A unit holds
one slot or several pages.

Knows nothing of references. The ids handed out depend only on the calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class FreeList:
    """Free ids out of `total`, numbered from `first` to before `end`. The id freed last is taken
    first."""

    def __init__(self, total: int, first: int = 0) -> None:
        self.first = first
        self.end = first + total
        self._ids = list(range(self.end - 1, first - 1, -1))

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, num: int) -> list[int]:
        if not num:
            return []
        ids = self._ids[: -num - 1 : -1]
        del self._ids[-num:]
        return ids

    def give(self, ids: Sequence[int]) -> None:
        self._ids.extend(ids)


class FreePages:
    """Free pages of a unified pool. Unit u consists of the pages from u x `each` on. `units` are
    the units that hold nothing; they start at 1, since unit 0 holds the zero slot.

    Long runs get whole units, and the rest goes into units that already hold pages, so that few
    units are kept by few pages. A unit returns to `units` as soon as all its pages are free.
    """

    def __init__(self, units: FreeList, each: int) -> None:
        self._units = units
        self._each = each
        self._loose: dict[int, list[int]] = {}
        self.num_loose = 0
        """Number of free pages in units that also hold pages in use."""
        self.first = each
        self.end = units.end * each

    def __len__(self) -> int:
        return self.num_loose + self._each * len(self._units)

    def loose(self) -> Iterator[tuple[int, int]]:
        """Yields the units with both free pages and others, with their numbers of free pages."""
        return ((unit, len(found)) for unit, found in self._loose.items())

    def take_for(self, unit: int) -> list[tuple[int, int]]:
        """Takes a page outside a unit for each page there that is not free, and returns both. The
        caller has made sure that there are enough."""
        free = self._loose.pop(unit, [])
        held = sorted(set(range(unit * self._each, (unit + 1) * self._each)) - set(free))
        taken = self.take(len(held))
        if free:
            self._loose[unit] = free
        return list(zip(held, taken, strict=True))

    def take(self, num: int) -> list[int]:
        ids: list[int] = []
        each = self._each
        while num - len(ids) >= each and len(self._units):
            (unit,) = self._units.take(1)
            ids.extend(range(unit * each, (unit + 1) * each))
        while len(ids) < num:
            if not self._loose:
                (unit,) = self._units.take(1)
                self._loose[unit] = list(range((unit + 1) * each - 1, unit * each - 1, -1))
                self.num_loose += each
            unit, found = next(reversed(self._loose.items()))
            some = found[: len(ids) - num - 1 : -1]
            del found[-len(some) :]
            if not found:
                del self._loose[unit]
            self.num_loose -= len(some)
            ids.extend(some)
        return ids

    def give(self, ids: Sequence[int]) -> None:
        each, loose = self._each, self._loose
        for id_ in ids:
            unit = id_ // each
            found = loose.setdefault(unit, [])
            found.append(id_)
            if len(found) == each:
                del loose[unit]
                self.num_loose -= each
                self._units.give((unit,))
        self.num_loose += len(ids)


FreeIds = FreeList | FreePages
