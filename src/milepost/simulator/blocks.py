"""Equal blocks with one eviction queue: the pool of `OnePool`.

A *holding* is a run of blocks that is cached under a key: the KV of one block's tokens, or a state.
While requests use it, it is not in the queue; when the last one leaves it, it goes to the queue's
end. The holding that has waited longest is evicted whole.

Invariant: used + queued + free == total.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

Place = tuple[int, bytes]
"""Where a block ends: its number in the prompt, and the digest of everything up to there."""
Key = tuple[Literal["kv", "state"], Place]
"""What is held: a block's KV, or the state at its end."""


@dataclass(slots=True, eq=False)
class Holding:
    """`num_blocks` blocks under one key."""

    num_blocks: int
    num_users: int = 1
    num_uses: int = 0
    """Times that a request resumed from it."""


class BlockPool:
    """`total` blocks, all free at the start."""

    __slots__ = ("_held", "_queue", "num_queued", "num_used", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_used = 0
        self.num_queued = 0
        self._held: dict[Key, Holding] = {}
        self._queue: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __getitem__(self, key: Key) -> Holding:
        return self._held[key]

    @property
    def room(self) -> int:
        """Blocks that can be allocated if the whole queue gives way."""
        return self.total - self.num_used

    def allocate(self, num: int) -> list[tuple[Key, Holding]]:
        """Take blocks for a request; returns what was evicted for them. The caller has checked the
        room.
        """
        assert num <= self.room, "no more is allocated than is free or queued"
        evicted = []
        while self.total - self.num_used - self.num_queued < num:
            key, _ = self._queue.popitem(last=False)
            holding = self._held.pop(key)
            self.num_queued -= holding.num_blocks
            evicted.append((key, holding))
        self.num_used += num
        return evicted

    def free(self, num: int) -> None:
        """Give back blocks that have no key."""
        self.num_used -= num

    def hold(self, key: Key, num_blocks: int) -> bool:
        """Give blocks in use their key. False if a request uses a copy: then they stay without. A
        queued copy is given up for them.
        """
        held = self._held.get(key)
        if held is not None:
            if held.num_users:
                return False
            del self._queue[key]
            self.num_queued -= held.num_blocks
        self._held[key] = Holding(num_blocks)
        return True

    def queued_among(self, keys: list[Key]) -> int:
        """Blocks of those held under `keys` that nobody uses."""
        held = (self._held[key] for key in keys)
        return sum(holding.num_blocks for holding in held if not holding.num_users)

    def use(self, key: Key) -> None:
        """Take what is held out of the queue, or share it."""
        holding = self._held[key]
        if not holding.num_users:
            del self._queue[key]
            self.num_queued -= holding.num_blocks
            self.num_used += holding.num_blocks
        holding.num_users += 1

    def leave(self, key: Key) -> None:
        """Stop using it; the last user sends it to the queue's end."""
        holding = self._held[key]
        holding.num_users -= 1
        if not holding.num_users:
            self._queue[key] = None
            self.num_queued += holding.num_blocks
            self.num_used -= holding.num_blocks

    def check(self) -> None:
        """The invariant, from scratch; for tests."""
        unused = [key for key, holding in self._held.items() if not holding.num_users]
        assert sorted(unused) == sorted(self._queue), "what nobody uses is queued"
        assert self.num_queued == sum(self._held[key].num_blocks for key in unused)
        in_use = sum(h.num_blocks for h in self._held.values() if h.num_users)
        assert in_use <= self.num_used <= self.total - self.num_queued
