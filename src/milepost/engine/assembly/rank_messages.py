"""The messages between the first rank and the others, and the tickets of open commands."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from milepost.config import EngineConfig
from milepost.logs import LogSetup
from milepost.runner.recording import Record
from milepost.tiers.commands import TierCommand

START_S = 1800.0
"""Largest difference in seconds between ranks in the time to read the weights."""
HERE = 0
"""The ticket of a rank's first answer: it is ready to meet the others."""
SILENCE_S = 60.0
"""Longest time in seconds that a step waits for a rank."""


class RankConfig(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The first frame: what a rank is to be."""

    config: EngineConfig
    rank: int
    port: int
    """Port at which ranks find each other."""
    logs: LogSetup | None = None
    """The first rank's log settings; None if the program that embeds the engine configures logging.
    """


class RankFailure(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Reports the error that ends a rank."""

    kind: str
    """Name of the error."""
    message: str


class AnnexCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A command of an annex, in its own encoding."""

    body: bytes


RankCommand = TierCommand | AnnexCommand


class TicketedCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A command to all other ranks about memory outside the devices."""

    ticket: int
    command: RankCommand


class Answered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reports whether a rank has carried out a command."""

    ticket: int
    is_well: bool


RankMessage = Record | TicketedCommand
"""The frames after the first."""


@dataclass(slots=True)
class _Open:
    missing: int
    future: Future[bool] = field(default_factory=Future)
    is_well: bool = True


class Tickets:
    """Commands that `num_ranks` ranks have not all answered yet. Tickets may be taken and answered
    from different threads."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, _Open] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def take(self) -> tuple[int, Future[bool]]:
        """Returns a new ticket. Its future tells whether all ranks succeeded, once all have
        answered."""
        with self._lock:
            ticket, self._next = self._next, self._next + 1
            one = _Open(self._num_ranks)
            if self._error is None:
                self._open[ticket] = one
            else:
                one.future.set_exception(self._error)
        return ticket, one.future

    def answer(self, ticket: int, is_well: bool) -> None:
        """Records one rank's answer."""
        with self._lock:
            one = self._open.get(ticket)
            if one is None:
                return
            one.missing -= 1
            one.is_well = one.is_well and is_well
            if one.missing:
                return
            del self._open[ticket]
        one.future.set_result(one.is_well)

    def fail(self, error: BaseException) -> None:
        """Fails all open and later tickets, since no rank answers any more."""
        with self._lock:
            self._error = error
            unanswered, self._open = list(self._open.values()), {}
        for one in unanswered:
            one.future.set_exception(error)
