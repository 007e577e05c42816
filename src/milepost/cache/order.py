"""Items in order of a key that may change. Knows nothing of what they are."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Order(Generic[T]):
    """Items by ascending key; equal keys in the order of their pushes. Push again to move an item.

    A binary heap whose outdated entries are skipped when they surface, and swept when they
    outnumber the rest.
    """

    __slots__ = ("_entries", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._entries: dict[T, tuple[float, int]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def push(self, item: T, key: float) -> None:
        entry = self._entries.get(item)
        if entry is not None and entry[0] == key:
            return
        self._serial += 1
        self._entries[item] = (key, self._serial)
        heapq.heappush(self._heap, (key, self._serial, item))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._sweep()

    def discard(self, item: T) -> None:
        self._entries.pop(item, None)

    def first(self) -> T | None:
        """The item with the smallest key."""
        while self._heap:
            key, serial, item = self._heap[0]
            if self._entries.get(item) == (key, serial):
                return item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> tuple[T, float] | None:
        """Take out the item with the smallest key."""
        item = self.first()
        if item is None:
            return None
        del self._entries[item]
        return item, heapq.heappop(self._heap)[0]

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[:2]]
        heapq.heapify(self._heap)
