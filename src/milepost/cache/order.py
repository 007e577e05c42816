"""A sorted collection of items whose keys may change."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Order(Generic[T]):
    """Items by ascending key; items with equal keys in the order in which they were pushed. Push an
    item again to change its key."""

    __slots__ = ("_places", "_serial", "_sorted")

    def __init__(self) -> None:
        self._sorted: list[tuple[float, int, T]] = []
        self._places: dict[T, tuple[float, int]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[T]:
        return iter(self._places)

    def push(self, item: T, key: float) -> None:
        """Inserts an item, or moves it if its key has changed."""
        place = self._places.get(item)
        if place is not None:
            if place[0] == key:
                return
            self.discard(item)
        self._serial += 1
        self._places[item] = key, self._serial
        insort(self._sorted, (key, self._serial, item))

    def discard(self, item: T) -> None:
        place = self._places.pop(item, None)
        if place is not None:
            del self._sorted[bisect_left(self._sorted, place)]

    def first(self) -> T:
        """Returns the item with the smallest key. The order must not be empty."""
        return self._sorted[0][2]

    def last(self) -> T:
        """Returns the first item among those with the largest key. The order must not be empty."""
        return self._sorted[bisect_left(self._sorted, self._sorted[-1][:1])][2]
