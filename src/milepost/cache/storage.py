"""The memory of pages and slots: two pools of fixed sizes, or one arena with a boundary that moves.

Says what there is room for. An *idle* unit of an arena holds nothing that a running request holds,
so it can be had for either kind once what it caches is evicted.
"""

from __future__ import annotations

from typing import Protocol

from milepost.cache.free import FreeList, FreePages, FreeSlots, Units
from milepost.cache.pool import Pool
from milepost.cache.slots import Slots

USUAL_SHARE = 1 / 8
"""Of an arena's units, those that mostly are slots; only how much is remembered depends on it."""


class Storage(Protocol):
    """What the cache asks."""

    pages: Pool
    slots: Slots
    pages_a_slot: int
    """Pages that a slot takes the place of; 0 if none."""
    max_pages: int
    """Pages that one request can have when it is alone."""
    usual_slots: int
    """About as many slots as there mostly are."""

    @property
    def num_loose_pages(self) -> int:
        """Free pages that don't make up a free unit."""
        ...

    def num_free_in(self, unit: int) -> int:
        """Free pages in a unit that holds pages."""
        ...

    def is_free(self, num_pages: int, num_slots: int) -> bool:
        """Whether so much is free at once."""
        ...

    def has_room(self, num_pages: int, num_slots: int) -> bool:
        """Whether so much can be had if everything that is only cached gives way."""
        ...


class Split:
    """Two pools whose sizes are set."""

    pages_a_slot = 0

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.pages = Pool(FreeList(num_pages))
        self.slots = Slots(FreeList(num_slots, first=1))
        self.max_pages = num_pages
        self.usual_slots = num_slots

    @property
    def num_loose_pages(self) -> int:
        return self.pages.num_free

    def num_free_in(self, unit: int) -> int:  # noqa: ARG002
        return 0

    def is_free(self, num_pages: int, num_slots: int) -> bool:
        return num_pages <= self.pages.num_free and num_slots <= self.slots.pool.num_free

    def has_room(self, num_pages: int, num_slots: int) -> bool:
        return num_pages <= self.pages.room and num_slots <= self.slots.pool.room


class Arena:
    """`num_units` units besides the zero slot's, each for one slot or `pages_each` pages."""

    def __init__(self, num_units: int, pages_each: int) -> None:
        self.units = Units(num_units, pages_each)
        self._free_pages = FreePages(self.units)
        self.pages = Pool(self._free_pages)
        self.slots = Slots(FreeSlots(self.units))
        self.pages_a_slot = pages_each
        self.max_pages = (num_units - 1) * pages_each
        self.usual_slots = max(int(num_units * USUAL_SHARE), 1)

    def is_free(self, num_pages: int, num_slots: int) -> bool:
        left = len(self.units.free) - num_slots
        return left >= 0 and num_pages <= self._free_pages.num_loose + left * self.pages_a_slot

    def has_room(self, num_pages: int, num_slots: int) -> bool:
        """Slots take idle units; pages can have the rest of those, and all that no request holds in
        other units.
        """
        slots = self.slots.pool
        if num_pages > self.pages.room + self.pages_a_slot * (slots.num_cached - num_slots):
            return False
        missing = num_slots - slots.room
        return missing <= 0 or self._has_idle_page_units(missing)

    def num_free_in(self, unit: int) -> int:
        return self._free_pages.num_free_in(unit)

    @property
    def num_loose_pages(self) -> int:
        return self._free_pages.num_loose

    def _has_idle_page_units(self, num: int) -> bool:
        each = self.pages_a_slot
        for first in range(self.pages.first, self.pages.end, each):
            num -= self.pages.is_idle(first, first + each)
            if not num:
                return True
        return False


def fit(num_bytes: int, *, page_bytes: int, slot_bytes: int) -> Arena:
    """An arena of so many bytes, whose units are as large as a slot, or as the pages that it takes
    to hold one if that leaves less unused.
    """
    few = slot_bytes // page_bytes
    many = few + 1
    is_few_better = few and slot_bytes - few * page_bytes <= many * page_bytes - slot_bytes
    pages_each = few if is_few_better else many
    unit_bytes = max(slot_bytes, pages_each * page_bytes)
    return Arena(num_bytes // unit_bytes, pages_each)
