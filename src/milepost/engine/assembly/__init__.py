"""Builds an engine from its configuration: settings, sizes, ranks, tiers.
Its modules:

    the whole                   setup, auto, images, bitwise
    memory                      fitting, sizing, planning
    kernels                     warming
    one rank of several         rank, team, rank_messages
    tiers                       tiering
"""

from milepost.engine.assembly.planning import MemoryPlan, MemoryPlanner, changes
from milepost.engine.assembly.rank import RankParts, build_rank
from milepost.engine.assembly.rank_messages import (
    HERE,
    SILENCE_S,
    START_S,
    AnnexCommand,
    Answered,
    RankConfig,
    RankFailure,
    RankMessage,
    TicketedCommand,
)
from milepost.engine.assembly.setup import EngineParts, build
from milepost.engine.assembly.team import Team
from milepost.engine.assembly.tiering import RankTierState, tier_worker_of
from milepost.engine.assembly.warming import warm

__all__ = [
    "HERE",
    "SILENCE_S",
    "START_S",
    "AnnexCommand",
    "Answered",
    "EngineParts",
    "MemoryPlan",
    "MemoryPlanner",
    "RankConfig",
    "RankFailure",
    "RankMessage",
    "RankParts",
    "RankTierState",
    "Team",
    "TicketedCommand",
    "build",
    "build_rank",
    "changes",
    "tier_worker_of",
    "warm",
]
