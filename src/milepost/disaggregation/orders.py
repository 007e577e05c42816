"""What the first rank tells the others to do for exchanges between engines. Can be sent as bytes.

Each is answered with whether it succeeded: `ReadPart` once nobody writes any more, `CatchUp` once
the rank has caught up, all others at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from milepost.disaggregation.messages import Layout


class Door(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank's memory is read, and how it lies there."""

    metadata: bytes
    """Of the transport."""
    layout: Layout


class Meet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Another engine is to be known by this number."""

    peer: int
    doors: list[Door]
    """Of all its ranks; each rank reads from that of its own number."""


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """It is not, any more."""

    peer: int


class ReadPart(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Read the n-th of these pieces there into the n-th here."""

    transfer: int
    peer: int
    local: list[int]
    remote: list[int]


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read no more of this."""

    transfer: int


class Filled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All ranks have what was fetched: a slot holds so many tokens."""

    slot: int
    position: int


class CatchUp(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer once all is done that was launched before."""


class GoOn(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Others read here from now on."""


class Rest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody reads here any more."""


Order = Meet | Leave | ReadPart | GiveUp | Filled | CatchUp | GoOn | Rest

Ask = Callable[[Order], Future[bool]]
"""As `tiers.orders.Ask`; may be called from any thread."""
