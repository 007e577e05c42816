"""Commands of the first rank to the others for exchanges between engines, sent as bytes.

Each command is answered with whether it succeeded: `ReadPart` once nothing writes any more,
`Synchronize` once the rank has caught up, all others at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from milepost.disaggregation.messages import Layout
from milepost.engine.off_device import AskRanks


class RankEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """One rank's memory: how to reach it, and its layout."""

    metadata: bytes
    """The transport's metadata."""
    layout: Layout


class AddPeer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Adds another engine under a number."""

    peer: int
    endpoints: list[RankEndpoint]
    """Endpoints of all its ranks; each rank reads from the one with its own number."""


class RemovePeer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Removes another engine."""

    peer: int


class ReadPart(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Reads the n-th remote piece into the n-th local one."""

    transfer: int
    peer: int
    lease: str
    local: list[int]
    remote: list[int]


class Lend(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Lets others read these pages, this slot and these window pages under a lease."""

    lease: str
    pages: tuple[int, ...]
    slot: int | None
    windows: tuple[int, ...]


class EndLoan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ends a loan after its last reader has finished."""

    lease: str


class CancelRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Cancels a read."""

    transfer: int


class Filled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reports that all ranks have fetched a state, and how many tokens the slot holds."""

    slot: int
    position: int


class Synchronize(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for an answer once everything launched before is done."""


class MakeProgress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tells whether other engines read here, so that progress must be made for them."""

    is_read: bool


TransferCommand = (
    AddPeer
    | RemovePeer
    | ReadPart
    | CancelRead
    | Lend
    | EndLoan
    | Filled
    | Synchronize
    | MakeProgress
)

SendTransferCommand = Callable[[TransferCommand], Future[bool]]
"""Sends a command to all other ranks, like `tiers.commands.SendTierCommand`; may be called from any
thread."""

decode = msgspec.msgpack.Decoder(TransferCommand).decode


def sender(ask: AskRanks) -> SendTransferCommand:
    """Returns a function that sends commands as bytes."""
    return lambda command: ask(msgspec.msgpack.encode(command))
