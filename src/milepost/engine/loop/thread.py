"""Runs whatever touches one engine on a thread of its own, in the order in which it was asked for.

Callers may be many threads: a step that one of them waits for serves the requests of all. What ends
a caller (Ctrl-C, an alarm's exception, a stream that is given up) ends its wait and never a step,
since Python raises it in the caller's thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar

import torch

from milepost.engine.loop.core import Engine

T = TypeVar("T")
_QueuedCall = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]
_Todo = SimpleQueue[
    _QueuedCall | None
]  # may be put to from a collector's callback, unlike an executor

SLICE_S = 0.1
"""Seconds of steps for one caller, until it hears how far its requests have come."""
_END_S = 10.0
"""How long the interpreter's end waits for the last step."""


class EngineThread:
    """The thread of one engine, until nothing refers to it any more."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._todo: _Todo = SimpleQueue()
        device = engine.runner.pools.device
        self._thread = threading.Thread(
            target=_serve, args=(self._todo, device), name="milepost-engine", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._todo, self._thread)

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """The result of `work`; it goes on if the caller is interrupted while it waits."""
        return self._queue(work, *args).result()

    def tidy(self, work: Callable[..., object], *args: Any) -> None:
        """Run what a caller leaves to be done. A collector may end a caller anywhere: on this
        thread `work` is only queued, and at the interpreter's end dropped."""
        if not self._end.alive:
            return
        future = self._queue(work, *args)
        if threading.current_thread() is not self._thread:
            future.result()

    def steps(self, is_enough: Callable[[], bool], result: Callable[[], T]) -> T | None:
        """The `result` once steps have run until `is_enough`. None if they have to go on: after
        SLICE_S, or one step while others ask for something. Raises what `Engine.step` raises."""
        return self.run(self._advance, is_enough, result)

    def _advance(self, is_enough: Callable[[], bool], result: Callable[[], T]) -> T | None:
        end_s = monotonic() + SLICE_S
        while not is_enough():
            if monotonic() > end_s:
                return None
            self._engine.step()
            if not self._todo.empty():
                break
        return result() if is_enough() else None

    def _queue(self, work: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()
        self._todo.put((future, work, args))
        return future


def _serve(todo: _Todo, device: torch.device) -> None:
    """The thread: refers to no engine while it has nothing to do."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while (asked := todo.get()) is not None:
        future, work, args = asked
        try:
            future.set_result(work(*args))
        except BaseException as error:  # noqa: BLE001 - the caller has it
            future.set_exception(error)
        del asked, future, work, args


def _end(todo: _Todo, thread: threading.Thread) -> None:
    todo.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_S)
