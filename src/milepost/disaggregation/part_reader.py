"""Exchanges between engines on a rank other than the first: it reads its part of what is fetched,
and lets others read its part of what is lent.

The first rank decides what is read, from whom and until when. Its commands arrive in the order of
launches; a thread carries them out, since no launch waits for them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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
    Synchronize,
    TransferCommand,
    decode,
)
from milepost.disaggregation.transport import TransferError, Transport, look_s
from milepost.runner.runner import Runner
from milepost.scheduler.plans import Load, Store

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _PartReading:
    ticket: int
    part: ReadPart
    is_ready: Callable[[], bool]
    """Whether all earlier launches that could conflict are done."""
    begun_at: float
    transfer: Any = None
    is_given_up: bool = False


class PartReader:
    """A `PoolTransfers` of `runner`, on rank `rank`. Its thread calls `answer` with a command's
    ticket and whether it succeeded, and `fail` with an exception that ends the thread. `close` it
    at the end.
    """

    def __init__(
        self,
        runner: Runner,
        rank: int,
        transport: Transport,
        answer: Callable[[int, bool], None],
        fail: Callable[[Exception], object],
    ) -> None:
        self._runner, self._rank, self._transport = runner, rank, transport
        self._answer, self._fail = answer, fail
        self._last_load: Callable[[], bool] = lambda: True
        self._peers: dict[int, Any] = {}
        self._readings: dict[int, _PartReading] = {}
        self._fences: list[tuple[int, Callable[[], bool], float]] = []
        """(ticket, whether earlier launches are done, since when) of fences to answer."""
        self._read_since: float | None = None
        """Time since when others have been reading here."""
        self._is_open = True
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv reader", daemon=True)
        self._thread.start()

    # --- of the rank's thread ---------------------------------------------------------------------

    def store(self, stores: Sequence[Store]) -> None:
        raise AssertionError(f"other engines take what they want: {stores}")

    def load(self, load: Load) -> None:  # noqa: ARG002
        """Takes a fence: launches from now on do not conflict with the load."""
        self._last_load = self._runner.fence()

    def do(self, ticket: int, command: bytes) -> None:
        """Begins to carry out a command of the first rank."""
        self._begin(ticket, decode(command))

    def _begin(self, ticket: int, command: TransferCommand) -> None:
        match command:
            case Filled(slot=slot, position=position):
                self._runner.filled(slot, position)
                self._answer(ticket, True)
            case Lend(lease=lease, pages=pages, slot=slot, windows=windows):
                self._transport.lend(lease, pages, slot, windows)
                self._answer(ticket, True)
            case EndLoan(lease=lease):
                self._transport.end_loan(lease)
                self._answer(ticket, True)
            case Synchronize():
                fence = (ticket, self._runner.fence(), time.monotonic())
                self._commands.put(lambda: self._fences.append(fence))
            case ReadPart():
                reading = _PartReading(
                    ticket=ticket, part=command, is_ready=self._last_load, begun_at=time.monotonic()
                )
                self._commands.put(lambda: self._readings.update({command.transfer: reading}))
            case _:
                self._commands.put(lambda: self._carry_out(ticket, command))

    def close(self) -> None:
        """Ends the thread; reads are given up."""
        self._commands.put(self._stop)
        self._thread.join()
        self._transport.close()

    # --- of its own thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._transport.enter()
            while self._is_open:
                self._poll()
                if self._read_since is not None:
                    self._transport.make_progress()
                self._look()
        except Exception as error:  # noqa: BLE001 - ends the rank
            self._fail(error)

    def _poll(self) -> None:
        """Carries out commands, or waits for some."""
        begun = [reading.begun_at for reading in self._readings.values()]
        begun += [since for *_, since in self._fences]
        if self._read_since is not None:
            begun.append(self._read_since)
        wait_s = look_s(time.monotonic(), begun)
        if wait_s is None:
            self._commands.get()()
        else:
            time.sleep(wait_s)
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _carry_out(self, ticket: int, command: TransferCommand) -> None:
        match command:
            case AddPeer():
                self._add_peer(command.peer, command.endpoints[self._rank])
            case RemovePeer():
                peer = self._peers.pop(command.peer, None)
                if peer is not None:
                    self._transport.remove_peer(peer)
            case CancelRead():
                self._give_up(command.transfer)
            case MakeProgress(is_read=True):
                self._read_since = time.monotonic()
            case MakeProgress():
                self._read_since = None
                self._transport.stop_progress()
        self._answer(ticket, True)

    def _add_peer(self, number: int, endpoint: RankEndpoint) -> None:
        """Adds a peer. If that fails, so do reads from it."""
        try:
            self._peers[number] = self._transport.add_peer(endpoint.metadata, endpoint.layout)
        except TransferError as error:
            logger.warning("rank %d cannot read from another engine: %s", self._rank, error)

    def _look(self) -> None:
        """Answers reads and fences that are over."""
        for reading in list(self._readings.values()):
            is_well = self._ended(reading)
            if is_well is not None:
                self._end(reading, is_well)
        for fence in self._fences.copy():
            ticket, is_ready, _ = fence
            if is_ready():
                self._fences.remove(fence)
                self._answer(ticket, True)

    def _ended(self, reading: _PartReading) -> bool | None:
        """Returns whether a read has succeeded; None while something may still write."""
        part = reading.part
        if reading.transfer is None and reading.is_given_up:
            return False
        try:
            if reading.transfer is None:
                if not reading.is_ready():
                    return None
                if part.peer not in self._peers:
                    return False
                peer = self._peers[part.peer]
                reading.transfer = self._transport.begin(peer, part.lease, part.local, part.remote)
            return True if self._transport.is_done(reading.transfer) else None
        except (TransferError, IndexError) as error:
            logger.warning("rank %d cannot read its part: %s", self._rank, error)
            return False

    def _give_up(self, number: int) -> None:
        """Ends a read now, or as soon as nothing writes any more. The read may be over already."""
        reading = self._readings.get(number)
        if reading is None:
            return
        reading.is_given_up = True
        if reading.transfer is not None and self._transport.cancel(reading.transfer):
            self._end(reading, False)

    def _end(self, reading: _PartReading, is_well: bool) -> None:
        del self._readings[reading.part.transfer]
        self._answer(reading.ticket, is_well)

    def _stop(self) -> None:
        self._is_open = False
        for reading in self._readings.values():
            if reading.transfer is not None:
                self._transport.cancel(reading.transfer)
