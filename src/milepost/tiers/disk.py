"""Reads and writes files in parallel with the steps: one thread writes and deletes, several read.

With several ranks, each has its own files, and an item is on disk once all ranks have it. A
directory that does not respond is not used until it does, and nothing waits for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass

from milepost.tiers.arena import Arena
from milepost.tiers.commands import OnDisk, SendTierCommand
from milepost.tiers.file_format import FileName, name_of
from milepost.tiers.files import Files
from milepost.tiers.finding import FileFinder
from milepost.tiers.loads import Fetch
from milepost.tiers.policy import Tiers
from milepost.tiers.threads import Outcomes, Threads
from milepost.tiers.tier import Item

logger = logging.getLogger(__name__)

NUM_READERS = max(4, min(16, os.cpu_count() or 4))
"""Number of reading threads. A checksum takes longer than a read from the system's cache, and most
disks are faster with more reads at a time.
"""
MAX_WRITES = 16
"""Largest number of writes that are submitted at a time. A write can be withdrawn until it has
begun."""
CHECK_S = 0.1
"""Interval between two looks at the writes of an engine that is closing."""
STALL_S = 5.0
"""A load is given up if none of its files has arrived for this long plus twice the time expected
for all of them.
"""
LATE = 10.0
"""A load is also given up once it has taken this many times the expected time, if its tokens could
have been computed meanwhile.
"""
IDLE_STALL_S = 30.0
"""The limit corresponding to STALL_S for writes and for scans of folders, which no request waits
for."""


@dataclass(slots=True, eq=False)
class Reads:
    """File reads that a load waits for."""

    futures: list[tuple[Fetch, list[Future[bool]]]]
    """One future for each rank, or one for this rank and one for all others."""
    begun_s: float
    stall_s: float = STALL_S
    """Seconds without an arrival after which the reads are given up."""
    most_s: float = float("inf")
    """Seconds after which reads that are not complete are given up."""
    ended_s: float = 0.0
    """Time at which the latest read ended. The read sets it itself, since reads are only polled
    between steps."""

    def __post_init__(self) -> None:
        for _, futures in self.futures:
            for future in futures:
                future.add_done_callback(self._note_end)

    def _note_end(self, future: Future[bool]) -> None:
        if not future.cancelled():
            self.ended_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        return all(future.done() for _, futures in self.futures for future in futures)

    @property
    def is_overdue(self) -> bool:
        now_s, last_s = time.perf_counter(), max(self.ended_s, self.begun_s)
        return now_s - last_s > self.stall_s or now_s - self.begun_s > self.most_s


@dataclass(slots=True, eq=False)
class _Write:
    """An item in host memory, its copy on disk, and the writes of all ranks."""

    item: Item
    copy: Item
    futures: list[Future[bool]]


class Disk:
    """Moves the files of `tiers` from and to places in host memory. `ask` is as for
    `TierTransfers`."""

    def __init__(
        self, files: Files, tiers: Tiers, host: Arena, ask: SendTierCommand | None = None
    ) -> None:
        self._files, self._tiers, self._host, self._ask = files, tiers, host, ask
        self._readers = Threads(NUM_READERS, "tiers-read")
        self._writer = Threads(1, "tiers-write")
        self._writing: deque[_Write] = deque()
        self._removal: Future[None] | None = None
        """The last file to be deleted."""
        self._outcomes = Outcomes()
        self._late: list[Reads] = []
        """Reads that were given up but may still write to their places."""
        self._idle_since_s = time.perf_counter()
        """Time at which a write or a folder scan last ended, or at which none was in progress."""
        self._num_folders = 0
        self._finder = FileFinder(files, tiers, self._readers, self._outcomes)

    # --- reads ------------------------------------------------------------------------------------

    def read(self, fetches: list[Fetch]) -> Reads:
        """Begins to read the files that fetches need."""
        begun_s = time.perf_counter()
        far = [fetch for fetch in fetches if fetch.is_on_disk]
        rates, num_bytes = self._tiers.holdings.rates, sum(map(self._bytes, far))
        expected_s = num_bytes / rates.disk.value
        num_pages = sum(fetch.item.what == "page" for fetch in far)
        compute_s = rates.compute_seconds(num_pages * self._tiers.holdings.page_size)
        return Reads(
            [(fetch, self._read(fetch.item)) for fetch in far],
            begun_s,
            stall_s=STALL_S + 2 * expected_s,
            most_s=STALL_S + max(LATE * expected_s, compute_s),
        )

    def _read(self, item: Item) -> list[Future[bool]]:
        reading = self._readers.submit(self._files.read, *self._of(item))
        return [reading, *self._others(OnDisk(do="read", name=name_of(item), place=item.place))]

    def _others(self, command: OnDisk) -> list[Future[bool]]:
        return [] if self._ask is None else [self._ask(command)]

    def take(self, reads: Reads) -> bool:
        """Handles reads that are over. Returns whether all of them succeeded."""
        missing = []
        for fetch, futures in reads.futures:
            if self._has_come(futures):
                self._tiers.host.fill(fetch.item)
            else:
                missing.append((fetch.item.what, fetch.item.key))
        if missing:
            self._tiers.loads.failed(missing)
        self._measure(reads)
        return not missing

    def _measure(self, reads: Reads) -> None:
        """Measures the speed of the reads that succeeded."""
        num_bytes = sum(
            self._bytes(fetch) for fetch, futures in reads.futures if self._has_come(futures)
        )
        self._tiers.holdings.rates.disk.measure(num_bytes, reads.ended_s - reads.begun_s)

    def give_up(self, reads: Reads) -> bool:
        """Returns whether unfinished reads are given up. If so, their load fails, and their places
        stay reserved until nothing writes to them.
        """
        if not (self._tiers.holdings.disk_rests or reads.is_overdue):
            return False
        self._tiers.loads.failed(())
        for fetch, futures in reads.futures:
            if not self._is_cancelled(futures):
                self._tiers.host.pin((fetch.item,))
        self._late.append(reads)
        self._rest("could not be read from")
        return True

    def _throw_away(self, reads: Reads) -> None:
        """Releases the places of reads that were given up and are over, whether or not they
        succeeded.
        """
        host = self._tiers.host
        for fetch, futures in reads.futures:
            if not all(future.cancelled() for future in futures):
                host.unpin((fetch.item,))
                if not (fetch.item.pins or fetch.item.is_gone):
                    host.remove(fetch.item)
        self._measure(reads)

    def _has_come(self, futures: list[Future[bool]]) -> bool:
        """Whether all ranks have completed their read or write."""
        return all(self._outcomes.result(future, False) for future in futures)

    def _is_cancelled(self, futures: list[Future[bool]]) -> bool:
        """Cancels an operation if possible. Returns whether it will not run; commands already sent
        to other ranks cannot be cancelled.
        """
        return len(futures) == 1 and futures[0].cancel()

    # --- writes -----------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether there is work to poll for."""
        if self._tiers.holdings.disk_rests:
            return False
        return bool(self._writing or self._tiers.writes.are_any) or self._finder.is_busy

    def poll(self) -> None:
        """Handles finished operations and begins new writes."""
        self._take_written()
        self._check()
        if self._tiers.holdings.disk_rests:
            return
        self._finder.poll()
        room = MAX_WRITES - len(self._writing)
        if room > 0 and self._tiers.writes.are_any:
            for item, copy in self._tiers.writes.take(room):
                self._writing.append(_Write(item, copy, self._write(item)))
        for name in self._tiers.writes.take_gone():
            self._removal = self._writer.submit(self._files.remove, name)
            self._others(OnDisk(do="remove", name=name))

    def _take_written(self) -> None:
        while self._writing and all(future.done() for future in self._writing[0].futures):
            write = self._writing.popleft()
            is_there = self._has_come(write.futures)
            self._tiers.writes.written(write.item, write.copy, is_there=is_there)
            self._idle_since_s = time.perf_counter()

    def _write(self, item: Item) -> list[Future[bool]]:
        name, contents = self._of(item)
        writing = self._writer.submit(self._files.write, name, item.tokens, contents)
        command = OnDisk(do="write", name=name, tokens=item.tokens, place=item.place)
        return [writing, *self._others(command)]

    def _of(self, item: Item) -> tuple[FileName, list[memoryview]]:
        return name_of(item), self._host.of(item.what).buffers(item.place)

    def _bytes(self, fetch: Fetch) -> int:
        return self._host.of(fetch.item.what).item_bytes

    # --- a directory that does not answer ---------------------------------------------------------

    def _check(self) -> None:
        """Checks whether the directory responds."""
        for reads in self._late[:]:
            if reads.is_over:
                self._late.remove(reads)
                self._throw_away(reads)
        now_s, is_idle = time.perf_counter(), not (self._writing or self._finder.is_waiting)
        if is_idle or self._num_folders != self._files.num_looked:
            self._idle_since_s, self._num_folders = now_s, self._files.num_looked
        if self._tiers.holdings.disk_rests:
            if is_idle and not self._late:
                self._tiers.holdings.wake_disk()
                logger.warning("tiers: %s answers again", self._files.directory)
        elif now_s - self._idle_since_s > IDLE_STALL_S:
            self._rest(
                "has not been written to" if self._writing else "has not been looked through"
            )

    def _rest(self, what: str) -> None:
        """Stops using the disk until all outstanding operations have completed."""
        if self._tiers.holdings.disk_rests:
            return
        self._tiers.holdings.rest_disk()
        logger.error(
            "tiers: %s does not answer (it %s): until it does, what it has is computed, and "
            "nothing is written there",
            self._files.directory, what,
        )  # fmt: skip
        writing, self._writing = self._writing, deque()
        for write in writing:
            if self._is_cancelled(write.futures):
                self._tiers.writes.put_off(write.item, write.copy)
            else:
                self._writing.append(write)

    def close(self, end_s: float) -> None:
        """Writes ready items and deletes dropped ones, until `end_s` of `perf_counter` at most."""
        self.poll()
        while self._writing and time.perf_counter() < end_s:
            wait(self._writing[0].futures, timeout=CHECK_S)
            self.poll()
            if self._tiers.holdings.disk_rests:
                break
        is_late = bool(self._writing) or self._tiers.writes.are_any
        if is_late and not self._tiers.holdings.disk_rests:
            logger.warning(
                "tiers: the engine ended before all was written to %s: raise cache_flush_timeout_s",
                self._files.directory,
            )
        if self._removal is not None and not self._tiers.holdings.disk_rests:
            wait((self._removal,), timeout=max(end_s - time.perf_counter(), 0.0))
        self._readers.close()
        self._writer.close()
