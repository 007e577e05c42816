"""The prefix cache: token ids and facts in, plans out.

Owns the pools, the tree and the allocations. Performs no I/O, knows no tensors and no clock: the
same calls make the same plans in any process. `match` is read-only; the other methods keep the
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
)
from milepost.pictures import Picture


class Cache:
    """Pages, slots and the prefix tree of one engine.

    `num_slots` counts usable slots, without the zero slot; `storage` in place of the two numbers
    may be a unified pool, whose boundary between pages and slots moves. Of kinds with sliding
    windows `num_windows` counts the pages of those: see `num_window_pages`. `mode="none"` reuses
    nothing and keeps nothing. `kinds` are the model's, and so is `identity`, which goes into all
    keys; `grid` in place of theirs, `placement` and `score` in place of the mode's own are for
    comparisons. A `bitwise` cache shares what prefills leave on the grid, and nothing else.
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
            grid=grid,
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
        window = self.config.window
        windows = Windows(window, page_size, self.windows) if window else None
        self._admitter = Admitter(self.config, self.reclaimer, windows)
        place = placement or POLICIES[mode]
        self._running = Running(self.config, self.reclaimer, place, windows)

    @property
    def capacity(self) -> int:
        """Tokens of the longest request, its answer included, that can run when it is alone."""
        return self.storage.max_pages * self.page_size

    @property
    def room(self) -> tuple[int, int]:
        """Pages and slots to be had if everything that is only cached gives way."""
        return self.storage.room

    def chain(
        self, tokens: Iterable[int], salt: str = "", pictures: Sequence[Picture] = ()
    ) -> Chain:
        """The tokens of a prompt, and the pictures among them, in the form that the other verbs
        take; its answer extends it.
        """
        chain = Chain(tokens, self.page_size, salt, self.identity, pictures)
        if self.config.bitwise:
            chain.shared_end = floor(len(chain), self.grid)
        return chain

    # --- match ------------------------------------------------------------------------------------

    def match(self, chain: Chain, limit: int | None = None) -> Match:
        """Find the cached part of a prompt; changes nothing.

        A prompt that waits may be matched again and again: once its digests are known, that costs
        the logarithm of its pages, and the pages after the state to resume from. At least the last
        token is left to compute; `limit` lowers the position to resume from further.
        """
        return self._finder.find(chain, limit, self.reclaimer.version)

    # --- wait -------------------------------------------------------------------------------------

    def expect(self, chain: Chain, num_ahead: int, *, first_time: bool = True) -> Reservation:
        """Reserve what a waiting request would resume from, to be kept in preference to what nobody
        is known to ask for; `num_ahead` others go first. For `refresh`, `admit` and `forget`. What
        it returns to is learned now, however long it waits.
        """
        due = self.score.clock + num_ahead + 1
        reservation = Reservation(due=due, is_first=first_time)
        match = self.match(chain)
        if first_time:
            reservation.end = self.score.arrive(chain, match.path.nodes, match.num_seen)
        self.refresh(reservation, match)
        return reservation

    def refresh(self, reservation: Reservation, match: Match) -> None:
        """Note what a waiting request would resume from by now. Costs the logarithm of those that
        wait for the same; until then its reservation passes on by itself when a state goes.
        """
        if match.checkpoint is not reservation.checkpoint:
            self.reclaimer.claim(reservation, match.checkpoint)

    def forget(self, reservation: Reservation) -> None:
        """Note that a request waits no longer."""
        self.reclaimer.claim(reservation, None)

    # --- admit ------------------------------------------------------------------------------------

    def displaced(self, match: Match) -> float:
        """Tokens likely to be asked for soon that would be evicted if a match of this moment were
        admitted, or for what known paths grow by meanwhile. Costs a look at hold_back.MAX_LOOKS
        states if the cache has changed since somebody asked last.
        """
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
        """Reserve all that the prompt needs: pages for every token, and one slot to write.

        Returns None if there is no room, and then nothing has changed. `match` must be of this
        moment. Room is found by evicting what is only cached; if that falls short by the very
        checkpoint to resume from, the request takes over its slot and tail page. The request's
        `reservation`, if it has waited, says what was learned when it arrived, and whether it was
        admitted before. With `load_to` it is
        loading what lies before that position, its `arrivals`, unless it took over a checkpoint;
        then `loaded`, or `load_failed` once nobody writes it any more.

        None costs no more than a match.
        """
        assert match.version == self.reclaimer.version, "A1: admit needs a match of this moment"
        assert match.path.chain is chain, "A1: and of this prompt"
        allocation = self._admitter.admit(match, marks, reservation)
        if allocation is None:
            return None
        self.allocations[allocation] = None
        if load_to is not None and not allocation.has_taken_over:
            self._running.load(allocation, load_to)
        else:
            self.stats.admitted(allocation.report, first_time=allocation.is_first)
        return allocation

    # --- while it runs ----------------------------------------------------------------------------

    def extend(self, allocation: Allocation, num_tokens: int) -> bool:
        """Make the page table cover `num_tokens`; False if there is no room, and then nothing has
        changed.
        """
        return self._running.extend(allocation, num_tokens)

    def add_branch_point(self, allocation: Allocation, position: int) -> None:
        """Ask a running prefill to keep the state at a grid position that no step planned so far
        passes, for others to resume.
        """
        self._running.add_branch_point(allocation, position)

    def take_exports(
        self, allocation: Allocation, end: int, most: int | None = None, num_drafts: int = 0
    ) -> list[Export]:
        """Plan the chunk that ends at `end` and `num_drafts` drafts after it; returns slots for the
        states to keep in it, at most `most`. Without any token it folds in what is committed.
        """
        return self._running.take_exports(allocation, end, most, num_drafts)

    def take_moves(self) -> tuple[PageMove, ...]:
        """Copies of pages that all plans from now on suppose: to be made before anything else."""
        return self.outbox.take_moves()

    def commit(self, allocation: Allocation, position: int, written: Mapping[int, int]) -> None:
        """Note that a step has run: `position` tokens of the request are final, with their KV.
        `written` is the runner's report: slot -> tokens that its contents have consumed.
        """
        self._running.commit(allocation, position, written)

    def loaded(self, allocation: Allocation, sources: Mapping[str, int] | None = None) -> None:
        """Note that a load is complete; `sources` counts the tokens that came from each."""
        self._running.loaded(allocation)
        report = allocation.report
        allocation.report = report.with_loaded(allocation.committed, sources or {})
        self.stats.admitted(allocation.report, first_time=allocation.is_first)

    def load_failed(self, allocation: Allocation) -> None:
        """Note that a load failed; the request computes what it lacks."""
        position = allocation.planned
        self._running.load_failed(allocation)
        allocation.report = allocation.report.with_lost(Lost.LATE_COPY, position)
        self.stats.admitted(allocation.report, first_time=allocation.is_first)

    def release(self, allocation: Allocation, kind: Kind | None = None) -> None:
        """Take back all that a request holds. With a `kind`, its live state becomes a checkpoint
        first, of `state_length` tokens, if it has one of its own.
        """
        self._running.release(allocation, kind)
        del self.allocations[allocation]

    # --- lend -------------------------------------------------------------------------------------

    def lend(self, chain: Chain, limit: int | None = None, most: float = 1.0) -> Loan | None:
        """Keep what a prompt would resume from where it is, for others to read, until `take_back`;
        None if nothing is cached, or more than the part `most` of the memory would be lent.
        """
        match = self.match(chain, limit)
        if not match.state_length:
            return None
        self.reclaimer.change()
        return self.loans.lend(match, most)

    def take_back(self, loan: Loan) -> None:
        """Note that nobody reads on."""
        self.reclaimer.change()
        self.loans.take_back(loan)

    # --- events -----------------------------------------------------------------------------------

    def listen(self) -> None:
        """Record what comes and goes from now on, and first what is there; for `take_events`."""
        if not self.outbox.is_open:
            self.outbox.open(self.tree.nodes.values(), self.tree.at_slot.values())

    def take_events(self) -> tuple[Event, ...]:
        """Returns what has come, become reachable or gone since the last call, in that order. Call
        it with each plan: that plan's step may overwrite what leaves, no earlier step does.
        """
        return self.outbox.take_events()

    def reset(self) -> bool:
        """Forget everything cached; False, and nothing happens, while requests are running or
        others read what is cached.
        """
        if self.allocations or self.loans:
            return False
        self.reclaimer.change()
        self.reclaimer.evict_everything()
        self.tree.forget_history()
        return True
