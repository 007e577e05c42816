"""Ids of pages or slots, each with two reference counts.

A *live* reference belongs to a running request, a *cached* one to the tree. An id with a live
reference is used. One with cached references only is merely cached, and becomes free when they are
dropped. One without references is free.

Invariant P1: `num_used` and `num_cached` count the ids with such references; all others are free.

Knows nothing of what an id stands for, and never evicts; `watch` reports pins to an order of
eviction. Methods take many ids at once: a request of 100,000 tokens has 1,563 pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from milepost.cache.memory.free import FreeIds

T = TypeVar("T")

ZERO_SLOT = 0
"""The slot that holds zeros, which a fresh request reads. It is never handed out."""


class Pool:
    """A pool of the ids of `free`, which are all free at the start.

    `num_let_go` counts how often an id has lost its last live reference.
    """

    def __init__(self, free: FreeIds) -> None:
        self.first, self.end = free.first, free.end
        """One more than the largest id. `first` is the smallest."""
        self.num_used = 0
        self.num_cached = 0
        self.num_let_go = 0
        self._free = free
        self._live_refs = [0] * free.end
        self._cached_refs = [0] * free.end
        self._watched: Mapping[int, object] = {}
        self._changed: dict[Any, None] = {}

    def watch(self, things: Mapping[int, T], changed: dict[T, None]) -> None:
        """From now on, adds to `changed` what each pinned or unpinned id stands for, if `things`
        has it."""
        self._watched, self._changed = things, changed

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def total(self) -> int:
        """Number of ids now. In a unified pool it changes with the number of ids of the
        other kind."""
        return len(self._free) + self.num_used + self.num_cached

    @property
    def capacity(self) -> int:
        """Largest number of ids that there may be."""
        return self.end - self.first

    @property
    def room(self) -> int:
        """Number of ids available if everything that is merely cached is evicted."""
        return len(self._free) + self.num_cached

    def is_idle(self, first: int, end: int) -> bool:
        """Whether some of the ids [first, end) are cached and none is used."""
        return any(self._cached_refs[first:end]) and not any(self._live_refs[first:end])

    def live_refs(self, id_: int) -> int:
        return self._live_refs[id_]

    def cached_refs(self, id_: int) -> int:
        return self._cached_refs[id_]

    def allocate(self, num: int) -> list[int]:
        """Takes free ids and gives each one live reference. The caller has made sure that there are
        enough."""
        assert num <= len(self._free), "P3: no more is allocated than is free"
        ids = self._free.take(num)
        live = self._live_refs
        for id_ in ids:
            live[id_] = 1
        self.num_used += num
        return ids

    def pin(self, ids: Collection[int]) -> None:
        """Adds a live reference to each id. None of them may be free."""
        live = self._live_refs
        num_revived = 0
        for id_ in ids:
            refs = live[id_]
            if not refs:
                assert self._cached_refs[id_], f"P3: free id {id_} cannot be pinned"
                num_revived += 1
            live[id_] = refs + 1
        self.num_cached -= num_revived
        self.num_used += num_revived
        self._note(ids)

    def unpin(self, ids: Collection[int]) -> None:
        """Drops a live reference from each id. An id without references becomes free."""
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
        self.num_let_go += num_cached + len(freed)
        self.num_used -= num_cached + len(freed)
        self.num_cached += num_cached
        self._free.give(freed)
        self._note(ids)

    def _note(self, ids: Iterable[int]) -> None:
        watched = self._watched
        things = map(watched.__getitem__, filter(watched.__contains__, ids))
        self._changed.update(dict.fromkeys(things))

    def move(self, source: int, target: int) -> None:
        """Passes the references of a cached id to `target`, an id just taken from the free ones.
        The source becomes free."""
        assert not self._live_refs[source], f"P5: id {source} is used, so it stays where it is"
        self._cached_refs[target] = self._cached_refs[source]
        self._cached_refs[source] = 0
        self._free.give((source,))

    def keep(self, ids: Iterable[int]) -> None:
        """Adds a cached reference to each id. All of them must be in use, and stay so."""
        live, cached = self._live_refs, self._cached_refs
        for id_ in ids:
            assert live[id_], f"P4: id {id_} is not used, so its contents may be anything"
            cached[id_] += 1

    def drop(self, id_: int) -> None:
        """Drops a cached reference. An id without references becomes free."""
        refs = self._cached_refs[id_] - 1
        assert refs >= 0, f"P2: id {id_} is dropped more often than kept"
        self._cached_refs[id_] = refs
        if not refs and not self._live_refs[id_]:
            self.num_cached -= 1
            self._free.give((id_,))
