"""Finds the files of the directory, also those that other engines write there later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from math import ceil

from milepost.tiers.file_format import FileName, Finds, News
from milepost.tiers.files import NUM_FOLDERS, Files
from milepost.tiers.policy import Tiers
from milepost.tiers.threads import Outcomes, Threads

SCAN_S, ITEMS_AT_START, ITEMS_EACH = 0.5, 10_000, 500
"""An engine with many files starts before it knows them all: it waits `SCAN_S` for their names,
then registers `ITEMS_AT_START` of them, and `ITEMS_EACH` more with each poll.
"""
ROUND_S, NUM_LOOKS = 10.0, 32
"""Other engines' files are looked for in `NUM_LOOKS` parts; a round through all parts takes
`ROUND_S`.
"""
NAMES_EACH = 256
"""Largest number of files whose tokens are read at a time, for listeners to events. A load waits
for these reads.
"""


class FileFinder:
    """Registers the names of files with `tiers`, and reads the tokens that listeners need."""

    def __init__(self, files: Files, tiers: Tiers, readers: Threads, outcomes: Outcomes) -> None:
        self._files, self._tiers, self._readers = files, tiers, readers
        self._outcomes = outcomes
        self._looked_s = time.perf_counter()
        self._finds = Finds(tiers.holdings.head, self._is_needed)
        self._num_looked = 0
        self._known: deque[tuple[Callable[[FileName], None], FileName]] = deque()
        self._tokens_read: Future[list[tuple[FileName, bytes | None]]] | None = None
        self._scan: Future[News] | None = self._readers.submit(self._find, NUM_FOLDERS)
        wait([self._scan], timeout=SCAN_S)
        self._take_names(ITEMS_AT_START)

    @property
    def is_busy(self) -> bool:
        """Whether there is work to poll for."""
        return bool(self._known) or self._scan is not None or self._tokens_read is not None

    @property
    def is_waiting(self) -> bool:
        """Whether the directory has not answered yet."""
        looks = (self._scan, self._tokens_read)
        return any(look is not None and not look.done() for look in looks)

    def poll(self) -> None:
        """Takes what was found, and looks further."""
        self._look()
        self._learn()

    def _look(self) -> None:
        """Registers files known since the start, then scans some folders for files that other
        engines have written.
        """
        if self._known or self._scan is not None:
            self._take_names(ITEMS_EACH)
            return
        now_s = time.perf_counter()
        share = (now_s - self._looked_s) / ROUND_S
        if share * NUM_LOOKS >= 1:
            self._looked_s = now_s
            self._scan = self._readers.submit(self._find, ceil(min(share, 1) * NUM_FOLDERS))

    def _find(self, num_folders: int) -> News:
        """Scans the next folders. Their files are reported once all folders have been scanned."""
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

    def _is_needed(self, name: FileName) -> bool:
        return self._tiers.disk.is_needed(name.what, name.key)

    def _take_names(self, most: int) -> None:
        """Registers at most `most` of the files found so far."""
        if self._scan is not None and self._scan.done():
            news, writes = self._outcomes.result(self._scan, News()), self._tiers.writes
            self._scan = None
            self._known.extend((writes.lost, name) for name in news.lost)
            self._known.extend((writes.found, name) for name in news.found)
            self._known.extend((writes.found_loose, name) for name in news.loose)
        for _ in range(min(most, len(self._known))):
            file, name = self._known.popleft()
            file(name)

    def _learn(self) -> None:
        """Reads the tokens of files that are known by name only, if anybody listens."""
        reach = self._tiers.reach
        if reach is None:
            return
        if self._tokens_read is not None and self._tokens_read.done():
            for name, tokens in self._outcomes.result(self._tokens_read, []):
                if tokens is None:
                    self._tiers.writes.lost(name)
                else:
                    reach.learn(name.key, tokens)
            self._tokens_read = None
        if self._tokens_read is None and reach.are_unread:
            names = reach.take_unread(NAMES_EACH)
            self._tokens_read = self._readers.submit(
                lambda: [(name, self._files.tokens(name)) for name in names]
            )
