"""Runs all calls to one engine on its own thread, in the order in which they were made.

Callers may be many threads: a step that one of them waits for serves the requests of all. What ends
a caller (Ctrl-C, an alarm's exception, a stream that is given up) ends its wait and never a step,
since Python raises it in the caller's thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar

import torch

from milepost.engine.ending import close_on_sigterm, end_with_program
from milepost.engine.loop.core import Engine
from milepost.engine.loop.group import RequestGroup
from milepost.errors import EngineDeadError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_QueuedCall = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]
_Todo = SimpleQueue[
    _QueuedCall | None
]  # may be put to from a collector's callback, unlike an executor

SLICE_S = 0.1
"""Seconds of steps for one caller between two reports of its progress."""
_END_S = 10.0
"""Time for which closing an engine waits for the last step, besides the time for writing."""


class EngineThread:
    """The thread of one engine, until `close`, or until nothing refers to it any more, or until
    the program ends. Then it closes the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._todo: _Todo = SimpleQueue()
        self._gate = threading.RLock()  # a collector's callback may queue in the midst of queueing
        self._is_closed = False
        self._pid = os.getpid()
        device = engine.runner.pools.device
        self._thread = threading.Thread(
            target=_serve, args=(self._todo, device), name="milepost-engine", daemon=True
        )
        self._thread.start()
        end_s = _END_S + engine.config.flush_s
        self._end = end_with_program(self, _end, self._todo, self._thread, engine.close, end_s)
        if engine.config.cache_dir is not None:
            close_on_sigterm()

    def close(self) -> None:
        """Closes the engine once what is queued is done. Later calls raise EngineDeadError."""
        with self._gate:
            self._is_closed = True
        self._end()

    @property
    def _is_open(self) -> bool:
        return self._end.alive and not self._is_closed

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Returns the result of `work`, which continues if the caller is interrupted while it
        waits."""
        return self._queue(work, *args).result()

    def tidy(self, work: Callable[..., object], *args: Any) -> None:
        """Runs a caller's cleanup. The garbage collector may end a caller on any thread: on the
        engine's own, `work` is only queued, and at the interpreter's end it is dropped."""
        try:
            future = self._queue(work, *args)
        except EngineDeadError:
            return
        if threading.current_thread() is not self._thread:
            future.result()

    def finish(
        self,
        begin: Callable[[], None],
        groups: Sequence[RequestGroup],
        end: Callable[[], object],
        advance: Callable[[int], object],
    ) -> None:
        """Calls `begin`, which fills `groups`, has steps run until all of them are over, then
        calls `end`. `advance` is told now and then how many more are over.

        Each wait for the thread takes a tenth of a millisecond, so one does all of a short answer.
        Raises what `begin` and `Engine.step` raise."""
        first = 0  # groups before it are over

        def are_over() -> bool:
            nonlocal first
            while first < len(groups) and groups[first].is_finished:
                first += 1
            return first == len(groups)

        def begun() -> bool:
            begin()
            return self._advance(are_over, end)

        num_over, is_done = 0, self.run(begun)
        while True:
            num_before, num_over = num_over, sum(group.is_finished for group in groups)
            advance(num_over - num_before)
            if is_done:
                return
            is_done = self.run(self._advance, are_over, end)

    def steps(self, is_enough: Callable[[], bool], result: Callable[[], T]) -> T | None:
        """Runs steps until `is_enough`, and returns the `result` then. Returns None if they have to
        go on: after SLICE_S, or after one step while other callers wait. Raises what `Engine.step`
        raises."""
        results: list[T] = []
        self.run(self._advance, is_enough, lambda: results.append(result()))
        return results[0] if results else None

    def _advance(self, is_enough: Callable[[], bool], end: Callable[[], object]) -> bool:
        """Runs steps for a while. Returns whether that was enough, and then `end` was called."""
        end_s = monotonic() + SLICE_S
        while not is_enough():
            if monotonic() > end_s:
                return False
            self._engine.step()
            if not self._todo.empty():
                break
        is_done = is_enough()
        if is_done:
            end()
        return is_done

    def _queue(self, work: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()
        if os.getpid() != self._pid:
            raise EngineDeadError(
                "the engine runs in the process that this one was forked from: make another one "
                "here, after starting the process with `spawn`"
            )
        with self._gate:
            if not self._is_open:
                raise EngineDeadError("the engine was closed: make a new one")
            self._todo.put((future, work, args))
        return future


def _serve(todo: _Todo, device: torch.device) -> None:
    """Runs in the thread. Holds no reference to the engine while it has nothing to do."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while (asked := todo.get()) is not None:
        future, work, args = asked
        try:
            future.set_result(work(*args))
        except BaseException as error:  # noqa: BLE001 - the caller has it
            future.set_exception(error)
        del asked, future, work, args


def _end(todo: _Todo, thread: threading.Thread, close: Callable[[], object], end_s: float) -> None:
    """Has the thread close the engine and end, and waits for that, unless this is the thread."""
    future: Future[object] = Future()
    todo.put((future, close, ()))
    todo.put(None)
    if thread is threading.current_thread():
        return
    thread.join(end_s)
    if thread.is_alive():
        logger.error("the engine did not end within %g seconds, and is left as it is", end_s)
    elif future.done() and (error := future.exception()) is not None:
        logger.error("the engine did not end as it should: %r", error)
