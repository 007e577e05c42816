"""Shows the progress of a start: a bar on a terminal, lines in a log elsewhere.

A line has the share in percent and the seconds left, and comes every few seconds, also while
nothing advances. Lines go to the log `milepost.start` if it is enabled, and to standard error
otherwise.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

T = TypeVar("T")
Amount = Literal["bytes", "steps"]

EVERY_S = 5.0
"""Seconds between two lines."""

logger = logging.getLogger("milepost.start")


@contextmanager
def progress(
    what: str, total: int, unit: Amount = "steps", *, is_shown: bool = True
) -> Iterator[Callable[[int], object]]:
    """Shows the work `what` until the context ends; yields a function to report what was done since
    it was last called."""
    if not is_shown or not total:
        yield lambda _: None
    elif sys.stderr.isatty() and not logger.handlers:
        with _bar(what, total, unit) as advance:
            yield advance
    else:
        with writing_lines(ProgressLines(what, total, unit), threading.Event()) as advance:
            yield advance


def track(items: Sequence[T], what: str, *, is_shown: bool = True) -> Iterator[T]:
    """Yields the items, and shows how many are done."""
    with progress(what, len(items), is_shown=is_shown) as advance:
        for item in items:
            yield item
            advance(1)


class ProgressLines:
    """The lines about one piece of work."""

    def __init__(
        self, what: str, total: int, unit: Amount, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total, self._unit, self._clock = what, total, unit, clock
        self._done = 0
        self._start = clock()

    def advance(self, amount: int) -> None:
        """Counts what was done."""
        self._done += amount

    def line(self) -> str:
        """Returns the progress so far, with an estimate of the seconds left."""
        spent = self._clock() - self._start
        words = f"{self._what}: {100 * self._done // self._total} % of {self._amount(self._total)}"
        if not self._done:
            return f"{words}, {spent:.0f} s so far"
        left = spent * max(self._total - self._done, 0) / self._done
        return f"{words}, {left:.0f} s left"

    def last_line(self) -> str:
        """Returns the amount done and the time that it took."""
        spent = self._clock() - self._start
        return f"{self._what}: {self._amount(self._done)} in {spent:.1f} s"

    def _amount(self, number: int) -> str:
        return f"{number / 2**30:.1f} GiB" if self._unit == "bytes" else f"{number}"


@contextmanager
def writing_lines(
    lines: ProgressLines, is_over: threading.Event
) -> Iterator[Callable[[int], object]]:
    """Writes a line every few seconds, from a thread: a single step may take longer."""

    def write() -> None:
        while not is_over.wait(EVERY_S):
            _write(lines.line())

    writer = threading.Thread(target=write, name="progress", daemon=True)
    writer.start()
    try:
        yield lines.advance
    finally:
        is_over.set()
        writer.join()
    _write(lines.last_line())


def _write(line: str) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", line)
    else:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        print(f"{now} INFO {logger.name}: {line}", file=sys.stderr, flush=True)


@contextmanager
def _bar(what: str, total: int, unit: Amount) -> Iterator[Callable[[int], object]]:
    # Imported here because most processes that import this show no bar.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    amount = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), amount)
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)
