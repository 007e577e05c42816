"""Threads that never delay the end of the process, even if a directory never responds.

An executor's threads are joined when the interpreter ends, so one that hangs in a read of a network
file system would keep the process alive.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from milepost.errors import MilepostError

logger = logging.getLogger(__name__)
Returned = TypeVar("Returned")


class Threads:
    """Runs submitted calls in order, on up to `most` threads that are started on demand. Each
    thread calls `begin` first."""

    def __init__(self, most: int, name: str, begin: Callable[[], object] = int) -> None:
        self._most, self._name, self._begin = most, name, begin
        self._num_threads = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._finalizer = weakref.finalize(self, self._jobs.put, None)

    def submit(self, call: Callable[..., Returned], *args: Any) -> Future[Returned]:
        """Queues a call and returns its future. It can be cancelled until it has begun, and is
        cancelled if the system has no thread for it.
        """
        future: Future[Returned] = Future()
        self._jobs.put((future, call, args))
        if self._num_threads < self._most:
            self._start()
        if not self._num_threads:
            future.cancel()
        return future

    def _start(self) -> None:
        """Starts another thread. If the system refuses, the existing threads do its work."""
        name = f"{self._name}-{self._num_threads + 1}"
        given = self._jobs, self._begin
        try:
            Thread(target=_run, args=given, name=name, daemon=True).start()
        except RuntimeError as error:
            logger.error("%s: %s", name, error)
        else:
            self._num_threads += 1

    def close(self) -> None:
        """Cancels queued calls. Running ones continue, and nothing waits for them."""
        try:
            while job := self._jobs.get_nowait():
                job[0].cancel()
        except Empty:
            pass
        self._finalizer()


_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


def _run(jobs: SimpleQueue[_Job | None], begin: Callable[[], object]) -> None:
    begin()
    while (job := jobs.get()) is not None:
        future, call, args = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call(*args))
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)
        del job, future, call, args  # they may keep memory alive
    jobs.put(None)  # for the other threads


class Outcomes:
    """Reads the results of calls; each kind of failure is logged once."""

    def __init__(self) -> None:
        self._complained: set[type[BaseException]] = set()

    def result(self, future: Future[Returned], otherwise: Returned) -> Returned:
        """Returns the result of a finished future, or `otherwise`. An exception, such as
        MemoryError, counts as a failure of the file; a lost rank is the engine's failure and raises
        EngineDeadError.
        """
        if future.cancelled():
            return otherwise
        error = future.exception()
        if isinstance(error, MilepostError):
            raise error
        if error is not None and type(error) not in self._complained:
            self._complained.add(type(error))
            logger.error("tiers: a file was not read or written to its end: %r", error)
        return otherwise if error is not None else future.result()
