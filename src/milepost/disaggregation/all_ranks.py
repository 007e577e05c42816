"""Several ranks as one transport: rank r of an engine reads from rank r of the other.

The first rank uses it: it reads its own part and has the others read theirs. A transfer ends once
no rank writes any more, and succeeds if it does on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from milepost.disaggregation.commands import (
    AddPeer,
    CancelRead,
    EndLoan,
    Filled,
    Lend,
    MakeProgress,
    RankEndpoint,
    ReadPart,
    RemovePeer,
    SendTransferCommand,
    Synchronize,
)
from milepost.disaggregation.messages import BadMessageError, Layout, decoded
from milepost.disaggregation.transport import TransferError, Transport
from milepost.errors import EngineDeadError, MilepostError

_ENDPOINTS = msgspec.msgpack.Decoder(list[RankEndpoint])


@dataclass(slots=True, eq=False)
class _PeerRanks:
    number: int
    own: Any


@dataclass(slots=True, eq=False)
class _Parts:
    number: int
    own: Any
    others: Future[bool]
    is_own_over: bool = False
    is_given_up: bool = False
    problem: str = ""
    """Problem of this rank's part."""


class AllRanks(Transport):
    """A `Transport` over all ranks: `own` moves this rank's part, and `ask` has the other ranks
    move theirs. `endpoints` are those of all ranks, in order.
    """

    def __init__(
        self, own: Transport, endpoints: list[RankEndpoint], ask: SendTransferCommand
    ) -> None:
        self._own, self._endpoints, self._ask = own, endpoints, ask
        assert all(_counts(endpoint) == _counts(endpoints[0]) for endpoint in endpoints), (
            "all ranks have the same pages and slots"
        )
        self.name = own.name
        self._numbers = count()
        self._is_read = False

    def enter(self) -> None:
        self._own.enter()

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(self._endpoints)

    def add_peer(self, metadata: bytes, layout: Layout) -> _PeerRanks:
        try:
            endpoints = decoded(_ENDPOINTS, metadata)
        except BadMessageError as error:
            raise TransferError(f"no addresses of ranks: {error}") from error
        self._check(endpoints)
        peer_here = self._own.add_peer(endpoints[0].metadata, layout)
        peer = _PeerRanks(next(self._numbers), peer_here)
        self._ask(AddPeer(peer.number, endpoints))
        return peer

    def _check(self, endpoints: list[RankEndpoint]) -> None:
        """Raises TransferError unless each rank's parts match those of this engine."""
        if len(endpoints) != len(self._endpoints):
            raise TransferError(
                f"{len(endpoints)} ranks, and here there are {len(self._endpoints)}"
            )
        for rank, (there, here) in enumerate(zip(endpoints, self._endpoints, strict=True)):
            if there.layout.piece_bytes != here.layout.piece_bytes:
                raise TransferError(f"rank {rank} has parts of another size")
            if _counts(there) != _counts(endpoints[0]):
                raise TransferError(f"rank {rank} has not the pages and slots of the first")

    def remove_peer(self, peer: _PeerRanks) -> None:
        with suppress(MilepostError):  # a rank is lost, and nobody reads any more
            self._ask(RemovePeer(peer.number))
        self._own.remove_peer(peer.own)

    def begin(self, peer: _PeerRanks, lease: str, local: list[int], remote: list[int]) -> _Parts:
        read_here = self._own.begin(peer.own, lease, local, remote)
        number = next(self._numbers)
        part = ReadPart(transfer=number, peer=peer.number, lease=lease, local=local, remote=remote)
        return _Parts(number, read_here, self._ask(part))

    def is_done(self, transfer: _Parts) -> bool:
        """Returns whether all ranks are done. Raises EngineDeadError if a rank is lost."""
        if not transfer.is_own_over:
            self._look(transfer)
        if not (transfer.others.done() and transfer.is_own_over):
            return False
        is_well = transfer.others.result()
        if transfer.is_given_up:
            return True
        if transfer.problem or not is_well:
            raise TransferError(transfer.problem or "another rank could not read its part")
        return True

    def _look(self, transfer: _Parts) -> None:
        """Polls this rank's part. If it fails, the other ranks' reads are cancelled, since they are
        useless.
        """
        try:
            transfer.is_own_over = self._own.is_done(transfer.own)
        except TransferError as error:
            transfer.is_own_over, transfer.problem = True, str(error)
            self._ask(CancelRead(transfer.number))

    def make_progress(self) -> None:
        if not self._is_read:
            self._is_read = True
            self._ask(MakeProgress(True))
        self._own.make_progress()

    def stop_progress(self) -> None:
        self._is_read = False
        self._ask(MakeProgress(False))
        self._own.stop_progress()

    def cancel(self, transfer: _Parts) -> bool:
        transfer.is_given_up = True
        if not transfer.others.done():
            self._ask(CancelRead(transfer.number))
        if not transfer.is_own_over:
            transfer.is_own_over = self._own.cancel(transfer.own)
        return transfer.is_own_over and transfer.others.done()

    def lend(
        self, lease: str, pages: tuple[int, ...], slot: int | None, windows: tuple[int, ...] = ()
    ) -> None:
        """Lends on all ranks. A fence requested afterwards passes once all ranks know."""
        self._own.lend(lease, pages, slot, windows)
        self._ask(Lend(lease=lease, pages=pages, slot=slot, windows=windows))

    def end_loan(self, lease: str) -> None:
        self._own.end_loan(lease)
        with suppress(MilepostError):  # a rank is lost, and nobody reads any more
            self._ask(EndLoan(lease))

    def close(self) -> None:
        self._own.close()


def filling(
    filled: Callable[[int, int], None], ask: SendTransferCommand
) -> Callable[[int, int], None]:
    """Returns a function that records on all ranks the number of tokens in a slot."""

    def fill(slot: int, position: int) -> None:
        filled(slot, position)
        ask(Filled(slot, position))

    return fill


def fencing(
    fence: Callable[[], Callable[[], bool]], ask: SendTransferCommand
) -> Callable[[], Callable[[], bool]]:
    """Returns `fence` for all ranks: its fences pass once everything queued before on any rank is
    done.
    """

    def fence_all() -> Callable[[], bool]:
        is_fenced, others = fence(), ask(Synchronize())

        def is_done() -> bool:
            if not others.done() or not is_fenced():
                return False
            if not others.result():
                raise EngineDeadError("a rank could not do what was launched")
            return True

        return is_done

    return fence_all


def _counts(endpoint: RankEndpoint) -> list[list[int]]:
    """Returns the counts of pages and slots in each row, which determine the pieces' numbers."""
    return [[row.count for row in rows] for rows in endpoint.layout.kinds]
