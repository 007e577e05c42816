"""Ids of pages or slots, each with two reference counts.

A *live* reference belongs to a running request, a *cached* one to the tree. An id without any is
free; with a live one it is used; with cached ones alone it is cached and may be reclaimed by
whoever drops those.

Invariant P1: free + used + cached == total. Only `_enter` and `_leave` change the counters.
Knows nothing of what an id stands for, and never evicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class State(IntEnum):
    FREE = 0
    USED = 1
    CACHED = 2


class Pool:
    """`total` ids from `first` on, all free at the start. The id freed last is allocated first."""

    __slots__ = ("_cached_refs", "_counts", "_free", "_live_refs", "first", "total")

    def __init__(self, total: int, first: int = 0) -> None:
        self.first = first
        self.total = total
        self._live_refs = [0] * (first + total)
        self._cached_refs = [0] * (first + total)
        self._free = list(range(first + total - 1, first - 1, -1))
        self._counts = [total, 0, 0]

    @property
    def num_free(self) -> int:
        return self._counts[State.FREE]

    @property
    def num_used(self) -> int:
        return self._counts[State.USED]

    @property
    def num_cached(self) -> int:
        return self._counts[State.CACHED]

    @property
    def room(self) -> int:
        """Ids that can be allocated if everything that is only cached gives way."""
        return self.total - self._counts[State.USED]

    def live_refs(self, id_: int) -> int:
        return self._live_refs[id_]

    def cached_refs(self, id_: int) -> int:
        return self._cached_refs[id_]

    def state(self, id_: int) -> State:
        if self._live_refs[id_]:
            return State.USED
        return State.CACHED if self._cached_refs[id_] else State.FREE

    def allocate(self) -> int:
        """Take a free id with one live reference; the caller has made sure that there is one."""
        assert self._free, "allocate from a pool without a free id"
        id_ = self._free[-1]
        self._leave(id_)
        self._live_refs[id_] = 1
        self._enter(id_)
        return id_

    def pin(self, ids: Iterable[int]) -> None:
        """Add a live reference to each id; none of them is free."""
        live = self._live_refs
        for id_ in ids:
            if live[id_]:
                live[id_] += 1
            else:
                assert self._cached_refs[id_], f"P3: free id {id_} cannot be pinned"
                self._leave(id_)
                live[id_] = 1
                self._enter(id_)

    def unpin(self, ids: Iterable[int]) -> None:
        """Drop a live reference from each id; an id without references becomes free."""
        live = self._live_refs
        for id_ in ids:
            assert live[id_] > 0, f"P2: id {id_} is unpinned more often than pinned"
            if live[id_] > 1:
                live[id_] -= 1
            else:
                self._leave(id_)
                live[id_] = 0
                self._enter(id_)

    def keep(self, id_: int) -> None:
        """Add a cached reference to an id that is not free."""
        assert self.state(id_) is not State.FREE, f"P3: free id {id_} cannot be cached"
        self._leave(id_)
        self._cached_refs[id_] += 1
        self._enter(id_)

    def drop(self, id_: int) -> None:
        """Drop a cached reference; an id without references becomes free."""
        assert self._cached_refs[id_] > 0, f"P2: id {id_} is dropped more often than kept"
        self._leave(id_)
        self._cached_refs[id_] -= 1
        self._enter(id_)

    def _leave(self, id_: int) -> None:
        state = self.state(id_)
        self._counts[state] -= 1
        if state is State.FREE:
            assert self._free[-1] == id_, f"P3: id {id_} is free and was not allocated"
            self._free.pop()

    def _enter(self, id_: int) -> None:
        state = self.state(id_)
        self._counts[state] += 1
        if state is State.FREE:
            self._free.append(id_)
