"""The messages between the first rank and the others."""

from __future__ import annotations

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
