"""How one rank's pools are reached by other engines, and theirs from here."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from milepost.disaggregation.all_ranks import AllRanks
from milepost.disaggregation.memory import memory_of
from milepost.disaggregation.orders import Ask, RankEndpoint
from milepost.disaggregation.transport import Transport, make
from milepost.kv_transfer_config import KVTransferConfig

if TYPE_CHECKING:
    from milepost.runner.pools import Pools

SOURCE = "remote"
"""What other engines are called where it is said where something came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One rank's transport, and where those of all ranks are reached. Whoever has it closes the
    transport."""

    engine_id: str
    rank: int
    transport: Transport
    endpoints: list[RankEndpoint]
    """Of all ranks, in their order."""

    def of_all_ranks(self, ask: Ask) -> Access:
        """To the pools of all ranks: `ask` has the others do as this one does."""
        return replace(self, transport=AllRanks(self.transport, self.endpoints, ask))


def open_access(
    config: KVTransferConfig, pools: Pools, rank: int, gather: Callable[[bytes], list[bytes]]
) -> Access:
    """Of one rank; `gather` returns what all ranks hand in. Raises ConfigError."""
    memory, engine_id = memory_of(pools), config.engine_id or uuid.uuid4().hex
    transport = make(config, memory, f"{engine_id}/{rank}")
    own = RankEndpoint(transport.metadata(), memory.layout)
    endpoints = [
        msgspec.msgpack.decode(each, type=RankEndpoint)
        for each in gather(msgspec.msgpack.encode(own))
    ]
    return Access(engine_id=engine_id, rank=rank, transport=transport, endpoints=endpoints)
