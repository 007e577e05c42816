"""The messages between the first rank and the others."""

from __future__ import annotations

import msgspec

from milepost.config import EngineConfig
from milepost.logs import LogSetup
from milepost.runner.recording import Record
from milepost.tiers import orders as keeping

START_S = 1800.0
"""Reading the weights may take so much longer on one rank than on another."""
HERE = 0
"""The ticket that a rank answers first: it is ready to meet the others."""
SILENCE_S = 60.0
"""A step may not wait for a rank longer than this."""


class RankConfig(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The first frame: what a rank is to be."""

    config: EngineConfig
    rank: int
    port: int
    """Where ranks find each other."""
    logs: LogSetup | None = None
    """How the first rank logs; None if a program that embeds it decides that."""


class RankFailure(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A rank's last words."""

    kind: str
    """Name of the error."""
    message: str


class AnnexCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A command of an annex, in its own encoding."""

    body: bytes


RankCommand = keeping.TierCommand | AnnexCommand


class TicketedCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A command about memory outside the devices, for all other ranks."""

    ticket: int
    order: RankCommand


class Answered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank has done what it was asked, or could not."""

    ticket: int
    is_well: bool


RankMessage = Record | TicketedCommand
"""The frames after the first."""
