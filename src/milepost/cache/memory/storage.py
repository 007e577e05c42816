"""The memory of pages and slots: two pools of fixed sizes, or a unified one, whose boundary moves.

Says what there is room for. An *idle* unit of a unified pool holds nothing that a running request
holds, so it can be had for either kind once what it caches is evicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from milepost.cache.memory.free import FreeList, FreePages
from milepost.cache.memory.pool import Pool

USUAL_SHARE = 1 / 8
"""Usual share of slots among a unified pool's units; decides only how much is remembered."""


class Split:
    """Two pools whose sizes are set."""

    pages_a_slot = 0

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.pages = Pool(FreeList(num_pages))
        self.slots = Pool(FreeList(num_slots, first=1))
        self.max_pages = num_pages
        """That one request can have when it is alone."""
        self.usual_slots = num_slots
        """About as many as there mostly are."""

    @property
    def num_loose_pages(self) -> int:
        """Free pages that don't make up a free unit."""
        return self.pages.num_free

    @property
    def room(self) -> tuple[int, int]:
        """Pages, or slots, to be had if everything that is only cached gives way."""
        return self.pages.room, self.slots.room

    def is_free(self, num_pages: int, num_slots: int) -> bool:
        """Whether so much is free at once."""
        return num_pages <= self.pages.num_free and num_slots <= self.slots.num_free

    def has_room(self, num_pages: int, num_slots: int) -> bool:
        """Whether so much can be had if everything that is only cached gives way."""
        return num_pages <= self.pages.room and num_slots <= self.slots.room


class UnifiedPool:
    """`num_units` units besides the zero slot's, each for one slot, of its number, or `pages_each`
    pages. It answers what `Split` does.
    """

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
        """Slots are counted by their bytes, though not all pages that stay may stand together."""
        pages = self.pages.room + self.pages_a_slot * self.slots.num_cached
        return pages, pages // self.pages_a_slot

    def is_free(self, num_pages: int, num_slots: int) -> bool:
        left = len(self.free_units) - num_slots
        return left >= 0 and num_pages <= self._free_pages.num_loose + left * self.pages_a_slot

    def has_room(self, num_pages: int, num_slots: int) -> bool:
        """Slots take idle units; pages can have the rest of those, and all that no request holds in
        other units.
        """
        slots = self.slots
        if num_pages > self.pages.room + self.pages_a_slot * (slots.num_cached - num_slots):
            return False
        missing = num_slots - slots.room
        return missing <= 0 or self._has_idle_page_units(missing)

    @property
    def num_loose_pages(self) -> int:
        return self._free_pages.num_loose

    def unit_to_clear(self) -> int | None:
        """Finds the unit with the fewest pages among those that only the cache holds pages of."""
        emptiest, most = None, 0
        for unit, num_free in self._free_pages.loose():
            if num_free > most and self._is_idle(unit):
                emptiest, most = unit, num_free
        return emptiest if emptiest is not None else next(self._idle_page_units(), None)

    def make_way(self, unit: int) -> list[tuple[int, int]]:
        """Free such a unit: each of its pages and the one that takes its place, whose contents are
        to be copied. There are as many free pages in other units that hold pages.
        """
        sources = self._free_pages.held_in(unit)
        targets = self._free_pages.take_outside(unit, len(sources))
        moves = list(zip(sources, targets, strict=True))
        for source, target in moves:
            self.pages.move(source, target)
        return moves

    def _has_idle_page_units(self, num: int) -> bool:
        """Whether `num` units hold cached pages alone. If too few did, it looks again only once
        some page has been let go: whoever waits may ask in every step.
        """
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
        """Whether it holds pages, and only the cache holds those."""
        return self.pages.is_idle(unit * self.pages_a_slot, (unit + 1) * self.pages_a_slot)


Storage = Split | UnifiedPool


def pages_in_place(page_bytes: int, slot_bytes: int) -> int:
    """The pages to set in the place of a slot: those that fit, or one more if that leaves less
    unused.
    """
    few, rest = divmod(slot_bytes, page_bytes)
    return few if few and rest <= page_bytes - rest else few + 1


def fit(num_bytes: int, *, page_bytes: int, slot_bytes: int) -> UnifiedPool:
    """Returns a unified pool of `num_bytes` bytes."""
    pages_each = pages_in_place(page_bytes, slot_bytes)
    return UnifiedPool(num_bytes // max(slot_bytes, pages_each * page_bytes), pages_each)
