"""What the first rank tells the others to do for exchanges between engines. Can be sent as bytes.

Each is answered with whether it succeeded: `ReadPart` once nobody writes any more, `Synchronize`
once the rank has caught up, all others at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from milepost.disaggregation.messages import Layout


class RankEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """How one rank's memory is read, and its layout."""

    metadata: bytes
    """The transport's."""
    layout: Layout


class AddPeer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Know another engine by this number."""

    peer: int
    endpoints: list[RankEndpoint]
    """Of all its ranks; each rank reads from that of its own number."""


class RemovePeer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget it."""

    peer: int


class ReadPart(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Read the n-th of these pieces there into the n-th here."""

    transfer: int
    peer: int
    lease: str
    local: list[int]
    remote: list[int]


class Lend(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Let others read these under a lease."""

    lease: str
    pages: tuple[int, ...]
    slot: int | None


class EndLoan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody reads under it any more."""

    lease: str


class CancelRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stop this read."""

    transfer: int


class Filled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All ranks have what was fetched: a slot holds so many tokens."""

    slot: int
    position: int


class Synchronize(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer once everything launched before is done."""


class MakeProgress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Others read here from now on: make progress for them."""


class StopProgress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody reads here any more."""


Order = (
    AddPeer
    | RemovePeer
    | ReadPart
    | CancelRead
    | Lend
    | EndLoan
    | Filled
    | Synchronize
    | MakeProgress
    | StopProgress
)

Ask = Callable[[Order], Future[bool]]
"""As `tiers.orders.Ask`; may be called from any thread."""
