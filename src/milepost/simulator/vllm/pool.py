"""vLLM's memory: states and KV in one pool of equal blocks, under Milepost's scheduler.

- A block holds the KV of `block_size` tokens; a state takes as many whole blocks as its bytes need.
- KV is reused in whole blocks. A request resumes only at the end of a block with a saved state.
- A prefill saves its state at the last block boundary of the prompt and of the KV already cached
  for it; decoding saves none.
- Blocks that no request uses are queued by time of release (blocks.py). A saved state is released
  when the request moves on, KV when the request ends, last block first. So states are evicted
  before the KV that they make usable.

A running request has one state for itself. Implements scheduler/memory.py with the cache's own
plans, whose page tables and slots stay empty, since there is no runner. Reused and lost tokens are
counted as in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from milepost.cache.allocation import Allocation
from milepost.cache.memory import ZERO_SLOT
from milepost.cache.placement import Kind, Mode, floor
from milepost.cache.plans import Export, PageMove
from milepost.cache.report import CacheReport, Lost, Stats, explain
from milepost.cache.tree import HYBRID, Chain, Match, Node, Path, Reservation, grid_of
from milepost.simulator.vllm.blocks import BlockPool, Hold, Key, Place, aligned_ends, new_allocation


class OnePool:
    """`num_blocks` blocks of `block_size` tokens; a state takes `blocks_a_state`."""

    def __init__(
        self, *, num_blocks: int, block_size: int, blocks_a_state: int, page_size: int
    ) -> None:
        self.mode: Mode = "align"
        self.grid = grid_of(HYBRID)
        self.stats = Stats()
        self.blocks = BlockPool(num_blocks)
        self.block_size = block_size
        self.blocks_a_state = blocks_a_state
        self._page_size = page_size
        self._holds: dict[Allocation, Hold] = {}
        self._seen: set[bytes] = set()
        self._had_states: set[Place] = set()

    @property
    def capacity(self) -> int:
        return (self.blocks.total - self.blocks_a_state) * self.block_size

    @property
    def room(self) -> tuple[int, int]:
        return self.blocks.room, self.blocks.room

    # --- match and wait ---------------------------------------------------------------------------

    def match(self, chain: Chain, limit: int | None = None) -> Match:
        last = len(chain) - 1
        limit = last if limit is None else min(limit, last)
        num_whole = len(chain) // self._page_size * self._page_size // self.block_size
        ends = self._ends(chain, 0, num_whole)
        num_kv = 0
        while num_kv < len(ends) and ("kv", ends[num_kv]) in self.blocks:
            num_kv += 1
        num_resumed = min(num_kv, limit // self.block_size)
        while num_resumed and ("state", ends[num_resumed - 1]) not in self.blocks:
            num_resumed -= 1
        report = self._report(chain, ends[:num_kv], num_resumed)
        return Match(
            path=Path(chain, Node.root(chain)),
            checkpoint=None,
            state_length=report.state_length,
            branch_points=(num_kv * self.block_size,) if num_kv > num_resumed else (),
            num_seen=0,
            report=report,
            version=0,
        )

    def expect(self, chain: Chain, num_ahead: int, *, first_time: bool = True) -> Reservation:  # noqa: ARG002
        return Reservation(due=0, is_first=first_time)

    def refresh(self, reservation: Reservation, match: Match) -> None:
        """Does nothing: waiting requests reserve nothing."""

    def forget(self, reservation: Reservation) -> None:
        """Does nothing: waiting requests reserve nothing."""

    def _ends(self, chain: Chain, first: int, end: int) -> list[Place]:
        """Returns the ends of the chain's blocks [first, end): their numbers, and the digests of
        the pages that they lie in, since a trace tells nothing smaller apart.
        """
        pages = [-(-(k + 1) * self.block_size // self._page_size) - 1 for k in range(first, end)]
        digests = chain.digests(pages[-1] + 1) if pages else []
        return [(k, digests[page]) for k, page in enumerate(pages, start=first)]

    def _report(self, chain: Chain, kv_ends: Sequence[Place], found: int) -> CacheReport:
        size = self.block_size
        evicted = len(kv_ends)
        while evicted and kv_ends[evicted - 1] not in self._had_states:
            evicted -= 1
        seen_tokens, kv_length = self._num_seen(chain) * self._page_size, len(kv_ends) * size
        is_partial = floor(seen_tokens, size) <= kv_length
        return explain(
            len(chain),
            reused=found * size,
            kv_length=kv_length,
            page_size=size,
            ends={
                Lost.CHECKPOINT_EVICTED: evicted * size,
                Lost.NO_CHECKPOINT: kv_length,
                Lost.GRID: max(kv_length, seen_tokens) if is_partial else kv_length,
                Lost.KV_EVICTED: seen_tokens,
            },
        )

    def _num_seen(self, chain: Chain) -> int:
        """Returns the number of the prompt's pages that some request has computed before."""
        num = 0
        for digest in chain.full_digests():
            if digest not in self._seen:
                break
            num += 1
        return num

    # --- admit ------------------------------------------------------------------------------------

    def displaced(self, match: Match) -> float:  # noqa: ARG002
        """Returns 0: no request is held back for what others may ask for."""
        return 0.0

    def admit(
        self,
        chain: Chain,
        match: Match,
        *,
        marks: tuple[int, ...] = (),  # noqa: ARG002
        reservation: Reservation | None = None,
        load_to: int | None = None,  # noqa: ARG002
    ) -> Allocation | None:
        position = match.report.state_length
        ends = self._ends(chain, 0, position // self.block_size)
        used: list[Key] = [("kv", end) for end in ends]
        source: Key | None = ("state", ends[-1]) if ends else None
        shared = used if source is None else [*used, source]
        num_kv = -(-len(chain) // self.block_size)
        fresh = num_kv - len(used) + self.blocks_a_state
        if fresh + self.blocks.queued_among(shared) > self.blocks.room:
            return None
        for key in shared:
            self.blocks.use(key)
        if source is not None:
            self.blocks[source].num_uses += 1
            self.stats.checkpoints_used += 1
        self._allocate(fresh)
        is_first = reservation is None or reservation.is_first
        self.stats.admitted(match.report, first_time=is_first)
        allocation = new_allocation(chain, match, self.block_size)
        self._holds[allocation] = Hold(used, source, num_kv, len(used), position // self._page_size)
        return allocation

    def _allocate(self, num: int) -> None:
        for (what, _), holding in self.blocks.allocate(num):
            if what == "state":
                self.stats.evicted("blocks", used=holding.num_uses > 0)

    # --- while it runs ----------------------------------------------------------------------------

    def extend(self, allocation: Allocation, num_tokens: int) -> bool:
        hold = self._holds[allocation]
        missing = -(-num_tokens // self.block_size) - hold.num_kv
        if missing <= 0:
            return True
        if missing > self.blocks.room:
            return False
        self._allocate(missing)
        hold.num_kv += missing
        return True

    def add_branch_point(self, allocation: Allocation, position: int) -> None:  # noqa: ARG002
        """Never called: no request waits for another one's prefill."""
        raise AssertionError("a branch point is asked for in mode auto alone")

    def take_exports(
        self,
        allocation: Allocation,
        end: int,
        most: int | None = None,  # noqa: ARG002
        num_drafts: int = 0,  # noqa: ARG002
    ) -> list[Export]:
        hold = self._holds[allocation]
        start, allocation.planned, allocation.kv_length = allocation.planned, end, end
        allocation.plan_step()
        assert start < end, "A3: chunks are planned one after the other"
        num_taken = len(hold.exports)
        for position, kind in aligned_ends(allocation.facts, start, end).items():
            if self.blocks_a_state > self.blocks.room:
                self.stats.checkpoints_skipped += 1
                continue
            self._allocate(self.blocks_a_state)
            hold.exports.append(Export(position=position, slot=ZERO_SLOT, kind=kind))
        return hold.exports[num_taken:]

    def commit(self, allocation: Allocation, position: int, written: Mapping[int, int]) -> None:  # noqa: ARG002
        hold = self._holds[allocation]
        self._end_reading(hold)
        allocation.end_step()
        allocation.committed = allocation.state_length = position
        self._publish_kv(allocation.chain, hold, position)
        passed = [export for export in hold.exports if export.position <= position]
        del hold.exports[: len(passed)]
        for export in passed:
            self._publish_state(allocation.chain, export.position)

    def _publish_kv(self, chain: Chain, hold: Hold, position: int) -> None:
        """Names the blocks that have become full."""
        num_full, num_pages = position // self.block_size, position // self._page_size
        for end in self._ends(chain, hold.num_full, num_full):
            if self.blocks.hold(("kv", end), 1):
                hold.used.append(("kv", end))
        self._seen.update(chain.digests(num_pages)[hold.num_seen : num_pages])
        hold.num_full, hold.num_seen = num_full, num_pages

    def _publish_state(self, chain: Chain, position: int) -> None:
        """Queues a saved state, since the request itself has moved on."""
        num_full = position // self.block_size
        (end,) = self._ends(chain, num_full - 1, num_full)
        if not self.blocks.hold(("state", end), self.blocks_a_state):
            self.blocks.free(self.blocks_a_state)
            return
        self.blocks.leave(("state", end))
        self._had_states.add(end)
        self.stats.checkpoints_made += 1

    def _end_reading(self, hold: Hold) -> None:
        """Leaves the state that the first step has read."""
        if hold.source is not None:
            self.blocks.leave(hold.source)
            hold.source = None

    # --- release ----------------------------------------------------------------------------------

    def release(self, allocation: Allocation, kind: Kind | None = None) -> None:  # noqa: ARG002
        """Frees a request's blocks; its live state is not saved."""
        hold = self._holds.pop(allocation)
        self._end_reading(hold)
        num_states = 1 + len(hold.exports)
        num_own = hold.num_kv - len(hold.used)
        self.blocks.free(num_states * self.blocks_a_state + num_own)
        for key in reversed(hold.used):
            self.blocks.leave(key)

    def take_moves(self) -> tuple[PageMove, ...]:
        """Returns nothing: equal blocks never move."""
        return ()

    def reset(self) -> bool:
        """Forgets everything cached; returns False, and changes nothing, while requests run."""
        if self._holds:
            return False
        self.blocks = BlockPool(self.blocks.total)
        self._seen.clear()
        self._had_states.clear()
        return True

    def check(self) -> None:
        """Recounts the invariants from scratch; for tests."""
        self.blocks.check()
        if not self._holds:
            assert not self.blocks.num_used, "what no request holds is queued or free"
