"""Orders of checkpoints that may be evicted. They find the lowest score without looking at every
checkpoint.

Scores fall with age, each at its own rate, so no fixed key sorts them. But among checkpoints that
are alike (in one *bucket*), the least recently used one has the lowest score or, in cycles longer
than the memory, the most recently used one. So only the two ends of each bucket are compared. They
are scored again only when the bucket has changed or their scores may have, so most buckets are left
alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from milepost.cache.eviction.score import Score
from milepost.cache.order import Order
from milepost.cache.tree import Checkpoint


@dataclass(slots=True, eq=False)
class Bucket:
    """Checkpoints in order of last use. `least` is the oldest or the newest of them, whichever had
    the lower score when last looked at, with that score. It stays about right until the clock
    reaches `until`, which is 0 if the bucket has changed."""

    checkpoints: Order[Checkpoint] = field(default_factory=Order)
    least: tuple[Checkpoint, float] = field(init=False)
    until: int = 0

    def look(self, value: Callable[[Checkpoint], float], score: Score) -> tuple[Checkpoint, float]:
        """Scores the oldest and the newest checkpoint. Returns the one worth less, with
        its score."""
        assert self.checkpoints, "E2: an empty bucket is dropped"
        ends = dict.fromkeys((self.checkpoints.first(), self.checkpoints.last()))
        least = min(((end, value(end)) for end in ends), key=itemgetter(1))
        self.least, self.until = least, score.clock + min(map(score.steady, ends))
        return least


class Buckets:
    """Checkpoints in buckets, each in order of last use. `value` returns what the loss of a
    checkpoint costs, and `score.steady` for how long that stays about the same."""

    def __init__(self, score: Score, value: Callable[[Checkpoint], float]) -> None:
        self._score = score
        self._value = value
        self._buckets: defaultdict[Hashable, Bucket] = defaultdict(Bucket)
        self._bucket_of: dict[Checkpoint, Hashable] = {}

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._bucket_of)

    def push(self, checkpoint: Checkpoint, name: Hashable, time: float) -> None:
        """Puts a checkpoint into the bucket `name`, in order of `time`; removes it from where it
        was."""
        if self._bucket_of.get(checkpoint, name) != name:
            self.discard(checkpoint)
        self._bucket_of[checkpoint] = name
        bucket = self._buckets[name]
        bucket.checkpoints.push(checkpoint, time)
        bucket.until = 0

    def discard(self, checkpoint: Checkpoint) -> None:
        if checkpoint not in self._bucket_of:
            return
        name = self._bucket_of.pop(checkpoint)
        bucket = self._buckets[name]
        bucket.checkpoints.discard(checkpoint)
        bucket.until = 0
        if not bucket.checkpoints:
            del self._buckets[name]

    def victim(self) -> tuple[Checkpoint, float] | None:
        """Returns the checkpoint that is worth least, with its value; None if there is none."""
        value, score = self._value, self._score
        while self._buckets:
            for bucket in self._buckets.values():
                if score.clock >= bucket.until:
                    bucket.look(value, score)
            lowest = min(self._buckets.values(), key=lambda bucket: bucket.least[1])
            seen, found = lowest.least, lowest.look(value, score)
            if found[1] <= seen[1]:
                return found
        return None
