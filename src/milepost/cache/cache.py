"""The prefix cache: token ids and facts in, plans out.

Owns the pools, the tree and the allocations. Performs no I/O, and knows no tensors and no clock:
the same calls make the same plans in any process. `match` is read-only; the other methods keep the
invariants listed in README.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from milepost.cache.allocation import Admitter, Allocation, Loan, Loans, Running, Windows
from milepost.cache.events import Event
from milepost.cache.eviction import Reclaimer, Score
from milepost.cache.memory import FreeList, Pool, Split, Storage
from milepost.cache.placement import POLICIES, Kind, Mode, Placement, floor
from milepost.cache.plans import Export, PageMove
from milepost.cache.report import Lost, Stats
from milepost.cache.tree import (
    HYBRID,
    CacheConfig,
    Chain,
    Finder,
    LayerKind,
    Match,
    Outbox,
    Reservation,
    Tree,
    grid_of,
)
from milepost.pictures import Picture


class Cache:
    """Pages, slots and the prefix tree of one engine.

    `num_slots` counts usable slots, without the zero slot. `storage` may replace both numbers, for
    instance with a unified pool, whose boundary between pages and slots moves. `num_windows` is the
    number of pages for layers with a sliding window: see `num_window_pages`. `mode="none"` reuses
    nothing and keeps nothing. `kinds` are the model's kinds of layers, and `identity` stands for
    the model in all keys. `grid` replaces that of the kinds, `placement` and `score` those of the
    mode: for comparisons only. A `bitwise` cache shares only what prefills leave on the grid.
    """

    def __init__(
        self,
        *,
        num_pages: int | None = None,
        num_slots: int | None = None,
        num_windows: int = 0,
        storage: Storage | None = None,
        page_size: int = 64,
        mode: Mode = "auto",
        block_size: int = 512,
        kinds: tuple[LayerKind, ...] = HYBRID,
        identity: bytes = b"",
        grid: int | None = None,
        bitwise: bool = False,
        placement: Placement | None = None,
        score: Score | None = None,
    ) -> None:
        self.config = CacheConfig(
            page_size=page_size,
            kinds=kinds,
            mode=mode,
            block_size=block_size,
            grid=grid if grid is not None else grid_of(kinds),
            bitwise=bitwise,
        )
        self.page_size = page_size
        self.mode = mode
        self.grid = self.config.grid
        self.slots_each = self.config.slots_each
        self.identity = identity
        if storage is None:
            assert num_pages is not None, "pages and slots are counted, or storage is given"
            assert num_slots is not None, "pages and slots are counted, or storage is given"
            storage = Split(num_pages, num_slots)
        self.storage = storage
        self.pages = storage.pages
        self.slots = storage.slots
        self.outbox = Outbox(page_size, needs_states=self.slots_each > 0)
        self.tree = Tree(self.pages.capacity, self.outbox)
        self.stats = Stats()
        self.allocations: dict[Allocation, None] = {}
        self.loans = Loans(storage)
        self.score: Score = score or Score(storage.usual_slots, self.grid)
        self.windows = Pool(FreeList(num_windows))
        self.reclaimer = Reclaimer(
            self.tree, storage, self.stats, self.score, page_size, self.windows
        )
        self._finder = Finder(self.tree, self.config)
        windows = Windows(self.config.window, page_size, self.windows)
        keeps_forks = mode == "auto" and placement is None
        self._admitter = Admitter(self.config, self.reclaimer, windows, keeps_forks=keeps_forks)
        place = placement or POLICIES[mode]
        self._running = Running(self.config, self.reclaimer, place, windows)

    @property
    def capacity(self) -> int:
        """Length in tokens of the longest request, its answer included, that can run when it is
        alone."""
        return self.storage.max_pages * self.page_size

    @property
    def room(self) -> tuple[int, int]:
        """Numbers of pages and of slots available if everything that is merely cached
        is evicted."""
        return self.storage.room

    def chain(
        self, tokens: Iterable[int], salt: str = "", pictures: Sequence[Picture] = ()
    ) -> Chain:
        """Returns the tokens of a prompt, and the pictures among them, as the `Chain` that the
        other methods take. The caller extends it with the answer's tokens."""
        chain = Chain(tokens, self.page_size, salt, self.identity, pictures)
        if self.config.bitwise:
            chain.shared_end = floor(len(chain), self.grid)
        return chain

    # --- match ------------------------------------------------------------------------------------

    def match(self, chain: Chain, limit: int | None = None) -> Match:
        """Finds the cached part of a prompt. Changes nothing.

        A waiting prompt may be matched again and again: once its digests are known, that costs the
        logarithm of its pages, plus the pages after the state to resume from. At least the last
        token is left to compute; `limit` lowers the position to resume from further.
        """
        return self._finder.find(chain, limit, self.reclaimer.version)

    # --- wait -------------------------------------------------------------------------------------

    def expect(self, chain: Chain, num_ahead: int, *, first_time: bool = True) -> Reservation:
        """Reserves the state that a waiting request would resume from: it is evicted later than
        states that no waiting request needs. `num_ahead` other requests go first. Pass the
        reservation to `refresh`, `admit` and `forget`. The score learns from the arrival at once,
        however long the request then waits."""
        due = self.score.clock + num_ahead + 1
        reservation = Reservation(due=due, is_first=first_time)
        match = self.match(chain)
        if first_time:
            reservation.end = self.score.arrive(chain, match.path.nodes, match.num_seen)
        self.refresh(reservation, match)
        return reservation

    def refresh(self, reservation: Reservation, match: Match) -> None:
        """Updates a reservation with what the waiting request would resume from by now. Costs the
        logarithm of the number of requests that wait for the same checkpoint. Between calls, a
        reservation moves up the path by itself when its checkpoint is evicted."""
        if match.checkpoint is not reservation.checkpoint:
            self.reclaimer.claim(reservation, match.checkpoint)

    def forget(self, reservation: Reservation) -> None:
        """Cancels the reservation of a request that no longer waits."""
        self.reclaimer.claim(reservation, None)

    # --- admit ------------------------------------------------------------------------------------

    def displaced(self, match: Match) -> float:
        """Returns how many cached tokens, likely to be asked for soon, would be evicted if this
        match were admitted. Room that known conversations will need to grow counts as taken. Costs
        a look at up to hold_back.MAX_LOOKS states if the cache has changed since the last call."""
        return self._admitter.displaced(match)

    def admit(
        self,
        chain: Chain,
        match: Match,
        *,
        marks: tuple[int, ...] = (),
        reservation: Reservation | None = None,
        load_to: int | None = None,
    ) -> Allocation | None:
        """Reserves all that the prompt needs: pages for every token, and one slot to write.

        Returns None, and changes nothing, if there is no room; that costs no more than a match.
        `match` must be current. Room is made by evicting what is merely cached. The `reservation`
        of a request that has waited says what was learned when it arrived, and whether it was
        admitted before. With `load_to`, the request loads what lies before that position (its
        `arrivals`); then call `loaded`, or `load_failed` once nothing writes to the pages any more.
        """
        assert match.version == self.reclaimer.version, "A1: admit needs a match of this moment"
        assert match.path.chain is chain, "A1: and of this prompt"
        allocation = self._admitter.admit(match, marks, reservation)
        if allocation is None:
            return None
        self.allocations[allocation] = None
        if load_to is not None:
            self._running.load(allocation, load_to)
        else:
            self.stats.admitted(allocation.report, first_time=allocation.is_first)
        return allocation

    # --- while it runs ----------------------------------------------------------------------------

    def extend(self, allocation: Allocation, num_tokens: int) -> bool:
        """Makes the page table cover `num_tokens`. Returns False, and changes nothing, if there is
        no room."""
        return self._running.extend(allocation, num_tokens)

    def add_branch_point(self, allocation: Allocation, position: int) -> None:
        """Asks a running prefill to keep the state at a grid position, for others to resume from.
        No step planned so far may have passed it."""
        self._running.add_branch_point(allocation, position)

    def take_exports(
        self, allocation: Allocation, end: int, most: int | None = None, num_drafts: int = 0
    ) -> list[Export]:
        """Plans the chunk that ends at `end` and the `num_drafts` drafts after it. Returns the
        exports of the states to keep in it, at most `most`. A chunk without tokens only folds in
        what is committed."""
        return self._running.take_exports(allocation, end, most, num_drafts)

    def take_moves(self) -> tuple[PageMove, ...]:
        """Returns the copies of pages that all later plans rely on: make them before
        anything else."""
        return self.outbox.take_moves()

    def commit(self, allocation: Allocation, position: int, written: Mapping[int, int]) -> None:
        """Records that a step has run: `position` tokens of the request are final and have their
        KV. `written` is the runner's report: slot -> number of tokens that its state has consumed.
        """
        self._running.commit(allocation, position, written)

    def loaded(self, allocation: Allocation, sources: Mapping[str, int] | None = None) -> None:
        """Records that a load is complete; `sources` maps each source to the number of tokens
        loaded from it."""
        self._running.loaded(allocation)
        report = allocation.report
        allocation.report = report.with_loaded(allocation.committed, sources or {})
        self.stats.admitted(allocation.report, first_time=allocation.is_first)

    def load_failed(self, allocation: Allocation) -> None:
        """Records that a load failed. The request computes the missing tokens."""
        position = allocation.planned
        self._running.load_failed(allocation)
        allocation.report = allocation.report.with_lost(Lost.LATE_COPY, position)
        self.stats.admitted(allocation.report, first_time=allocation.is_first)

    def release(self, allocation: Allocation, kind: Kind | None = None) -> None:
        """Frees everything that a request holds. If `kind` is given, its live state, at
        `state_length` tokens, becomes a checkpoint first, provided that the request has a state of
        its own."""
        self._running.release(allocation, kind)
        del self.allocations[allocation]

    # --- lend -------------------------------------------------------------------------------------

    def lend(self, chain: Chain, limit: int | None = None, most: float = 1.0) -> Loan | None:
        """Pins what a prompt would resume from, for others to read, until `take_back`. Returns None
        if nothing is cached, or if more than the share `most` of the memory would be lent."""
        match = self.match(chain, limit)
        if not match.state_length:
            return None
        self.reclaimer.change()
        return self.loans.lend(match, most)

    def take_back(self, loan: Loan) -> None:
        """Records that a loan's reader is done."""
        self.reclaimer.change()
        self.loans.take_back(loan)

    # --- events -----------------------------------------------------------------------------------

    def listen(self) -> None:
        """Starts recording what is added and evicted, beginning with what is cached already; see
        `take_events`."""
        if not self.outbox.is_open:
            self.outbox.open(self.tree.nodes.values(), self.tree.at_slot.values())

    def take_events(self) -> tuple[Event, ...]:
        """Returns, in order, what was cached, became reachable or was evicted since the last call.
        Call it with each plan: its step is the first that may overwrite what was evicted."""
        return self.outbox.take_events()

    def reset(self) -> bool:
        """Drops everything cached. Returns False, and changes nothing, while requests are running
        or loans are outstanding."""
        if self.allocations or self.loans:
            return False
        self.reclaimer.change()
        self.reclaimer.evict_everything()
        self.tree.forget_history()
        return True
