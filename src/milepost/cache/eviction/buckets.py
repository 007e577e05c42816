"""Orders of what may be evicted, which find the lowest score without looking at everything.

The score of a checkpoint falls as it ages, each at its own rate, so no fixed key orders them all.
But of checkpoints that are alike (in one *bucket*) the one used longest ago has the lowest, or, in
cycles longer than the memory, the one used last. So only the ends of each bucket are compared, and
scored again only when the bucket has changed or their scores may have: most buckets are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from milepost.cache.eviction.score import Score
from milepost.cache.order import Order
from milepost.cache.tree import Checkpoint


@dataclass(slots=True, eq=False)
class Bucket:
    """Checkpoints in order of last use. `least` is the oldest or the newest, whichever was worth
    less when last looked at, and what it was worth then: about the same until `until`, unless the
    bucket changes.
    """

    checkpoints: Order[Checkpoint] = field(default_factory=Order)
    least: tuple[Checkpoint, float] | None = None
    until: int = 0

    def look(self, value: Callable[[Checkpoint], float], score: Score) -> tuple[Checkpoint, float]:
        """The oldest or the newest, whichever is worth less, and what it is worth now."""
        assert self.checkpoints, "E2: an empty bucket is dropped"
        oldest, newest = self.checkpoints.first(), self.checkpoints.last()
        least, steady = (oldest, value(oldest)), score.steady(oldest)
        if newest is not oldest:
            steady = min(steady, score.steady(newest))
            at_other_end = value(newest)
            if at_other_end < least[1]:
                least = newest, at_other_end
        self.least, self.until = least, score.clock + steady
        return least


class Buckets:
    """Checkpoints in their buckets, each bucket in order of last use. `value` is what is lost with
    a checkpoint, which `score` says how long to rely on.
    """

    def __init__(self, score: Score, value: Callable[[Checkpoint], float]) -> None:
        self._score = score
        self._value = value
        self._buckets: dict[Hashable, Bucket] = {}
        self._bucket_of: dict[Checkpoint, Hashable] = {}

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._bucket_of)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._bucket_of

    def push(self, checkpoint: Checkpoint, name: Hashable, time: float) -> None:
        """Put a checkpoint where it belongs, wherever it was."""
        if self._bucket_of.get(checkpoint, name) != name:
            self.discard(checkpoint)
        self._bucket_of[checkpoint] = name
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = Bucket()
        bucket.checkpoints.push(checkpoint, time)
        bucket.least = None

    def discard(self, checkpoint: Checkpoint) -> None:
        if checkpoint not in self._bucket_of:
            return
        name = self._bucket_of.pop(checkpoint)
        bucket = self._buckets[name]
        bucket.checkpoints.discard(checkpoint)
        bucket.least = None
        if not bucket.checkpoints:
            del self._buckets[name]

    def victim(self) -> tuple[Checkpoint, float] | None:
        """The checkpoint that is worth least, and what it is worth."""
        value, score = self._value, self._score
        clock, looked_at = score.clock, set[Bucket]()
        while self._buckets:
            bucket, lowest = None, float("inf")
            for other in self._buckets.values():
                least = other.least
                if least is None or clock >= other.until:
                    least = other.look(value, score)
                    looked_at.add(other)
                if bucket is None or least[1] < lowest:
                    bucket, lowest = other, least[1]
            assert bucket is not None
            found = bucket.look(value, score) if bucket not in looked_at else bucket.least
            assert found is not None
            if found[1] <= lowest:
                return found
        return None
