"""Ids of pages or slots, each with two reference counts.

A *live* reference belongs to a running request, a *cached* one to the tree. An id without any is
free; with a live one it is used; with cached ones alone it is cached and may be reclaimed by
whoever drops those.

Invariant P1: what is counted as used and as cached is what has such references, and the rest is
free.
Knows nothing of what an id stands for, and never evicts; an order of what may go hears of pins
through `watch`. Methods take many ids at once: a request of 100,000 tokens has 1,563 pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from milepost.cache.memory.free import FreeIds

ZERO_SLOT = 0
"""Holds zeros, is what a fresh request reads, and is never handed out."""


class Pool:
    """The ids of `free`, all free at the start.

    `num_let_go` counts how often one of them ceased to be used.
    """

    def __init__(self, free: FreeIds) -> None:
        self.first, self.end = free.first, free.end
        """Ids that there may ever be, and the one above them."""
        self.num_used = 0
        self.num_cached = 0
        self.num_let_go = 0
        self._free = free
        self._live_refs = [0] * free.end
        self._cached_refs = [0] * free.end
        self._watched: Mapping[int, object] = {}
        self._changed: list[object] = []

    def watch(self, things: Mapping[int, object], changed: list[object]) -> None:
        """From now on append to `changed` the thing that a pinned or unpinned id stands for, if
        `things` has one.
        """
        self._watched, self._changed = things, changed

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def total(self) -> int:
        """Ids that there are; in a unified pool it changes with what the other kind has."""
        return len(self._free) + self.num_used + self.num_cached

    @property
    def capacity(self) -> int:
        """The most ids that there may be."""
        return self.end - self.first

    @property
    def room(self) -> int:
        """Number of ids to be had if everything that is only cached gives way."""
        return len(self._free) + self.num_cached

    def is_idle(self, first: int, end: int) -> bool:
        """Whether some of these ids are cached, and none is used."""
        return any(self._cached_refs[first:end]) and not any(self._live_refs[first:end])

    def live_refs(self, id_: int) -> int:
        return self._live_refs[id_]

    def cached_refs(self, id_: int) -> int:
        return self._cached_refs[id_]

    def allocate(self, num: int) -> list[int]:
        """Take free ids with one live reference each; the caller has made sure of them."""
        assert num <= len(self._free), "P3: no more is allocated than is free"
        ids = self._free.take(num)
        live = self._live_refs
        for id_ in ids:
            live[id_] = 1
        self.num_used += num
        return ids

    def pin(self, ids: Collection[int]) -> None:
        """Add a live reference to each id; none of them is free."""
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
        self.num_let_go += num_cached + len(freed)
        self.num_used -= num_cached + len(freed)
        self.num_cached += num_cached
        self._free.give(freed)
        self._note(ids)

    def _note(self, ids: Iterable[int]) -> None:
        watched = self._watched
        self._changed.extend(map(watched.__getitem__, filter(watched.__contains__, ids)))

    def move(self, source: int, target: int) -> None:
        """Hand the references of a cached id to one that was taken from the free ones; the first
        becomes free.
        """
        assert not self._live_refs[source], f"P5: id {source} is used, so it stays where it is"
        self._cached_refs[target] = self._cached_refs[source]
        self._cached_refs[source] = 0
        self._free.give((source,))

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
            self.num_cached -= 1
            self._free.give((id_,))
