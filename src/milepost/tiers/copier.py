"""Copies between the pools and host memory: out of the way of the steps, and never too early.

What leaves goes by a staging place on the device: there in the order of the steps, so nothing that
is launched behind it can overwrite it first; from there on a stream of its own. It can be read once
that copy's event has passed, and the staging place is used again only then. What comes waits for
all that was launched before the plan that names it, and is said to be there once its event has
passed; until then no step reads it. On a CPU a copy is made where it is named.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from milepost.cache.plans import Store, What
from milepost.runner.runner import Runner
from milepost.scheduler.plans import Load
from milepost.scheduler.scheduler import Scheduler
from milepost.tiers.arena import Memory, allocate_staging, runs
from milepost.tiers.disk import Disk, Reads
from milepost.tiers.policy import Fetch, Tiers

MAX_RUN = 16
"""Pages that are copied at once: padding between pages costs a copy of them."""
WAIT_S = 1e-4


class Event(Protocol):
    """Has passed once all is done that was launched before it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Link(Protocol):
    """The way between the device and host memory."""

    needs_staging: bool

    def now(self) -> Event:
        """Passes once all steps that are launched are done."""
        ...

    def copy(self, copies: Sequence[tuple[Memory, Memory, What, int, int, int]]) -> None:
        """Copy now, in the order of the steps: to, from, kind, first places, number."""
        ...

    def copy_behind(
        self,
        event: Event,
        copies: Sequence[tuple[Memory, Memory, What, int, int, int]],
        *,
        up: bool,
    ) -> Event:
        """Copy beside the steps, once an event has passed."""
        ...


class Passed:
    """An event of the past."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class DirectLink:
    """Memory that one processor copies, at once."""

    needs_staging = False

    def now(self) -> Event:
        return Passed()

    def copy(self, copies: Sequence[tuple[Memory, Memory, What, int, int, int]]) -> None:
        for target, source, what, first, other, num in copies:
            target.of(what).copy(first, source.of(what), other, num)

    def copy_behind(
        self,
        event: Event,
        copies: Sequence[tuple[Memory, Memory, What, int, int, int]],
        *,
        up: bool,  # noqa: ARG002
    ) -> Event:
        event.synchronize()
        self.copy(copies)
        return Passed()


class CudaLink(DirectLink):
    """A stream in each direction, beside the steps' own."""

    needs_staging = True

    def __init__(self, device: torch.device) -> None:
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)

    def now(self) -> Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def copy_behind(
        self,
        event: Event,
        copies: Sequence[tuple[Memory, Memory, What, int, int, int]],
        *,
        up: bool,
    ) -> Event:
        stream = self._up if up else self._down
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            self.copy(copies)
            done.record()
        return done


@dataclass(slots=True, kw_only=True)
class _Storing:
    stores: list[Store]
    staged: list[tuple[What, int]]
    done: Event


@dataclass(slots=True, kw_only=True, eq=False)
class _Loading:
    load: Load
    fetches: list[Fetch]
    after: Event
    reads: Reads | None = None
    """What is to be read from disk first."""
    done: Event | None = None
    begun_s: float = field(default_factory=time.perf_counter)


class Copier:
    """Carries what `tiers` decides between a runner's pools and host memory."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tiers: Tiers,
        memory: tuple[Memory, Memory],
        link: Link,
        disk: Disk | None = None,
    ) -> None:
        self._scheduler, self._runner, self._tiers = scheduler, runner, tiers
        self._device, self._host = memory
        self._link = link
        self._disk = disk
        limits = tiers.limits
        self._staging: Memory | None = None
        self._free: dict[bool, list[int]] = {False: [], True: []}
        if link.needs_staging:
            num_pages, num_states = limits.max_pages_under_way, limits.max_states_under_way
            self._staging = allocate_staging(self._device, num_pages, num_states)
            self._free = {False: list(range(num_pages)), True: list(range(num_states))}
        self._storing: deque[_Storing] = deque()
        self._loading: dict[int, _Loading] = {}
        self.num_pages_brought = 0
        self.num_states_brought = 0
        runner.carriers[tiers.name] = self

    @property
    def is_busy(self) -> bool:
        return bool(self._storing or self._loading)

    @property
    def is_writing(self) -> bool:
        """Whether anything is on its way to disk."""
        return self._disk is not None and self._disk.is_busy

    # --- what a plan names ------------------------------------------------------------------------

    def store(self, stores: Sequence[Store]) -> None:
        staged: list[tuple[What, int]] = []
        if self._staging is None:
            copies = [(self._host, self._device, s.what, s.place, s.id, 1) for s in stores]
            self._link.copy(copies)
            done: Event = Passed()
        else:
            staged = [(s.what, self._free[s.what == "state"].pop()) for s in stores]
            pairs = list(zip(stores, staged, strict=True))
            self._link.copy(
                [(self._staging, self._device, s.what, at, s.id, 1) for s, (_, at) in pairs]
            )
            copies = [(self._host, self._staging, s.what, s.place, at, 1) for s, (_, at) in pairs]
            done = self._link.copy_behind(self._link.now(), copies, up=False)
        self._storing.append(_Storing(stores=list(stores), staged=staged, done=done))

    def load(self, load: Load) -> None:
        fetches = self._tiers.fetches(load.number)
        loading = _Loading(load=load, fetches=fetches or [], after=self._link.now())
        self._loading[load.number] = loading
        if any(fetch.is_on_disk for fetch in loading.fetches):
            assert self._disk is not None, "what is on disk has a disk"
            loading.reads = self._disk.read(loading.fetches)
        elif fetches is not None:
            self._bring(loading)

    def _bring(self, loading: _Loading) -> None:
        """Queue the copies of a load whose parts are all in host memory."""
        pages = [f for f in loading.fetches if f.item.what != "state"]
        states = [f for f in loading.fetches if f.item.what == "state"]
        copies: list[tuple[Memory, Memory, What, int, int, int]] = []
        for what, fetches in (("page", pages), ("state", states)):
            pairs = [(fetch.arrival.id, fetch.item.place) for fetch in fetches]
            kind: What = "page" if what == "page" else "state"
            copies += [
                (self._device, self._host, kind, *run)
                for run in runs(pairs, MAX_RUN if what == "page" else 1)
            ]
        loading.done = self._link.copy_behind(loading.after, copies, up=True)

    # --- what becomes of it -----------------------------------------------------------------------

    def poll(self) -> bool:
        """Report what is over; whether anything was."""
        is_any = False
        while self._storing and self._storing[0].done.query():
            self._end_stores(self._storing.popleft(), is_there=True)
            is_any = True
        if self._disk is not None:
            self._disk.poll()
        for number, loading in list(self._loading.items()):
            if loading.reads is not None:
                is_any = self._end_reads(number, loading, loading.reads) or is_any
            elif loading.done is None:
                self._tiers.failed(())
                is_any = self._fail(number)
            elif loading.done.query():
                del self._loading[number]
                self._arrive(loading)
                is_any = True
        return is_any

    def wait(self, seconds: float) -> None:
        """Until something is over, or for so long."""
        end_s = time.perf_counter() + seconds
        while not self.poll() and self.is_busy and time.perf_counter() < end_s:
            time.sleep(WAIT_S)

    def end_loads(self) -> None:
        """Wait until nothing is copied any more: loads have arrived or failed, and what was on its
        way out is forgotten, since nobody knows what it was copied from.
        """
        while self._loading:
            for loading in self._loading.values():
                if loading.done is not None:
                    loading.done.synchronize()
            if not self.poll():
                time.sleep(WAIT_S)
        while self._storing:
            storing = self._storing.popleft()
            storing.done.synchronize()
            self._end_stores(storing, is_there=False)
        self._tiers.forget_stores()

    def _end_reads(self, number: int, loading: _Loading, reads: Reads) -> bool:
        """What was on disk goes on to the device; whether anything has changed."""
        assert self._disk is not None, "what is on disk has a disk"
        if not reads.is_over:
            return False
        loading.reads = None
        if self._disk.take(reads):
            self._bring(loading)
            return True
        return self._fail(number)

    def close(self) -> None:
        """Write what is to outlive the engine."""
        if self._disk is not None:
            self._disk.close()

    def _end_stores(self, storing: _Storing, *, is_there: bool) -> None:
        for what, place in storing.staged:
            self._free[what == "state"].append(place)
        report = self._tiers.stored if is_there else self._tiers.not_stored
        for store in storing.stores:
            report(store.what, store.key)

    def _arrive(self, loading: _Loading) -> None:
        load, seconds = loading.load, time.perf_counter() - loading.begun_s
        num_states = sum(arrival.what == "state" for arrival in load.arrivals)
        self.num_states_brought += num_states
        self.num_pages_brought += len(load.arrivals) - num_states
        num_bytes = sum(self._host.of(f.item.what).item_bytes for f in loading.fetches)
        self._tiers.rates.copied(num_bytes, seconds)
        for arrival in load.arrivals:
            if arrival.what == "state":
                self._runner.filled(arrival.id, load.position)
        self._scheduler.arrived(load.number)

    def _fail(self, number: int) -> bool:
        del self._loading[number]
        self._scheduler.failed(number)
        return True
