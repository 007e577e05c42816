"""Limits the memory of a server's processes besides weights and pools, and keeps Python's garbage
collector from scanning objects that are never freed.

Two things grow with use. oneDNN keeps a GEMM plan, a third of a megabyte or more, for each number
of rows that it has seen, up to a limit. And glibc keeps memory that steps have freed: under load,
tensors of many sizes are allocated and freed between those plans, so much of the heap is free but
fragmented. glibc returns whole free pages to the system when asked.

Imports leave some hundred thousand objects that stay to the end. Python's collector scans all of
them, for a tenth of a second, each time that requests have made enough new ones; meanwhile every
stream waits.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_NUM_PLANS = b"256"
"""Number of plans of each of the two kinds that torch and oneDNN keep; by default 1024. Enough for
batches whose size varies by a few dozen; a plan that is missing is made in a millisecond."""
_BOUNDS = (b"LRU_CACHE_CAPACITY", b"ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def bound_plans() -> None:
    """Lowers oneDNN's limits, unless the operator has set them; call it before the first GEMM.

    They can only be set in the process's environment, which nothing here reads.
    """
    setenv = _from_c("setenv")
    if setenv is not None:
        for name in _BOUNDS:
            setenv(name, _NUM_PLANS, 0)


@contextmanager
def without_collection() -> Iterator[None]:
    """Pauses garbage collection while modules are imported. What they make stays, so a collector
    that scans it again and again finds nothing, for a tenth of the time of an engine's imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def settle() -> None:
    """Excludes all present objects from garbage collection; call it before the first request."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Returns free pages to the system, if the C library can do so.

    Takes some milliseconds, and the next steps take as many to get the pages again.
    """
    trim = _from_c("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def _from_c(name: str) -> Callable[..., int] | None:
    """Returns the function `name` of the C library; None if it has none."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found
