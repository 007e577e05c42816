"""Access of other engines to one rank's pools, and of this rank to theirs."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from milepost.disaggregation.all_ranks import AllRanks, fencing, filling
from milepost.disaggregation.connector import SOURCE, Connector
from milepost.disaggregation.exchange import Bell, Exchange
from milepost.disaggregation.orders import RankEndpoint, SendTransferCommand, sender
from milepost.disaggregation.part_reader import PartReader
from milepost.disaggregation.registered_pools import memory_of
from milepost.disaggregation.transport import Transport, make
from milepost.engine.loop import Completion, RequestGroup
from milepost.engine.off_device import AskRanks
from milepost.kv_transfer_config import KVTransferConfig
from milepost.runner.pools import Pools
from milepost.runner.runner import Runner
from milepost.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One rank's transport and the endpoints of all ranks. The owner closes the transport."""

    config: KVTransferConfig
    engine_id: str
    rank: int
    transport: Transport
    endpoints: list[RankEndpoint]
    """Endpoints of all ranks, in order of rank."""

    def off_device(
        self,
        scheduler: Scheduler,
        runner: Runner,
        enter: Callable[[RequestGroup, Completion], None],
        ask: AskRanks | None,
    ) -> Exchange:
        """Opens the exchange; see `PoolAccess`. Raises ConfigError."""
        if self.config.peers.are_any:
            logger.warning(
                "kv_transfer_config takes any peer: whoever sends requests with kv_transfer_params "
                "names engines that this one connects to and caches the KV of, and whoever reaches "
                "%s reads what is lent: let only routers and engines through, or list the peers",
                self.config.kv_ip,
            )
        bell = Bell()
        try:
            send = None if ask is None else sender(ask)
            connector = self._connector(scheduler, runner, bell, send)
        except BaseException:
            bell.close()
            raise
        return Exchange(scheduler.outside.cache, connector, bell, enter)

    def _connector(
        self, scheduler: Scheduler, runner: Runner, bell: Bell, send: SendTransferCommand | None
    ) -> Connector:
        access, fence = self, runner.fence
        filled: Callable[[int, int], None] = runner.filled
        if send is not None:
            access = replace(self, transport=AllRanks(self.transport, self.endpoints, send))
            filled, fence = filling(filled, send), fencing(fence, send)
        return Connector(
            scheduler,
            access,
            filled=filled,
            fence=fence,
            clock=time.monotonic,
            ring=bell.ring,
        )

    def worker(
        self,
        runner: Runner,
        answer: Callable[[int, bool], None],
        fail: Callable[[Exception], object],
    ) -> PartReader:
        """Returns the part of a rank other than the first; see `PoolAccess`."""
        reader = PartReader(runner, self.rank, self.transport, answer, fail)
        runner.transfers[SOURCE] = reader
        return reader


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
    return Access(
        config=config, engine_id=engine_id, rank=rank, transport=transport, endpoints=endpoints
    )
