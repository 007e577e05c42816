"""Ids of pages or slots, each with two reference counts.

A *live* reference belongs to a running request, a *cached* one to the tree. An id without any is
free; with a live one it is used; with cached ones alone it is cached and may be reclaimed by
whoever drops those.

Invariant P1: free + used + cached == total. Only `_move` and `_free_ids` change what it counts.
Knows nothing of what an id stands for, and never evicts. Verbs take many ids at once: a request of
100,000 tokens has 1,563 pages.
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

    def allocate(self, num: int) -> list[int]:
        """Take free ids with one live reference each; the caller has made sure of them."""
        assert num <= len(self._free), "P3: no more is allocated than is free"
        if not num:
            return []
        ids = self._free[: -num - 1 : -1]
        del self._free[-num:]
        live = self._live_refs
        for id_ in ids:
            live[id_] = 1
        self._move(State.FREE, State.USED, num)
        return ids

    def pin(self, ids: Iterable[int]) -> None:
        """Add a live reference to each id; none of them is free."""
        live = self._live_refs
        num_revived = 0
        for id_ in ids:
            refs = live[id_]
            if not refs:
                assert self._cached_refs[id_], f"P3: free id {id_} cannot be pinned"
                num_revived += 1
            live[id_] = refs + 1
        self._move(State.CACHED, State.USED, num_revived)

    def unpin(self, ids: Iterable[int]) -> None:
        """Drop a live reference from each id; an id without references becomes free."""
        live, cached = self._live_refs, self._cached_refs
        num_cached = 0
        freed = []
        for id_ in ids:
            refs = live[id_] - 1
            assert refs >= 0, f"P2: id {id_} is unpinned more often than pinned"
            live[id_] = refs
            if not refs:
                if cached[id_]:
                    num_cached += 1
                else:
                    freed.append(id_)
        self._move(State.USED, State.CACHED, num_cached)
        self._free_ids(State.USED, freed)

    def keep(self, ids: Iterable[int]) -> None:
        """Add a cached reference to ids that are used; they stay used."""
        live, cached = self._live_refs, self._cached_refs
        for id_ in ids:
            assert live[id_], f"P4: id {id_} is not used, so its contents may be anything"
            cached[id_] += 1

    def drop(self, id_: int) -> None:
        """Drop a cached reference; an id without references becomes free."""
        refs = self._cached_refs[id_] - 1
        assert refs >= 0, f"P2: id {id_} is dropped more often than kept"
        self._cached_refs[id_] = refs
        if not refs and not self._live_refs[id_]:
            self._free_ids(State.CACHED, [id_])

    def _free_ids(self, before: State, ids: list[int]) -> None:
        self._free.extend(ids)
        self._move(before, State.FREE, len(ids))

    def _move(self, before: State, after: State, num: int) -> None:
        self._counts[before] -= num
        self._counts[after] += num
