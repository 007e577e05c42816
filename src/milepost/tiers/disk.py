"""Reads and writes files beside the steps: one thread that writes and deletes, some that read.

Of several ranks each has files of its own, and something is there once all of them have it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import ceil

from milepost.tiers.arena import Arena
from milepost.tiers.files import NUM_FOLDERS, Files
from milepost.tiers.loads import Fetch
from milepost.tiers.names import Finds, Name, News, name_of
from milepost.tiers.orders import Ask, OnDisk
from milepost.tiers.policy import Tiers
from milepost.tiers.tier import Item

NUM_READERS = max(4, min(16, os.cpu_count() or 4))
"""A checksum takes longer than a read from the system's cache, and more reads at a time are faster
on most disks.
"""
MAX_WRITES = 16
"""Under way at a time: what has not been begun can still be given up."""
SCAN_S, ITEMS_AT_START, ITEMS_EACH = 0.5, 10_000, 500
"""An engine with many files starts before all of them are known: it waits so long for their names,
and files so many at the start, and with each look at what is over.
"""
ROUND_S, NUM_LOOKS = 10.0, 32
"""What other engines have written is looked for in so many parts, all of them in so long."""
CLOSE_S = 20.0
"""So long an engine that is ended may write."""


@dataclass(slots=True, eq=False)
class Reads:
    """Files that a load waits for."""

    futures: list[tuple[Fetch, list[Future[bool]]]]
    """Of each rank, or of all others at once."""
    begun_s: float
    ended_s: float = 0.0
    """When the last one was over so far: it is looked at between steps."""

    def __post_init__(self) -> None:
        for _, futures in self.futures:
            for future in futures:
                future.add_done_callback(self._note_end)

    def _note_end(self, _: Future[bool]) -> None:
        self.ended_s = time.perf_counter()

    @property
    def is_over(self) -> bool:
        return all(future.done() for _, futures in self.futures for future in futures)


class Disk:
    """The files of `tiers`, from and to places in host memory; `ask` as for a `Copier`."""

    def __init__(self, files: Files, tiers: Tiers, host: Arena, ask: Ask | None = None) -> None:
        self._files, self._tiers, self._host, self._ask = files, tiers, host, ask
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="tiers-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tiers-write")
        self._writing: deque[tuple[Item, Item, list[Future[bool]]]] = deque()
        self._finds = Finds(tiers.holdings.head, self._is_needed)
        self._num_looked = 0
        self._known: deque[tuple[Callable[[Name], None], Name]] = deque()
        self._looked_s = time.perf_counter()
        self._scan: Future[News] | None = self._readers.submit(self._find, NUM_FOLDERS)
        wait([self._scan], timeout=SCAN_S)
        self._take_names(ITEMS_AT_START)

    def _look(self) -> None:
        """See what others have written, a part of it at a time, and what was there at the start."""
        if self._known or self._scan is not None:
            self._take_names(ITEMS_EACH)
            return
        now_s = time.perf_counter()
        share = (now_s - self._looked_s) / ROUND_S
        if share * NUM_LOOKS >= 1:
            self._looked_s = now_s
            self._scan = self._readers.submit(self._find, ceil(min(share, 1) * NUM_FOLDERS))

    def _find(self, num_folders: int) -> News:
        """Look through some folders; what they have is known once all have been looked through."""
        come, gone = self._files.look(num_folders)
        known = self._tiers.disk
        self._finds.add(name for name in come if known.get(name.what, name.key) is None)
        self._num_looked += num_folders
        news = News()
        if self._num_looked >= NUM_FOLDERS:
            self._num_looked = 0
            news = self._finds.end_round()
        news.lost = gone
        return news

    def _is_needed(self, name: Name) -> bool:
        return self._tiers.disk.is_needed(name.what, name.key)

    def _take_names(self, most: int) -> None:
        """File up to so many of those that are known by now."""
        if self._scan is not None and self._scan.done():
            news, writes = self._scan.result(), self._tiers.writes
            self._scan = None
            self._known.extend((writes.lost, name) for name in news.lost)
            self._known.extend((writes.found, name) for name in news.found)
            self._known.extend((writes.found_loose, name) for name in news.loose)
        for _ in range(min(most, len(self._known))):
            file, name = self._known.popleft()
            file(name)

    @property
    def is_busy(self) -> bool:
        is_writing = bool(self._writing or self._tiers.writes.are_any)
        return is_writing or bool(self._known) or self._scan is not None

    def read(self, fetches: list[Fetch]) -> Reads:
        """Begin to read what fetches need."""
        begun_s = time.perf_counter()
        futures = [(fetch, self._read(fetch.item)) for fetch in fetches if fetch.is_on_disk]
        return Reads(futures, begun_s)

    def _read(self, item: Item) -> list[Future[bool]]:
        own = self._readers.submit(self._files.read, *self._of(item))
        return [own, *self._others(OnDisk(do="read", name=name_of(item), place=item.place))]

    def _others(self, order: OnDisk) -> list[Future[bool]]:
        return [] if self._ask is None else [self._ask(order)]

    def take(self, reads: Reads) -> bool:
        """Take note of reads that are over; whether all of it is there."""
        missing, num_bytes = [], 0
        for fetch, futures in reads.futures:
            if all(future.result() for future in futures):
                self._tiers.host.fill(fetch.item)
                num_bytes += self._host.of(fetch.item.what).item_bytes
            else:
                missing.append((fetch.item.what, fetch.item.key))
        if missing:
            self._tiers.loads.failed(missing)
        self._tiers.rates.read(num_bytes, reads.ended_s - reads.begun_s)
        return not missing

    def poll(self) -> None:
        """Take note of writes that are over, and begin others."""
        self._look()
        while self._writing and all(future.done() for future in self._writing[0][2]):
            item, copy, futures = self._writing.popleft()
            is_there = all(future.result() for future in futures)
            self._tiers.writes.written(item, copy, is_there=is_there)
        room = MAX_WRITES - len(self._writing)
        if room > 0 and self._tiers.writes.are_any:
            for item, copy in self._tiers.writes.take(room):
                self._writing.append((item, copy, self._write(item)))
        for name in self._tiers.writes.take_gone():
            self._writer.submit(self._files.remove, name)
            self._others(OnDisk(do="remove", name=name))

    def _write(self, item: Item) -> list[Future[bool]]:
        name, contents = self._of(item)
        own = self._writer.submit(self._files.write, name, item.tokens, contents)
        order = OnDisk(do="write", name=name, tokens=item.tokens, place=item.place)
        return [own, *self._others(order)]

    def _of(self, item: Item) -> tuple[Name, list[memoryview]]:
        return name_of(item), self._host.of(item.what).buffers(item.place)

    def close(self) -> None:
        """Write what is ready, for a while."""
        end_s = time.perf_counter() + CLOSE_S
        self.poll()
        while self._writing and time.perf_counter() < end_s:
            wait(self._writing[0][2], timeout=CLOSE_S)
            self.poll()
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=True)
