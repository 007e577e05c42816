"""Where free ids are kept: in a list for a pool of fixed size; in a unified pool in its units, each
of which holds one slot or some pages.

Knows nothing of references. Which ids are handed out depends on the calls alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class FreeIds(Protocol):
    """What a pool takes ids from and gives them back to."""

    first: int
    """The lowest id that there may ever be."""
    end: int
    """Above the highest."""

    def __len__(self) -> int:
        """Ids that can be taken."""
        ...

    def take(self, num: int) -> list[int]:
        """Take so many, which there are."""
        ...

    def give(self, ids: Sequence[int]) -> None: ...


class FreeList:
    """`total` ids from `first` on. The id given last is taken first."""

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


class Units:
    """Equal pieces of one memory, 1 to `num_units`; the first free are those given back last.

    Unit 0 is the zero slot's.
    """

    def __init__(self, num_units: int, pages_each: int) -> None:
        self.num_units = num_units
        self.pages_each = pages_each
        self.free = list(range(num_units, 0, -1))


class FreeSlots:
    """Slots of a unified pool: a unit is a slot, of the same number."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self.first = 1
        self.end = units.num_units + 1

    def __len__(self) -> int:
        return len(self._units.free)

    def take(self, num: int) -> list[int]:
        free = self._units.free
        return [free.pop() for _ in range(num)]

    def give(self, ids: Sequence[int]) -> None:
        self._units.free.extend(ids)


class FreePages:
    """Pages of a unified pool: unit u is the pages from u x pages_each on.

    Long runs get whole units, and what is left over goes where pages are in use already, so that
    few units are held by few pages. A unit whose pages are all free is given up at once.
    """

    def __init__(self, units: Units) -> None:
        self._units = units
        self._each = units.pages_each
        self._loose: dict[int, list[int]] = {}
        self._num_loose = 0
        self.first = self._each
        self.end = (units.num_units + 1) * self._each

    def __len__(self) -> int:
        return self._num_loose + self._each * len(self._units.free)

    @property
    def num_loose(self) -> int:
        """Free pages in units that hold others."""
        return self._num_loose

    def loose(self) -> Iterator[tuple[int, int]]:
        """Units that hold pages and have free ones too, and how many of those."""
        return ((unit, len(found)) for unit, found in self._loose.items())

    def held_in(self, unit: int) -> list[int]:
        """Pages of a unit that are not free."""
        free = set(self._loose.get(unit, ()))
        return [id_ for id_ in range(unit * self._each, (unit + 1) * self._each) if id_ not in free]

    def take_outside(self, unit: int, num: int) -> list[int]:
        """Take so many of other units that hold pages, which there are."""
        own = self._loose.pop(unit, None)
        ids: list[int] = []
        while len(ids) < num:
            self._take_loose(ids, num)
        if own is not None:
            self._loose[unit] = own
        return ids

    def take(self, num: int) -> list[int]:
        ids: list[int] = []
        free, each = self._units.free, self._each
        while num - len(ids) >= each and free:
            unit = free.pop()
            ids.extend(range(unit * each, (unit + 1) * each))
        while len(ids) < num and self._loose:
            self._take_loose(ids, num)
        if len(ids) < num:
            unit = free.pop()
            self._loose[unit] = list(range((unit + 1) * each - 1, unit * each - 1, -1))
            self._num_loose += each
            self._take_loose(ids, num)
        return ids

    def _take_loose(self, ids: list[int], num: int) -> None:
        """Add free pages of one unit, up to `num` ids in all."""
        unit, found = next(reversed(self._loose.items()))
        some = found[: len(ids) - num - 1 : -1]
        del found[-len(some) :]
        if not found:
            del self._loose[unit]
        self._num_loose -= len(some)
        ids.extend(some)

    def give(self, ids: Sequence[int]) -> None:
        each, loose = self._each, self._loose
        for id_ in ids:
            unit = id_ // each
            found = loose.get(unit)
            if found is None:
                found = loose[unit] = []
            found.append(id_)
            if len(found) == each:
                del loose[unit]
                self._num_loose -= each
                self._units.free.append(unit)
        self._num_loose += len(ids)
