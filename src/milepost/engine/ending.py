"""How processes end: engines that a program leaves open when it exits or gets SIGTERM, and helper
processes whose parent has ended.

A program's own handler of SIGTERM is left alone. Without one, the signal ends the program as usual,
but engines first write what they have to write.

A helper process ignores Ctrl-C, which its parent handles. A parent that is killed can tell nobody,
so on Linux the kernel is asked to kill its children then. Elsewhere, and if the parent ended before
that was set up, a thread notices that the other end of the connection is gone.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import multiprocessing.util  # noqa: F401 - waits for child processes at exit; ours goes first
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

_open: dict[int, weakref.finalize[Any, Any]] = {}
_numbers = itertools.count()


def end_with_program(
    owner: object, end: Callable[..., object], *args: Any
) -> weakref.finalize[Any, Any]:
    """Has `end(*args)` called once: when the returned function is called, the owner is collected,
    or the program exits. A forked child does not call it."""
    number = next(_numbers)
    finalizer = weakref.finalize(owner, _end, os.getpid(), number, end, args)
    _open[number] = finalizer
    return finalizer


def close_on_sigterm() -> None:
    """Ends all engines on SIGTERM too, unless the program handles the signal, or this is not its
    main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_by_signal)


def _end(pid: int, number: int, end: Callable[..., object], args: tuple[Any, ...]) -> None:
    _open.pop(number, None)
    if os.getpid() == pid:
        end(*args)


@atexit.register
def _end_all() -> None:
    for finalizer in reversed(list(_open.values())):
        finalizer()


def _end_by_signal(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one waits for nothing
    _end_all()
    signal.raise_signal(number)


_PR_SET_PDEATHSIG = 1


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Inside, started processes ignore Ctrl-C from their first moment, since a child inherits the
    signals that the starting thread blocks. Otherwise each would print a traceback while it
    imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_main() -> Iterator[None]:
    """Inside, started processes do not run the program's main module again, as multiprocessing
    would. So a script need not guard it; the process uses nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def end_with_parent(connection: int) -> None:
    """Makes this process end when no process holds the other end of a pipe or socket any more, or
    when the thread that started it ends. Returns at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait_for_end, args=(connection,), name="parent", daemon=True).start()


def _wait_for_end(connection: int) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLHUP)  # reported even if unread data precedes it
    while not any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll()):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
