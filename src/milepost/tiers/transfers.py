"""Copies between the pools, host memory and files as the tiers decide, and reports what has
arrived.

A stored item can be read once its copy's event has passed. A loaded item is reported as arrived
once its own event has passed, and no step reads it before. If nothing else can run, it is reported
as soon as its copies are queued, and later launches wait for them. With several ranks, each copies
its own part, and an item has arrived once all ranks have it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from milepost.errors import EngineDeadError
from milepost.runner.runner import Runner
from milepost.scheduler.plans import Load, Store
from milepost.scheduler.scheduler import Scheduler
from milepost.tiers.arena import runs
from milepost.tiers.commands import Bring, ItemRun, SendTierCommand, Stored
from milepost.tiers.device_copies import DeviceEvent, DeviceHostCopies
from milepost.tiers.disk import Disk, Reads
from milepost.tiers.loads import Fetch
from milepost.tiers.policy import Tiers

MAX_RUN = 16
"""Largest number of pages copied at once. Padding between pages costs one more copy of these
pages."""
WAIT_S = 1e-4
REST_S = 2.0
HASTE_S = 0.05
"""Steps may be launched after queued copies that take at most this long. A request that arrives
meanwhile waits for them too.
"""


@dataclass(slots=True, kw_only=True)
class _Storing:
    stores: list[Store]
    done: DeviceEvent


@dataclass(slots=True, kw_only=True, eq=False)
class _Loading:
    load: Load
    fetches: list[Fetch]
    after: DeviceEvent
    reads: Reads | None = None
    """Reads from disk that must finish first."""
    done: DeviceEvent | None = None
    is_over: bool = False
    """Whether the scheduler knows that the whole load is there, or will be for the next step."""


@dataclass(frozen=True, slots=True)
class OnAll:
    """An event of this rank combined with `others`, the answer of the other ranks."""

    own: DeviceEvent
    others: Future[bool]

    def query(self) -> bool:
        if not self.others.done() or not self.own.query():
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Waits for all ranks. Raises EngineDeadError if a rank failed to do its part or is
        lost.
        """
        self.own.synchronize()
        if not self.others.result():
            raise EngineDeadError("a rank could not copy its part of what is kept outside")

    def seconds(self) -> float | None:
        """Returns the time of this rank's copies; the other ranks copy as much."""
        return self.own.seconds()


class TierTransfers:
    """Carries out the decisions of `tiers` with this rank's `copies` and files. `ask`, if there are
    other ranks, has them do the same.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tiers: Tiers,
        copies: DeviceHostCopies,
        disk: Disk | None = None,
        ask: SendTierCommand | None = None,
    ) -> None:
        self._scheduler, self._runner, self._tiers = scheduler, runner, tiers
        self.copies = copies
        self._disk = disk
        self._ask = ask
        self._storing: deque[_Storing] = deque()
        self._loading: list[_Loading] = []
        self.num_pages_brought = 0
        runner.transfers[tiers.loads.name] = self

    @property
    def is_busy(self) -> bool:
        return bool(self._storing or self._loading)

    @property
    def is_writing(self) -> bool:
        """Whether files are being written or looked for."""
        return self._disk is not None and self._disk.is_busy

    @property
    def rest_s(self) -> float | None:
        """Longest time that an idle engine may go without polling, since other engines may write
        files. None without a disk.
        """
        return None if self._disk is None else REST_S

    # --- what a plan names ------------------------------------------------------------------------

    def store(self, stores: Sequence[Store]) -> None:
        done = self.copies.store(stores)
        if self._ask is not None:
            done = OnAll(done, self._ask(Stored()))
        self._storing.append(_Storing(stores=list(stores), done=done))

    def load(self, load: Load) -> None:
        fetches = self._tiers.loads.fetches(load.number)
        loading = _Loading(load=load, fetches=fetches or [], after=self.copies.now())
        self._loading.append(loading)
        if any(fetch.is_on_disk for fetch in loading.fetches):
            assert self._disk is not None, "what is on disk has a disk"
            loading.reads = self._disk.read(loading.fetches)
        elif fetches is not None:
            self._bring(loading)

    def _bring(self, loading: _Loading) -> None:
        """Queues the copies of a load whose parts are all in host memory."""
        pages = [f for f in loading.fetches if f.item.what != "state"]
        states = [f for f in loading.fetches if f.item.what == "state"]
        pairs = [(fetch.arrival.id, fetch.item.place) for fetch in pages]
        item_runs: list[ItemRun] = [("page", *run, ()) for run in runs(pairs, MAX_RUN)]
        item_runs += [("state", f.arrival.id, f.item.place, 1, f.arrival.windows) for f in states]
        loading.done = self.copies.bring(loading.after, item_runs)
        if self._ask is not None:
            command = Bring(number=loading.load.number, runs=tuple(item_runs))
            loading.done = OnAll(loading.done, self._ask(command))

    # --- what becomes of it -----------------------------------------------------------------------

    def poll(self) -> bool:
        """Reports finished stores and loads. Returns whether there were any."""
        is_any = False
        while self._storing and self._storing[0].done.query():
            self._end_stores(self._storing.popleft(), is_there=True)
            is_any = True
        if self._disk is not None:
            self._disk.poll()
        for loading in self._loading[:]:
            if loading.reads is not None:
                is_any = self._end_reads(loading, loading.reads) or is_any
            elif loading.done is None:
                self._tiers.loads.failed(())
                is_any = self._fail(loading)
            elif loading.done.query():
                is_any = self._arrive(loading) or is_any
                self._release(loading)
        return is_any

    def wait(self, seconds: float) -> None:
        """Waits until a store or load is over, for `seconds` at most."""
        end_s = time.perf_counter() + seconds
        while not (self.poll() or self._hasten()) and self.is_busy and time.perf_counter() < end_s:
            time.sleep(WAIT_S)

    def _hasten(self) -> bool:
        """Lets the next step be launched after queued copies that will end soon, instead of waiting
        for them to end. Returns whether there are any. Their sources do not change until then.
        """
        is_any = False
        for loading in self._loading:
            if loading.done is None or loading.is_over or self._ask is not None:
                continue
            if self._tiers.holdings.rates.load_seconds(self._num_bytes(loading), 0) <= HASTE_S:
                self.copies.order(loading.done)
                is_any = self._arrive(loading) or is_any
        return is_any

    def end_loads(self) -> None:
        """Waits until no copy is running: all loads have arrived or failed. Stores on their way are
        dropped, since it is unknown which contents they copied.
        """
        while self._loading:
            for loading in self._loading:
                if loading.done is not None:
                    loading.done.synchronize()
            if not self.poll():
                time.sleep(WAIT_S)
        while self._storing:
            storing = self._storing.popleft()
            storing.done.synchronize()
            self._end_stores(storing, is_there=False)
        self._tiers.stores.forget_all()

    def _end_reads(self, loading: _Loading, reads: Reads) -> bool:
        """Queues the copies to the device once a load's reads are over. Returns whether anything
        has changed.
        """
        assert self._disk is not None, "what is on disk has a disk"
        is_over = reads.is_over
        if not is_over and not self._disk.give_up(reads):
            return False
        loading.reads = None
        if is_over and self._disk.take(reads):
            self._bring(loading)
            return True
        return self._fail(loading)

    def close(self, end_s: float) -> None:
        """Writes the items that are to outlive the engine, until `end_s` of `perf_counter`. First
        waits for running copies: their memory may go after this."""
        for storing in self._storing:
            storing.done.synchronize()
        for loading in self._loading:
            if loading.done is not None:
                loading.done.synchronize()
        if self._disk is not None:
            self._disk.close(end_s)

    def _end_stores(self, storing: _Storing, *, is_there: bool) -> None:
        report = self._tiers.stores.stored if is_there else self._tiers.stores.not_stored
        for store in storing.stores:
            report(store.what, store.key)

    def _arrive(self, loading: _Loading) -> bool:
        """Reports a load as arrived. Returns whether that is news."""
        load = loading.load
        if loading.is_over:
            return False
        loading.is_over = True
        self._tiers.host.pin(fetch.item for fetch in loading.fetches)
        for arrival in load.arrivals:
            if arrival.what == "state":
                self._runner.filled(arrival.id, load.position)
        self._scheduler.arrived(load.number)
        return True

    def _release(self, loading: _Loading) -> None:
        """Unpins the sources of a load that has arrived, whose copies are over."""
        self._loading.remove(loading)
        assert loading.done is not None, "copies that are over were queued"
        self._tiers.host.unpin(fetch.item for fetch in loading.fetches)
        self.num_pages_brought += sum(arrival.what != "state" for arrival in loading.load.arrivals)
        seconds = loading.done.seconds()
        if seconds is not None:
            self._tiers.holdings.rates.host.measure(self._num_bytes(loading), seconds)

    def _num_bytes(self, loading: _Loading) -> int:
        return sum(self.copies.host.of(fetch.item.what).item_bytes for fetch in loading.fetches)

    def _fail(self, loading: _Loading) -> bool:
        self._loading.remove(loading)
        if self._ask is not None:
            self._ask(Bring(number=loading.load.number))
        self._scheduler.failed(loading.load.number)
        return True
