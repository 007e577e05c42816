"""The C library's heap, which keeps what steps have freed, for the next ones.

Under load tensors of many sizes come and go between caches that stay, so much of the heap is free
in pieces that never reach its end. glibc gives whole pages of them back when it is asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Return free pages to the system; does nothing where the C library has no word for it.

    Takes some milliseconds, and the next steps as many to get the pages again.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
