"""The memory of pages and slots: two pools of fixed sizes, or a unified pool, whose boundary moves.

Says what there is room for. An *idle* unit of a unified pool holds cached pages only, none that a
running request holds. It is available for pages or a slot once these are evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from milepost.cache.memory.free import FreeList, FreePages
from milepost.cache.memory.pool import Pool

USUAL_SHARE = 1 / 8
"""Usual share of slots among a unified pool's units. It decides only how much history is
remembered."""


class Split:
    """Two pools of fixed sizes."""

    pages_a_slot = 0

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.pages = Pool(FreeList(num_pages))
        self.slots = Pool(FreeList(num_slots, first=1))
        self.max_pages = num_pages
        """Largest number of pages that a request can have when it is alone."""
        self.usual_slots = num_slots
        """About the usual number of slots."""

    @property
    def num_loose_pages(self) -> int:
        """Number of free pages outside free units."""
        return self.pages.num_free

    @property
    def room(self) -> tuple[int, int]:
        """Numbers of pages and of slots available if everything that is merely cached
        is evicted."""
        return self.pages.room, self.slots.room

    def has_room(self, num_pages: int, num_slots: int) -> bool:
        """Whether this many pages and slots can be had if everything that is merely cached is
        evicted."""
        return num_pages <= self.pages.room and num_slots <= self.slots.room


class UnifiedPool:
    """A pool of `num_units` units besides the zero slot's. Each holds `pages_each` pages or one
    slot, which has the unit's number. The methods are those of `Split`."""

    def __init__(self, num_units: int, pages_each: int) -> None:
        self.num_units = num_units
        self.free_units = FreeList(num_units, first=1)
        self._free_pages = FreePages(self.free_units, pages_each)
        self.pages = Pool(self._free_pages)
        self.slots = Pool(self.free_units)
        self.pages_a_slot = pages_each
        self.max_pages = (num_units - 1) * pages_each
        self.usual_slots = max(int(num_units * USUAL_SHARE), 1)
        self._missed = 0, -1

    @property
    def room(self) -> tuple[int, int]:
        """Numbers of pages and of slots. Slots are counted by their bytes, although the remaining
        pages may be too scattered for that many."""
        pages = self.pages.room + self.pages_a_slot * self.slots.num_cached
        return pages, pages // self.pages_a_slot

    def has_room(self, num_pages: int, num_slots: int) -> bool:
        """Whether there is room: slots take idle units, and pages the other idle units and all
        other pages that no request holds."""
        slots = self.slots
        if num_pages > self.pages.room + self.pages_a_slot * (slots.num_cached - num_slots):
            return False
        missing = num_slots - slots.room
        return missing <= 0 or self._has_idle_page_units(missing)

    @property
    def num_loose_pages(self) -> int:
        return self._free_pages.num_loose

    def unit_to_clear(self) -> int | None:
        """Returns the unit with the fewest pages among those whose pages are merely cached."""
        emptiest, most = None, 0
        for unit, num_free in self._free_pages.loose():
            if num_free > most and self._is_idle(unit):
                emptiest, most = unit, num_free
        return emptiest if emptiest is not None else next(self._idle_page_units(), None)

    def make_way(self, unit: int) -> list[tuple[int, int]]:
        """Frees such a unit. Returns each of its pages with the page that replaces it, to which the
        contents must be copied. Other units that hold pages must have enough free ones."""
        moves = self._free_pages.take_for(unit)
        for source, target in moves:
            self.pages.move(source, target)
        return moves

    def _has_idle_page_units(self, num: int) -> bool:
        """Whether `num` units hold cached pages only. After a no, it looks again only when a page
        has been let go, since a waiting request may ask in every step."""
        num_missed, num_let_go = self._missed
        if num >= num_missed and num_let_go == self.pages.num_let_go:
            return False
        is_found = sum(1 for _ in islice(self._idle_page_units(), num)) == num
        if not is_found:
            self._missed = num, self.pages.num_let_go
        return is_found

    def _idle_page_units(self) -> Iterator[int]:
        return filter(self._is_idle, range(1, self.num_units + 1))

    def _is_idle(self, unit: int) -> bool:
        """Whether the unit holds pages, and all of them are merely cached."""
        return self.pages.is_idle(unit * self.pages_a_slot, (unit + 1) * self.pages_a_slot)


Storage = Split | UnifiedPool


def pages_in_place(page_bytes: int, slot_bytes: int) -> int:
    """Returns how many pages replace a slot in a unit: as many as fit, or one more if that wastes
    less."""
    few, rest = divmod(slot_bytes, page_bytes)
    return few if few and rest <= page_bytes - rest else few + 1


def fit(num_bytes: int, *, page_bytes: int, slot_bytes: int) -> UnifiedPool:
    """Returns a unified pool that takes at most `num_bytes` bytes besides the zero slot's unit."""
    pages_each = pages_in_place(page_bytes, slot_bytes)
    return UnifiedPool(num_bytes // max(slot_bytes, pages_each * page_bytes), pages_each)
