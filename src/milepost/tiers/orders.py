"""What the first rank tells the others to do with their parts of what is kept. Can be sent as
bytes.

Each is answered, once done, with whether it succeeded. Names and places are the same on all ranks,
the bytes are each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import msgspec

from milepost.cache.plans import What
from milepost.tiers.names import Name

Run = tuple[What, int, int, int]
"""To the device: kind, first id there, first place in host memory, number."""


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer once the copies that a plan named are in host memory: one such order for each call of
    `Carrier.store`, in their order."""


class Bring(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Make a load's copies, or none if it fails: then forget it."""

    number: int
    """Of the request."""
    runs: tuple[Run, ...] = ()


class OnDisk(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Read a file, write it, or delete it."""

    do: Literal["read", "write", "remove"]
    name: Name
    tokens: bytes = b""
    place: int = 0
    """In host memory."""


Order = Stored | Bring | OnDisk

Ask = Callable[[Order], Future[bool]]
"""Has all other ranks do something; resolved once they all have, with whether it went well on all
of them. Raises EngineDeadError, as the future does, if one is lost."""
