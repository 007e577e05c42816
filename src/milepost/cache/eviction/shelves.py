"""Orders of what may be evicted, which find the least worthy without looking at everything.

What a checkpoint is worth falls as it ages, each at its own rate, so no fixed key orders them all.
But of checkpoints that are alike (on one *shelf*) the one used longest ago is worth least, or, in
cycles longer than the memory, the one used last. So only the ends of each shelf are compared, and
looked at again only when the shelf has changed or their worth may have: most shelves rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from milepost.cache.eviction.worth import Worth
from milepost.cache.order import Order
from milepost.cache.tree import Checkpoint


class Shelf:
    """Checkpoints by time of last use, found from both ends. `least` is the oldest or the newest,
    whichever was worth less when last looked at, and what it was worth then: about the same until
    `until`, unless the shelf changes.
    """

    __slots__ = ("_newest", "_oldest", "least", "until")

    def __init__(self) -> None:
        self._oldest: Order[Checkpoint] = Order()
        self._newest: Order[Checkpoint] = Order()
        self.least: tuple[Checkpoint, float] | None = None
        self.until = 0

    def __len__(self) -> int:
        return len(self._oldest)

    def push(self, checkpoint: Checkpoint, time: float) -> None:
        self._oldest.push(checkpoint, time)
        self._newest.push(checkpoint, -time)
        self.least = None

    def discard(self, checkpoint: Checkpoint) -> None:
        self._oldest.discard(checkpoint)
        self._newest.discard(checkpoint)
        self.least = None

    def look(self, value: Callable[[Checkpoint], float], worth: Worth) -> tuple[Checkpoint, float]:
        """The oldest or the newest, whichever is worth less, and what it is worth now."""
        oldest, newest = self._oldest.first(), self._newest.first()
        assert oldest is not None, "E2: an empty shelf is taken down"
        assert newest is not None, "E2: an empty shelf is taken down"
        least, steady = (oldest, value(oldest)), worth.steady(oldest)
        if newest is not oldest:
            steady = min(steady, worth.steady(newest))
            at_other_end = value(newest)
            if at_other_end < least[1]:
                least = newest, at_other_end
        self.least, self.until = least, worth.clock + steady
        return least


class Shelves:
    """Checkpoints on their shelves, each shelf in order of last use. `value` is what is lost with a
    checkpoint, which `worth` says how long to rely on.
    """

    __slots__ = ("_shelf_of", "_shelves", "_value", "_worth")

    def __init__(self, worth: Worth, value: Callable[[Checkpoint], float]) -> None:
        self._worth = worth
        self._value = value
        self._shelves: dict[Hashable, Shelf] = {}
        self._shelf_of: dict[Checkpoint, Hashable] = {}

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._shelf_of)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._shelf_of

    def push(self, checkpoint: Checkpoint, name: Hashable, time: float) -> None:
        """Put a checkpoint where it belongs, wherever it was."""
        if self._shelf_of.get(checkpoint, name) != name:
            self.discard(checkpoint)
        self._shelf_of[checkpoint] = name
        shelf = self._shelves.get(name)
        if shelf is None:
            shelf = self._shelves[name] = Shelf()
        shelf.push(checkpoint, time)

    def discard(self, checkpoint: Checkpoint) -> None:
        if checkpoint not in self._shelf_of:
            return
        name = self._shelf_of.pop(checkpoint)
        shelf = self._shelves[name]
        shelf.discard(checkpoint)
        if not len(shelf):
            del self._shelves[name]

    def least(self) -> tuple[Checkpoint, float] | None:
        """The checkpoint that is worth least, and what it is worth."""
        value, worth = self._value, self._worth
        clock, looked_at = worth.clock, set[Shelf]()
        while self._shelves:
            shelf, lowest = None, float("inf")
            for other in self._shelves.values():
                least = other.least
                if least is None or clock >= other.until:
                    least = other.look(value, worth)
                    looked_at.add(other)
                if shelf is None or least[1] < lowest:
                    shelf, lowest = other, least[1]
            assert shelf is not None
            found = shelf.look(value, worth) if shelf not in looked_at else shelf.least
            assert found is not None
            if found[1] <= lowest:
                return found
        return None
