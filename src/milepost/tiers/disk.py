"""Reads and writes files beside the steps: one thread that writes and deletes, some that read."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from milepost.tiers.arena import Memory
from milepost.tiers.files import Files, Name
from milepost.tiers.policy import Fetch, Tiers
from milepost.tiers.tier import Item

NUM_READERS = 4
MAX_WRITES = 16
"""Under way at a time: what has not been begun can still be given up."""
SCAN_S, ITEMS_AT_START, ITEMS_EACH = 0.5, 10_000, 500
"""An engine with many files starts before all of them are known: it waits so long for their names,
and files so many at the start, and with each look at what is over.
"""
CLOSE_S = 20.0
"""So long an engine that is ended may write."""


@dataclass(slots=True, eq=False)
class Reads:
    """Files that a load waits for."""

    futures: list[tuple[Fetch, Future[bool]]]
    begun_s: float = field(default_factory=time.perf_counter)

    @property
    def is_over(self) -> bool:
        return all(future.done() for _, future in self.futures)


class Disk:
    """The files of `tiers`, from and to places in host memory."""

    def __init__(self, files: Files, tiers: Tiers, host: Memory) -> None:
        self._files, self._tiers, self._host = files, tiers, host
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="tiers-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tiers-write")
        self._writing: deque[tuple[Item, Item, Future[bool]]] = deque()
        self._scan: Future[list[Name]] | None = self._readers.submit(files.names)
        self._known: deque[Name] = deque()
        wait([self._scan], timeout=SCAN_S)
        self._take_names(ITEMS_AT_START)

    def _take_names(self, most: int) -> None:
        """File up to so many of what was there at the start."""
        if self._scan is not None and self._scan.done():
            self._known.extend(self._scan.result())
            self._scan = None
        for _ in range(min(most, len(self._known))):
            name = self._known.popleft()
            self._tiers.found(name.what, name.key, name.parent, name.position)

    @property
    def is_busy(self) -> bool:
        return bool(self._writing or self._tiers.has_writes)

    def read(self, fetches: list[Fetch]) -> Reads:
        """Begin to read what fetches need."""
        return Reads(
            [
                (fetch, self._readers.submit(self._files.read, *self._of(fetch.item)))
                for fetch in fetches
                if fetch.is_on_disk
            ]
        )

    def take(self, reads: Reads) -> bool:
        """Take note of reads that are over; whether all of it is there."""
        missing, num_bytes = [], 0
        for fetch, future in reads.futures:
            if future.result():
                self._tiers.read(fetch.item)
                num_bytes += self._host.of(fetch.item.what).item_bytes
            else:
                missing.append((fetch.item.what, fetch.item.key))
        if missing:
            self._tiers.failed(missing)
        self._tiers.rates.read(num_bytes, time.perf_counter() - reads.begun_s)
        return not missing

    def poll(self) -> None:
        """Take note of writes that are over, and begin others."""
        if self._known or self._scan is not None:
            self._take_names(ITEMS_EACH)
        while self._writing and self._writing[0][2].done():
            item, copy, future = self._writing.popleft()
            self._tiers.written(item, copy, is_there=future.result())
        room = MAX_WRITES - len(self._writing)
        if room > 0 and self._tiers.has_writes:
            for item, copy in self._tiers.take_writes(room):
                name, contents = self._of(item)
                future = self._writer.submit(self._files.write, name, item.tokens, contents)
                self._writing.append((item, copy, future))
        gone, self._tiers.gone_from_disk = self._tiers.gone_from_disk, []
        for item in gone:
            self._writer.submit(self._files.remove, _name(item))

    def _of(self, item: Item) -> tuple[Name, list[memoryview]]:
        return _name(item), self._host.of(item.what).buffers(item.place)

    def close(self) -> None:
        """Write what is ready, for a while."""
        end_s = time.perf_counter() + CLOSE_S
        self.poll()
        while self._writing and time.perf_counter() < end_s:
            self._writing[0][2].result()
            self.poll()
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=True)


def _name(item: Item) -> Name:
    return Name(what=item.what, key=item.key, parent=item.parent, position=item.position)
