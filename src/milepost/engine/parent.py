"""Ties a process to its parent: it ignores Ctrl-C, which the parent handles, and ends when the
parent has ended, whatever either was doing.

A parent that is killed tells nobody. On Linux the kernel is asked to kill its child then;
elsewhere, and where that came too late, a thread notices that the other end of the connection is
gone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_PR_SET_PDEATHSIG = 1


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started inside hear no Ctrl-C from their first moment on: what a thread
    does not take is inherited. Else each prints a traceback while it imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_main() -> Iterator[None]:
    """Processes that are started inside do not run the program's main module again, as
    multiprocessing has them do: a script need not guard it, since nothing of it is used."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def end_with_parent(connection: int) -> None:
    """Have this process killed when nobody holds the other end of a pipe or socket any more, or
    when the thread that started it ends; returns at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait_for_end, args=(connection,), name="parent", daemon=True).start()


def _wait_for_end(connection: int) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLHUP)  # told of without what was sent before being read
    while not any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll()):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
