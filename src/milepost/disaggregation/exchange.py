"""The exchange with other engines as the step loop sees it, and the access of ranks to the pools
of others, on which it rests."""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from milepost.cache import Cache
from milepost.disaggregation.all_ranks import AllRanks, fencing, filling
from milepost.disaggregation.commands import RankEndpoint, SendTransferCommand, sender
from milepost.disaggregation.connector import SOURCE, Connector
from milepost.disaggregation.part_reader import PartReader
from milepost.disaggregation.registered_pools import memory_of
from milepost.disaggregation.transport import Transport, make
from milepost.engine.loop import Completion, RequestGroup
from milepost.engine.metrics import Metric
from milepost.engine.off_device import AskRanks, Fence, OffDevice
from milepost.kv_config import KVTransferConfig
from milepost.kv_transfer_params import Remote
from milepost.runner.pools import Pools
from milepost.runner.runner import Runner
from milepost.scheduler.plans import Load
from milepost.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Exchange(OffDevice):
    """Fetches from other engines and lends to them. `enter` queues a completion that was
    held until another engine had said what it has of the prompt.
    """

    def __init__(
        self,
        cache: Cache,
        connector: Connector,
        bell: Bell,
        enter: Callable[[RequestGroup, Completion], None],
    ) -> None:
        self._cache, self._bell, self._enter = cache, bell, enter
        self.connector = connector
        self.waker = bell.socket
        self._looking: dict[int, tuple[RequestGroup, Completion]] = {}
        """Completions that are not queued yet: another engine is asked what it has of them."""

    @property
    def has_work(self) -> bool:
        """Whether completions wait for the answer of another engine before they are queued."""
        return bool(self._looking)

    def hold(self, group: RequestGroup, completion: Completion) -> bool:
        """Asks another engine for the part of a prompt that a prefill can resume from. Returns
        False if there is none to ask."""
        if not group.prefills:
            return False
        number = self.connector.look_elsewhere(completion.request.chain)
        if number is not None:
            self._looking[number] = (group, completion)
        return number is not None

    def note_queued(self, group: RequestGroup, completion: Completion) -> None:
        """Offers the first completion the part of the prompt that, by the group's wish, another
        engine has."""
        if group.wish is not None and completion.index == 0:
            self._want(completion, group.wish.remote)

    def _want(self, completion: Completion, remote: Remote | None) -> None:
        if remote is None:
            return
        if completion.request.num_prompt_logprobs is not None:  # it is computed whole
            self.connector.refuse(remote)
        else:
            self.connector.want(completion.request, remote)

    def poll(self) -> None:
        """Handles messages from other engines, and queues the completions that waited for them."""
        self._bell.clear()
        for found in self.connector.settle():
            if found.number in self._looking:
                group, completion = self._looking.pop(found.number)
                self._enter(group, completion)
                self._want(completion, found.remote)
            elif found.remote is not None:
                self.connector.refuse(found.remote)

    def drop(self, group: RequestGroup) -> list[Completion]:
        """Returns the completions of a group that wait for another engine, and forgets them."""
        numbers = [number for number, known in self._looking.items() if known[0] is group]
        return [self._looking.pop(number)[1] for number in numbers]

    def begin_loads(self, loads: tuple[Load, ...], fence: Fence) -> None:
        """Begins to fetch the pages and states that a launched plan loads from other engines."""
        if loads:
            self.connector.fetch(loads, fence())

    def end_loads(self) -> None:
        """Ends every fetch."""
        self.connector.end_loads()

    def note_finished(self, group: RequestGroup) -> None:
        """Keeps a prompt that was prefilled for another engine, and notes how to fetch it."""
        if group.prefills:
            salt = group.completions[0].request.chain.salt
            chain = self._cache.chain(group.prompt.packed, salt, group.prompt.pictures)
            group.kv_transfer_params = self.connector.lend(chain)

    def metrics(self) -> list[Metric]:
        """Returns counters of fetches and loans."""
        counters = self.connector.counters.items()
        return [Metric(name=f"milepost:{name}", value=value) for name, value in counters]

    def close(self, *, is_whole: bool) -> None:  # noqa: ARG002
        """Closes the addresses at which other engines find this one."""
        self.connector.close()
        self._bell.close()


class Bell:
    """May be rung from any thread; `socket` can be read once it has been."""

    def __init__(self) -> None:
        self.socket, self._far = socket.socketpair()
        self.socket.setblocking(False)
        self._far.setblocking(False)

    def ring(self) -> None:
        with suppress(BlockingIOError):  # it already rings
            self._far.send(b".")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while self.socket.recv(4096):
                pass

    def close(self) -> None:
        self.socket.close()
        self._far.close()


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
        if self.config.exchange.peers.are_any:
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
    here = RankEndpoint(transport.metadata(), memory.layout)
    endpoints = [
        msgspec.msgpack.decode(each, type=RankEndpoint)
        for each in gather(msgspec.msgpack.encode(here))
    ]
    return Access(
        config=config, engine_id=engine_id, rank=rank, transport=transport, endpoints=endpoints
    )
