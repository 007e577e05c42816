"""Admits requests: finds room for a prompt and builds the request's allocation."""

from __future__ import annotations

from bisect import bisect_left

from milepost.cache.allocation.states import Allocation, State
from milepost.cache.allocation.windows import Windows
from milepost.cache.eviction import LOOK_AHEAD, HoldBack, Reclaimer
from milepost.cache.memory import ZERO_SLOT
from milepost.cache.placement import PromptFacts, floor
from milepost.cache.plans import PageCopy
from milepost.cache.tree import CacheConfig, End, Match, Reservation

MOST_GROWTH = 0.2
"""Cap on the expected growth of known paths, as a share of the pages that they hold."""


class Admitter:
    """Builds allocations from pages and slots, which the reclaimer frees where none are left."""

    def __init__(
        self,
        config: CacheConfig,
        reclaimer: Reclaimer,
        windows: Windows,
        *,
        keeps_forks: bool,
    ) -> None:
        self._config = config
        self._windows = windows
        self._reclaimer = reclaimer
        self._pages = reclaimer.storage.pages
        self._slots = reclaimer.storage.slots
        self._score = reclaimer.score
        self._hold_back = HoldBack(reclaimer, config.page_size)
        self._keeps_forks = keeps_forks and config.slots_each > 0

    def admit(
        self, match: Match, marks: tuple[int, ...], reservation: Reservation | None
    ) -> Allocation | None:
        """Pins a match and allocates the pages and the slots that the prompt needs besides. Returns
        None, and changes nothing, if there is no room."""
        branch_points = self._branch_points(match)
        num_kept = len(branch_points) if self._keeps_forks else 0
        if not self._pin(match, num_kept):
            return None
        self._reclaimer.change()
        is_first = reservation is None or reservation.is_first
        end = self._begin(match, reservation, is_first=is_first)
        if match.checkpoint is not None:
            self._reclaimer.stats.checkpoints_used += 1
            self._reclaimer.tree.use(match.checkpoint, end)
        allocation = self._make(match, end)
        self._windows.begin(allocation)
        allocation.facts.marks, allocation.facts.branch_points = marks, branch_points
        while len(allocation.slots_kept) < num_kept and self._reclaimer.storage.has_room(0, 1):
            allocation.slots_kept.append(self._reclaimer.allocate_slot())
        allocation.is_first = is_first
        return allocation

    def _begin(self, match: Match, reservation: Reservation | None, *, is_first: bool) -> End:
        """Returns the end of the request's path. The score learns nothing from a preempted request
        that comes back."""
        end = reservation.end if reservation is not None else None
        if not is_first:
            return end or End(position=len(match.path.chain), time=self._score.clock)
        if end is None:
            end = self._score.arrive(match.path.chain, match.path.nodes, match.num_seen)
        self._score.begin(end)
        return end

    # --- room -------------------------------------------------------------------------------------

    def _branch_points(self, match: Match) -> tuple[int, ...]:
        """Returns the positions at which a prompt keeps states for others: at the end of what it
        shares with resident pages, and at a known fork further on, whose pages have gone."""
        if not self._keeps_forks:
            return match.branch_points
        chain, size = match.path.chain, self._config.page_size
        seen = floor(min(match.num_seen * size, chain.last_resume), self._config.grid)
        if seen <= max(match.state_length, *match.branch_points, 0):
            return match.branch_points
        depth = seen // size
        is_fork = self._score.is_fork(chain.digests(depth)[depth - 1])
        return (*match.branch_points, seen) if is_fork else match.branch_points

    def _pin(self, match: Match, num_kept: int) -> bool:
        """Pins a match if there is room for all else that the request needs. Returns False, and
        pins nothing, if there is none.

        Running requests could fill all the memory, and leave no slot for a state that many share.
        So while others run, a request also needs room for the `num_kept` states that it keeps.
        """
        fresh, (pages, slots) = self._num_fresh(match), self._revived(match)
        wanted_slots = self._config.slots_each + (num_kept if self._pages.num_used else 0)
        # A waiting request may ask in every step, so this is known without pinning the path.
        if not self._reclaimer.storage.has_room(fresh + pages, slots + wanted_slots):
            return False
        self._pages.pin([*match.path.pages, *match.tail])
        self._slots.pin(match.slots)
        if self._reclaimer.storage.has_room(fresh, wanted_slots):
            return True
        self._pages.unpin([*match.path.pages, *match.tail])
        self._slots.unpin(match.slots)
        return False

    def _num_fresh(self, match: Match) -> int:
        """Returns the number of pages that a prompt needs besides those found in the cache."""
        return -(-len(match.path.chain) // self._config.page_size) - match.path.num_pages

    def displaced(self, match: Match) -> float:
        """Returns how many cached tokens, likely to be asked for soon, would be evicted if a match
        were admitted.

        Room in which known paths are expected to grow counts as taken, in proportion to how much of
        the prompt is new: a path that is cached already has its share of that room. Pages of
        running requests count as likely to be asked for as far as returns have been seen at all.
        """
        num_tokens, size = len(match.path.chain), self._config.page_size
        fresh, (pages, slots) = self._num_fresh(match), self._revived(match)
        held_pages, held_slots = self._hold_back.beside(match.checkpoint, match.version)
        num_likely = held_pages + self._pages.num_used * self._score.evidence
        new_share = 1 - match.state_length / num_tokens
        growth = self._score.growth(LOOK_AHEAD) * new_share / size
        growth = min(growth, num_likely * MOST_GROWTH)
        each = self._reclaimer.storage.pages_a_slot
        wanted_slots = slots + self._config.slots_each + held_slots
        short = fresh + pages + held_pages + growth
        if each:
            short += each * wanted_slots - self._reclaimer.storage.room[0]
            most = min(fresh + each * self._config.slots_each, num_likely + each * held_slots)
            return max(min(short, most), 0) * size
        displaced = max(min(short - self._pages.room, fresh, num_likely), 0) * size
        if held_slots and wanted_slots > self._slots.room:
            displaced = max(displaced, held_pages * size / held_slots)
        return displaced

    def _revived(self, match: Match) -> tuple[int, int]:
        """Returns the numbers of the match's pages and slots that are merely cached. Pinning the
        match takes them out of the room that is left."""
        path, pages, nodes = match.path, self._pages, self._reclaimer.tree.nodes
        digests = path.chain.digests(path.num_pages)
        # A request that holds a page holds all pages before it.
        first = bisect_left(
            range(path.num_pages),
            True,
            key=lambda index: not pages.live_refs(nodes[digests[index]].page),
        )
        num_tails = sum(not pages.live_refs(page) for page in match.tail)
        num_slots = sum(not self._slots.live_refs(slot) for slot in match.slots)
        return path.num_pages - first + num_tails, num_slots

    # --- allocations ------------------------------------------------------------------------------

    def _make(self, match: Match, end: End) -> Allocation:
        """Builds the allocation of a pinned match. Its first step reads the checkpoint's slot and a
        copy of its tail page; without a checkpoint it reads zeros, or the states stored beside its
        pages."""
        chain, position, size = match.path.chain, match.state_length, self._config.page_size
        source, tail, table = match.checkpoint, match.tail, [*match.path.pages]
        slot_out = self._reclaimer.allocate_slot() if self._config.slots_each else ZERO_SLOT
        table += self._reclaimer.allocate_pages(-(-len(chain) // size) - len(table))
        copy = None
        if tail and position > match.kv_length:
            target = table[match.path.num_pages]
            copy = PageCopy(source=tail[0], target=target, num_tokens=position % size)
        return Allocation(
            chain=chain,
            report=match.report,
            state=State.ADMITTED,
            page_table=table,
            path=list(match.path.nodes),
            slot_in=source.slot if source is not None else ZERO_SLOT,
            slot_out=slot_out,
            state_length=position,
            write_from=max(match.kv_length, position),
            source=source,
            page_copy=copy,
            end=end,
            facts=PromptFacts(
                prompt_length=min(len(chain), chain.shared_end + 1),
                block_size=self._config.block_size,
                new_from=match.kv_length,
                pictures=chain.pictures,
                grid=self._config.grid,
                max_rounded_off=self._config.max_rounded_off,
            ),
        )
