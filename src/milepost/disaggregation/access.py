"""Access of other engines to one rank's pools, and of this rank to theirs."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from milepost.disaggregation.all_ranks import AllRanks
from milepost.disaggregation.orders import RankEndpoint, SendTransferCommand
from milepost.disaggregation.registered_pools import memory_of
from milepost.disaggregation.transport import Transport, make
from milepost.kv_transfer_config import KVTransferConfig

if TYPE_CHECKING:
    from milepost.runner.pools import Pools

SOURCE = "remote"
"""Name of other engines wherever the source of a load is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One rank's transport and the endpoints of all ranks. The owner closes the transport."""

    engine_id: str
    rank: int
    transport: Transport
    endpoints: list[RankEndpoint]
    """Endpoints of all ranks, in order of rank."""

    def of_all_ranks(self, ask: SendTransferCommand) -> Access:
        """Returns access to the pools of all ranks; `ask` has the other ranks do the same as this
        one.
        """
        return replace(self, transport=AllRanks(self.transport, self.endpoints, ask))


def open_access(
    config: KVTransferConfig, pools: Pools, rank: int, gather: Callable[[bytes], list[bytes]]
) -> Access:
    """Opens access for one rank; `gather` returns the contributions of all ranks. Raises
    ConfigError.
    """
    memory, engine_id = memory_of(pools), config.engine_id or uuid.uuid4().hex
    transport = make(config, memory, f"{engine_id}/{rank}")
    own = RankEndpoint(transport.metadata(), memory.layout)
    endpoints = [
        msgspec.msgpack.decode(each, type=RankEndpoint)
        for each in gather(msgspec.msgpack.encode(own))
    ]
    return Access(engine_id=engine_id, rank=rank, transport=transport, endpoints=endpoints)
