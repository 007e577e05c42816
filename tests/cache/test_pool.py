"""The pool of ids against a model that is too simple to be wrong."""

from __future__ import annotations

from collections import Counter
from enum import IntEnum

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from milepost.cache.memory import Pool
from milepost.cache.memory.free import FreeList


class Status(IntEnum):
    FREE = 0
    USED = 1
    CACHED = 2


class Machine(RuleBasedStateMachine):
    @initialize(total=st.integers(1, 6), first=st.integers(0, 2))
    def build(self, total, first):
        self.pool = Pool(FreeList(total, first))
        self.ids = range(first, first + total)
        self.live: Counter[int] = Counter()
        self.cached: Counter[int] = Counter()
        self.freed: list[int] = list(reversed(self.ids))

    def state(self, id_: int) -> Status:
        if self.live[id_]:
            return Status.USED
        return Status.CACHED if self.cached[id_] else Status.FREE

    def note(self, id_: int, was: Status) -> None:
        if self.state(id_) is Status.FREE and was is not Status.FREE:
            self.freed.append(id_)

    @rule(num=st.integers(0, 4))
    def allocate(self, num):
        if num > len(self.freed):
            with pytest.raises(AssertionError, match="P3"):
                self.pool.allocate(num)
            return
        ids = self.pool.allocate(num)
        assert ids == [self.freed.pop() for _ in range(num)], "the ids freed last"
        self.live.update(ids)

    @rule(data=st.data())
    def pin(self, data):
        held = [id_ for id_ in self.ids if self.state(id_) is not Status.FREE]
        chosen = data.draw(st.lists(st.sampled_from(held), max_size=4)) if held else []
        self.pool.pin(chosen)
        self.live.update(chosen)

    @rule(data=st.data())
    def unpin(self, data):
        refs = sorted(self.live.elements())
        chosen = data.draw(st.permutations(refs).map(lambda p: p[:3]))
        self.pool.unpin(chosen)
        for id_ in chosen:
            was = self.state(id_)
            self.live[id_] -= 1
            self.note(id_, was)

    @rule(data=st.data())
    def keep(self, data):
        id_ = data.draw(st.sampled_from(self.ids))
        if self.state(id_) is not Status.USED:
            with pytest.raises(AssertionError, match="P4"):
                self.pool.keep([id_])
            return
        self.pool.keep([id_])
        self.cached[id_] += 1

    @rule(data=st.data())
    def drop(self, data):
        id_ = data.draw(st.sampled_from(self.ids))
        if not self.cached[id_]:
            with pytest.raises(AssertionError, match="P2"):
                self.pool.drop(id_)
            return
        was = self.state(id_)
        self.pool.drop(id_)
        self.cached[id_] -= 1
        self.note(id_, was)

    @rule(data=st.data())
    def unpin_what_nobody_holds(self, data):
        id_ = data.draw(st.sampled_from(self.ids))
        if not self.live[id_]:
            with pytest.raises(AssertionError, match="P2"):
                self.pool.unpin([id_])

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        states = Counter(self.state(id_) for id_ in self.ids)
        pool = self.pool
        assert (pool.num_free, pool.num_used, pool.num_cached) == tuple(states[s] for s in Status)
        assert pool.num_free + pool.num_used + pool.num_cached == pool.total == len(self.ids)
        assert pool.room == pool.num_free + pool.num_cached
        for id_ in self.ids:
            assert pool.live_refs(id_) == self.live[id_]
            assert pool.cached_refs(id_) == self.cached[id_]


TestPool = Machine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("id_", range(3))
def test_a_free_id_cannot_be_pinned(id_):
    with pytest.raises(AssertionError, match="P3"):
        Pool(FreeList(3)).pin([id_])
