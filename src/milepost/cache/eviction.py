"""What goes first when pages or slots run out: scoring functions and the order they give.

Strays (pages below which no checkpoint is left) go before anything that a resume could use. Among
checkpoints the one that is cheapest to compute again and longest unused goes first, by GreedyDual
(Young, 1994; Cao & Irani, 1997, "Cost-Aware WWW Proxy Caching Algorithms"): priority = inflation at
last use + tokens to replay, where the inflation is the priority of what was evicted last. So age is
counted in work, not in time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

from milepost.cache.placement import Kind
from milepost.cache.tree import Checkpoint, Node

T = TypeVar("T")

MAX_TAILS_COMPARED = 8
"""Thousands of short prompts may end inside a node's next page: so many of the newest are looked
at, no more.
"""


def replay_tokens(checkpoint: Checkpoint) -> int:
    """Tokens that must be computed again without this checkpoint: back to the next one on its path.

    Of many checkpoints on one node only the newest few are looked at; the result may then be too
    large.
    """
    following = checkpoint.tail
    for node in checkpoint.node.ancestors():
        shallower = [
            other.position
            for other in islice(reversed(node.checkpoints.values()), MAX_TAILS_COMPARED)
            if other is not checkpoint and following.startswith(other.tail)
        ]
        if shallower:
            return checkpoint.position - max(shallower)
        following = node.tokens
    return checkpoint.position


def is_fork(node: Node) -> bool:
    """Whether several known continuations leave this node."""
    return node.num_children > 1


def surplus(path: Sequence[Checkpoint], cap: int) -> Checkpoint | None:
    """The checkpoint to drop from a path with more than `cap`, shallowest first: the least work to
    replay.

    The deepest is never dropped, nor a mark, nor one at a fork.
    """
    if len(path) <= cap:
        return None
    gaps = [
        (here.position - before, here.position, here)
        for before, here in zip([0, *(c.position for c in path)], path[:-1], strict=False)
        if here.kind is not Kind.MARK and not is_fork(here.node)
    ]
    return min(gaps, key=lambda gap: gap[:2])[2] if gaps else None


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

    def pop(self) -> tuple[T, float] | None:
        """Take out the item with the smallest key."""
        while self._heap:
            key, serial, item = heapq.heappop(self._heap)
            if self._entries.get(item) == (key, serial):
                del self._entries[item]
                return item, key
        return None

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[:2]]
        heapq.heapify(self._heap)
