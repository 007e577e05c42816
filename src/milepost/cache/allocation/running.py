"""Changes the allocations of running requests: plans and commits their steps, loads, and releases
them."""

from __future__ import annotations

from collections.abc import Mapping

from milepost.cache.allocation.publishing import Publisher
from milepost.cache.allocation.states import Allocation, State
from milepost.cache.allocation.windows import Windows
from milepost.cache.eviction import Reclaimer
from milepost.cache.memory import ZERO_SLOT
from milepost.cache.placement import Kind, Placement
from milepost.cache.plans import Arrival, Export
from milepost.cache.tree import CacheConfig, checkpoint_key


class Running:
    """Changes allocations, and the pools and the tree along with them."""

    def __init__(
        self,
        config: CacheConfig,
        reclaimer: Reclaimer,
        place: Placement,
        windows: Windows,
    ) -> None:
        self._config = config
        self._windows = windows
        self._reclaimer = reclaimer
        self._pages = reclaimer.storage.pages
        self._slots = reclaimer.storage.slots
        self._publisher = Publisher(config.page_size, reclaimer, windows)
        self._place = place
        self._change = reclaimer.change

    def extend(self, allocation: Allocation, num_tokens: int) -> bool:
        """Makes the page table cover `num_tokens`. Returns False, and changes nothing, if there is
        no room."""
        missing = -(-num_tokens // self._config.page_size) - len(allocation.page_table)
        if missing <= 0:
            return True
        if not self._reclaimer.storage.has_room(missing, 0):
            return False
        self._change()
        allocation.page_table.extend(self._reclaimer.allocate_pages(missing))
        return True

    def add_branch_point(self, allocation: Allocation, position: int) -> None:
        """Asks a running prefill to keep the state at a grid position, for others to resume from.
        No step planned so far may have passed it."""
        assert position > allocation.planned, "A2: a branch point is asked for before it is passed"
        if position not in allocation.facts.branch_points:
            allocation.facts.branch_points = (*allocation.facts.branch_points, position)

    def take_exports(
        self, allocation: Allocation, end: int, most: int | None = None, num_drafts: int = 0
    ) -> list[Export]:
        """Plans the chunk that ends at `end` and the `num_drafts` drafts after it. Returns the
        exports of the states to keep in it: the deepest, at most `most` of them, and none beside
        drafts, which write no state. A chunk without tokens only folds in what is committed.

        Takes only slots that are free or merely cached. A state for which there is none is skipped;
        nothing waits for a slot.
        """
        start = allocation.planned
        assert start < end or allocation.num_unfolded, "A3: chunks are planned one after the other"
        assert not allocation.is_verifying, "A6: nothing is planned after drafts"
        owns_state = allocation.state is State.READY
        assert owns_state or not num_drafts, "A6: drafts follow a state of its own"
        allocation.plan_step()
        allocation.planned = end
        allocation.kv_length = end + num_drafts
        allocation.slot_in, allocation.page_copy = allocation.slot_out, None
        allocation.window_copy = None
        self._windows.extend(allocation)
        exports: list[Export] = []
        if not num_drafts and self._may_export(allocation, start):
            exports = self._make_exports(allocation, start, end, most)
        self._free_kept(allocation, end)
        return exports

    def _make_exports(
        self, allocation: Allocation, start: int, end: int, most: int | None
    ) -> list[Export]:
        num_taken = len(allocation.exports)
        places = list(self._place(allocation.facts, start, end).items())
        num_left_out = max(len(places) - most, 0) if most is not None else 0
        self._reclaimer.stats.checkpoints_skipped += num_left_out
        for position, kind in places[num_left_out:]:
            if kind is Kind.BRANCH_POINT and allocation.slots_kept:
                slot = allocation.slots_kept.pop()
            elif not self._reclaimer.storage.has_room(0, 1):
                self._reclaimer.stats.checkpoints_skipped += 1
                continue
            elif not self._is_worth_a_slot(allocation, position, kind):
                self._reclaimer.stats.checkpoints_declined += 1
                continue
            else:
                self._change()
                slot = self._reclaimer.allocate_slot()
            allocation.exports.append(Export(position=position, slot=slot, kind=kind))
        return allocation.exports[num_taken:]

    def _free_kept(self, allocation: Allocation, end: int) -> None:
        """Frees slots that were set aside for branch points, once none is after `end`. A request
        that loads what precedes its last grid position passes them without an export."""
        if allocation.slots_kept and end >= max(allocation.facts.branch_points):
            self._change()
            self._slots.unpin(allocation.slots_kept)
            allocation.slots_kept.clear()

    def _is_worth_a_slot(self, allocation: Allocation, position: int, kind: Kind) -> bool:
        """Whether a state may displace another. One at the prompt's end may do so unless a waiting
        request will resume from the other; a sparse one must be worth more."""
        if kind not in (Kind.PROMPT_END, Kind.SPARSE) or self._slots.num_free:
            return True
        victim = self._reclaimer.next_victim()
        if victim is None:
            return False
        if kind is Kind.PROMPT_END:
            return not victim[0].reservations
        above = max([allocation.deepest_state, *(export.position for export in allocation.exports)])
        worth = self._reclaimer.score.of_sparse(allocation.end, position, above)
        return worth / (self._reclaimer.storage.pages_a_slot or 1) > victim[1]

    def _may_export(self, allocation: Allocation, start: int) -> bool:
        if not self._config.slots_each or start >= allocation.chain.shared_end:
            return False
        return start < allocation.facts.prompt_length or self._config.mode == "all"

    def commit(self, allocation: Allocation, position: int, written: Mapping[int, int]) -> None:
        """Records that a step has run: `position` tokens of the request are final and have their
        KV.

        `written` is the runner's report: slot -> number of tokens that its state has consumed. A
        step that verifies drafts may leave the state where it was. Publishes the pages that became
        full and the exported states, and unpins the checkpoint that was read. Exports of a later
        step in flight lie after `position`; they stay.
        """
        assert position >= allocation.committed, "A4: what is committed stays so"
        if self._config.slots_each and not allocation.is_verifying:
            assert allocation.slot_out in written, "S4: a step without drafts writes its state"
        self._change()
        allocation.end_step()
        self._end_reading(allocation)
        allocation.committed = position
        allocation.planned = max(allocation.planned, position)
        if not allocation.num_steps:
            allocation.kv_length = allocation.planned = position  # KV of rejected drafts is void
        self._fold(allocation, written)
        if self._config.enabled:
            self._publisher.publish_pages(allocation)
        if allocation.exports:
            self._publish_exports(allocation, written)
        self._windows.free_passed(allocation)

    def _publish_exports(self, allocation: Allocation, written: Mapping[int, int]) -> None:
        """Publishes the exported states at or before the committed position."""
        position = allocation.committed
        passed = [export for export in allocation.exports if export.position <= position]
        del allocation.exports[: len(passed)]
        for export in passed:
            held = self._held(export.slot, written)
            assert held == export.position, (
                f"S4: slot {export.slot} holds {held} tokens, its label says {export.position}"
            )
            self._publisher.publish_state(allocation, held, export.slot, export.kind)

    def _held(self, slot: int, written: Mapping[int, int]) -> int:
        """Returns the number of tokens in a slot's state, as the runner reports it."""
        assert slot != ZERO_SLOT, "S1: slot 0 is never written"
        assert self._slots.live_refs(slot), f"S2: slot {slot} was written while no request held it"
        assert not self._slots.cached_refs(slot), f"S3: slot {slot} was written while it was cached"
        return written[slot]

    def _fold(self, allocation: Allocation, written: Mapping[int, int]) -> None:
        """Updates the position of the request's state."""
        if not self._config.slots_each:
            allocation.state_length = allocation.committed
        elif allocation.slot_out in written:
            allocation.state_length = self._held(allocation.slot_out, written)
        assert allocation.state_length <= allocation.committed, "A7: a state holds final tokens"

    # --- what comes from outside ------------------------------------------------------------------

    def load(self, allocation: Allocation, position: int) -> None:
        """Lists, in `arrivals`, what must be filled from outside for an admitted request to
        continue at `position`, which is before the end of its prompt: full pages, a tail page, and
        its slot. Nothing is planned for the request until `loaded` or `load_failed`. It keeps the
        checkpoint that it would have resumed from."""
        size, chain = self._config.page_size, allocation.chain
        assert allocation.committed < position < len(chain), "A8: what is loaded lies ahead"
        allocation.become(State.LOADING)
        first, end = allocation.write_from // size, position // size
        digests = chain.digests(end)
        arrivals = [
            Arrival(key=digests[index], what="page", id=allocation.page_table[index])
            for index in range(first, end)
        ]
        tail = chain.content(end * size, position)
        key = checkpoint_key(digests[end - 1] if end else chain.root, tail)
        if tail and position > allocation.write_from:
            arrivals.append(Arrival(key=key, what="tail", id=allocation.page_table[end]))
        if self._config.slots_each:
            windows = self._windows.load(allocation, position)
            state = Arrival(key=key, what="state", id=allocation.slot_out, windows=windows)
            arrivals.append(state)
        allocation.planned = allocation.kv_length = position
        allocation.arrivals = tuple(arrivals)

    def loaded(self, allocation: Allocation) -> None:
        """Records that a load is complete. What was loaded is cached as if the request had computed
        it."""
        assert allocation.is_loading, f"A5: nothing was loaded, it was {allocation.state}"
        self._change()
        allocation.become(State.READY)
        self._end_reading(allocation)
        allocation.slot_in, allocation.page_copy = allocation.slot_out, None
        self._windows.loaded(allocation, allocation.planned)
        allocation.committed = allocation.planned
        allocation.write_from = max(allocation.write_from, allocation.committed)
        self._fold(allocation, {allocation.slot_out: allocation.committed})
        allocation.arrivals = ()
        if self._config.enabled:
            self._publisher.publish_pages(allocation)
            if self._config.slots_each and self._slots.num_free:
                self._keep_loaded(allocation)

    def _keep_loaded(self, allocation: Allocation) -> None:
        """Makes a loaded state a checkpoint that others can resume from. The caller has made sure
        that a slot is free for the request to continue in."""
        slot, position = allocation.slot_out, allocation.state_length
        self._slots.pin((slot,))
        checkpoint = self._publisher.publish_state(allocation, position, slot, Kind.LOADED)
        if checkpoint is None:
            return
        allocation.become(State.ADMITTED)
        self._pages.pin(checkpoint.tail_pages)
        allocation.source = checkpoint
        allocation.slot_in, allocation.slot_out = slot, self._reclaimer.allocate_slot()

    def load_failed(self, allocation: Allocation) -> None:
        """Records that a load failed; nothing writes to its pages any more. The request continues
        from what it was admitted with."""
        assert allocation.is_loading, f"A5: nothing was loaded, it was {allocation.state}"
        allocation.become(State.ADMITTED)
        self._windows.load_failed(allocation)
        allocation.arrivals = ()
        allocation.planned = allocation.kv_length = allocation.committed

    def _end_reading(self, allocation: Allocation) -> None:
        """Unpins the checkpoint that the first step has read."""
        source, allocation.source = allocation.source, None
        if source is not None:
            self._slots.unpin((source.slot,))
            self._pages.unpin(source.tail_pages)

    def release(self, allocation: Allocation, kind: Kind | None = None) -> None:
        """Frees everything that a request holds. If `kind` is given, its live state, at
        `state_length` tokens, becomes a checkpoint first, provided that the request has a state of
        its own.

        Exports that were not committed are dropped. Pages that were computed twice become free.
        """
        is_ready = allocation.state is State.READY
        assert kind is None or not allocation.is_in_flight, "A9: a state that is being written"
        allocation.become(State.ENDED)
        self._change()
        self._slots.unpin([export.slot for export in allocation.exports])
        self._slots.unpin(allocation.slots_kept)
        self._end_reading(allocation)
        if is_ready and allocation.path and kind is not Kind.PREEMPTED:
            self._reclaimer.score.ended(allocation.end, allocation.path[-1], allocation.committed)
        if self._config.bitwise and self._config.enabled and kind is not Kind.PREEMPTED:
            self._reclaimer.tree.note_answer(allocation.chain, allocation.end)
        is_kept = self._config.enabled and allocation.state_length <= allocation.chain.shared_end
        if kind is not None and is_kept and is_ready and self._config.slots_each:
            self._publisher.publish_state(
                allocation, allocation.state_length, allocation.slot_out, kind
            )
        elif self._config.slots_each:
            self._slots.unpin((allocation.slot_out,))
        self._pages.unpin(allocation.path_pins)
        self._pages.unpin(allocation.page_table)
        self._windows.release(allocation)
