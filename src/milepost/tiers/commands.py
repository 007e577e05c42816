"""Commands of the first rank to the others about their parts of the tiers. They can be sent as
bytes.

Each command is answered, once it is done, with whether it succeeded. Names and places are the same
on all ranks; the bytes are each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import msgspec

from milepost.cache.plans import What
from milepost.tiers.file_format import FileName

ItemRun = tuple[What, int, int, int, tuple[int, ...]]
"""A run of items to copy: kind, first place in the target, first place in the source, number; and
for a state the ids of its window pages on the device."""


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for an answer once the copies that a plan named are in host memory. There is one for
    each call of `PoolTransfers.store`, in the same order."""


class Bring(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Makes a load's copies, or drops the load if `runs` is empty because it failed."""

    number: int
    """The request's number."""
    runs: tuple[ItemRun, ...] = ()


class OnDisk(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Reads, writes or deletes a file."""

    do: Literal["read", "write", "remove"]
    name: FileName
    tokens: bytes = b""
    place: int = 0
    """Place in host memory."""


TierCommand = Stored | Bring | OnDisk

SendTierCommand = Callable[[TierCommand], Future[bool]]
"""Sends a command to all other ranks. The future resolves once all have done it, with whether all
succeeded. Raises EngineDeadError, as does the future, if a rank is lost."""
