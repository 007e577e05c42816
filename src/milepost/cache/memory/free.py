"""Where free ids are kept: in a list, or, for pages of a unified pool, in units, and
each unit holds one slot or some pages.

Knows nothing of references. Which ids are handed out depends on the calls alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class FreeList:
    """`total` ids from `first` up to `end`. The id given last is taken first."""

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
    """Pages of a unified pool: unit u is the pages from u x `each` on. `units` are those that hold
    nothing, from 1 on: unit 0 is the zero slot's.

    Long runs get whole units, and what is left over goes where pages are in use already, so that
    few units are held by few pages. A unit whose pages are all free is given up at once.
    """

    def __init__(self, units: FreeList, each: int) -> None:
        self._units = units
        self._each = each
        self._loose: dict[int, list[int]] = {}
        self.num_loose = 0
        """Free pages in units that hold others."""
        self.first = each
        self.end = units.end * each

    def __len__(self) -> int:
        return self.num_loose + self._each * len(self._units)

    def loose(self) -> Iterator[tuple[int, int]]:
        """Units that hold pages and have free ones too, and how many of those."""
        return ((unit, len(found)) for unit, found in self._loose.items())

    def held_in(self, unit: int) -> list[int]:
        """Pages of a unit that are not free."""
        free = set(self._loose.get(unit, ()))
        return [id_ for id_ in range(unit * self._each, (unit + 1) * self._each) if id_ not in free]

    def take_outside(self, unit: int, num: int) -> list[int]:
        """Take `num` pages of other units that hold pages; the caller has made sure of them."""
        own = self._loose.pop(unit, None)
        ids: list[int] = []
        while len(ids) < num:
            self._take_loose(ids, num)
        if own is not None:
            self._loose[unit] = own
        return ids

    def take(self, num: int) -> list[int]:
        ids: list[int] = []
        each = self._each
        while num - len(ids) >= each and len(self._units):
            (unit,) = self._units.take(1)
            ids.extend(range(unit * each, (unit + 1) * each))
        while len(ids) < num and self._loose:
            self._take_loose(ids, num)
        if len(ids) < num:
            (unit,) = self._units.take(1)
            self._loose[unit] = list(range((unit + 1) * each - 1, unit * each - 1, -1))
            self.num_loose += each
            self._take_loose(ids, num)
        return ids

    def _take_loose(self, ids: list[int], num: int) -> None:
        """Add free pages of one unit, up to `num` ids in all."""
        unit, found = next(reversed(self._loose.items()))
        some = found[: len(ids) - num - 1 : -1]
        del found[-len(some) :]
        if not found:
            del self._loose[unit]
        self.num_loose -= len(some)
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
                self.num_loose -= each
                self._units.give((unit,))
        self.num_loose += len(ids)


FreeIds = FreeList | FreePages
