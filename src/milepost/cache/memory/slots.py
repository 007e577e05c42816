"""The pool of recurrent state slots. Slot 0 holds zeros, is what a fresh request reads, and is
never handed out.

Each slot carries the position that its contents have consumed. The runner's report of a write sets
it, so a slot that was never written, or holds another position than its label says, cannot be
published as a checkpoint.
"""

from __future__ import annotations

from milepost.cache.memory.free import FreeIds
from milepost.cache.memory.pool import Pool

ZERO_SLOT = 0
UNWRITTEN = -1


class Slots:
    """The usable slots, ids from 1 on."""

    def __init__(self, free: FreeIds) -> None:
        self.pool = Pool(free)
        self._positions = [UNWRITTEN] * free.end
        self._positions[ZERO_SLOT] = 0

    def allocate(self) -> int:
        """Take a free slot with one live reference and no contents."""
        (slot,) = self.pool.allocate(1)
        self._positions[slot] = UNWRITTEN
        return slot

    def position(self, slot: int) -> int:
        """Tokens that the slot's contents have consumed, or UNWRITTEN."""
        return self._positions[slot]

    def written(self, slot: int, position: int) -> None:
        """Record the runner's report that the slot now holds the state after `position` tokens."""
        assert slot != ZERO_SLOT, "S1: slot 0 is never written"
        assert self.pool.live_refs(slot), f"S2: slot {slot} was written while no request held it"
        assert not self.pool.cached_refs(slot), f"S3: slot {slot} was written while it was cached"
        self._positions[slot] = position
