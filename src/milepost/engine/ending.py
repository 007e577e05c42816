"""Ends engines that their program leaves open: when it exits, or on SIGTERM.

A program's own handler of SIGTERM is left alone. Without one the signal ends the program as it
always does, but engines write what they have to write first.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing.util  # noqa: F401 - waits for child processes at exit; ours goes first
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

_open: dict[int, weakref.finalize[Any, Any]] = {}
_numbers = itertools.count()


def end_with_program(
    owner: object, end: Callable[..., object], *args: Any
) -> weakref.finalize[Any, Any]:
    """Has `end(*args)` called once: by a call of what this returns, when the owner is collected, or
    when the program exits. A forked child does not call it."""
    number = next(_numbers)
    finalizer = weakref.finalize(owner, _end, os.getpid(), number, end, args)
    _open[number] = finalizer
    return finalizer


def heed_sigterm() -> None:
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
