"""Exchanges KV and states with other engines, and tells routers what is cached."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from milepost.cache import Cache
from milepost.config import EngineConfig
from milepost.disaggregation.all_ranks import fencing, filling
from milepost.disaggregation.params import Remote
from milepost.engine.loop.bell import Bell
from milepost.engine.loop.completion import Completion
from milepost.engine.loop.group import RequestGroup
from milepost.engine.loop.off_device import Fence, OffDevice
from milepost.engine.metrics import Metric
from milepost.errors import missing
from milepost.kv_transfer_config import KVTransferConfig
from milepost.runner.runner import Runner
from milepost.scheduler.outside import Outside
from milepost.scheduler.plans import Load
from milepost.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from milepost.disaggregation.access import Access
    from milepost.disaggregation.connector import Connector
    from milepost.disaggregation.orders import SendTransferCommand
    from milepost.disaggregation.part_reader import PartReader
    from milepost.kv_events import EventPublisher

logger = logging.getLogger(__name__)


class Exchange(OffDevice):
    """Fetches from other engines and lends to them. `enter` queues a completion that was
    held until another engine had said what it has of the prompt."""

    def __init__(
        self, cache: Cache, connector: Connector, bell: Bell, enter: Callable[..., None]
    ) -> None:
        self._cache, self._bell, self._enter = cache, bell, enter
        self.connector = connector
        self.waker = bell.socket
        self._looking: dict[int, tuple[RequestGroup, Completion]] = {}
        """Completions that are not queued yet: another engine is asked what it has of them."""

    @property
    def has_work(self) -> bool:
        """Whether another engine is asked for a completion that is not queued yet."""
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
        """Offers the first completion what the group's wish says that another engine has."""
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
        """Takes in what other engines have sent, and queues the completions that waited for it."""
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
            chain = self._cache.chain(group.prompt.packed, salt)
            group.kv_transfer_params = self.connector.lend(chain)

    def metrics(self) -> list[Metric]:
        """Returns counters of what was fetched and lent."""
        counters = self.connector.counters.items()
        return [Metric(name=f"milepost:{name}", value=value) for name, value in counters]

    def close(self, *, is_whole: bool) -> None:  # noqa: ARG002
        """Closes the addresses at which other engines find this one."""
        self.connector.close()
        self._bell.close()


def exchange_of(
    config: EngineConfig,
    scheduler: Scheduler,
    runner: Runner,
    access: Access | None,
    ask: SendTransferCommand | None,
    enter: Callable[..., None],
) -> Exchange | None:
    """Returns the exchange with other engines, if the configuration asks for one. `ask` has the
    other ranks do their part. Raises ConfigError."""
    bell = Bell()
    try:
        connector = connecting(config, scheduler, runner, bell, access, ask)
    except BaseException:
        bell.close()
        raise
    if connector is None:
        bell.close()
        return None
    return Exchange(scheduler.cache, connector, bell, enter)


def publishing(config: EngineConfig, outside: Outside) -> EventPublisher | None:
    """Returns the publisher that tells routers what is cached, if the configuration asks for one.
    Raises ConfigError."""
    wanted = config.kv_events_config
    if wanted is None or not wanted.is_on:
        return None
    try:
        from milepost.kv_events import EventPublisher
    except ModuleNotFoundError as error:
        raise missing("kv_events_config", error.name, "server") from error
    publisher = EventPublisher(wanted, config.page_size)
    outside.add_listener(publisher.publish)
    return publisher


def connecting(
    config: EngineConfig,
    scheduler: Scheduler,
    runner: Runner,
    bell: Bell,
    access: Access | None,
    ask: SendTransferCommand | None,
) -> Connector | None:
    """Returns the connection to other engines, if the configuration asks for one. Raises
    ConfigError."""
    wanted = config.kv_exchange
    if config.kv_transfer_config is not None:
        _warn(config.kv_transfer_config)
    if wanted is None or access is None:
        return None
    try:
        from milepost.disaggregation.connector import Connector
    except ModuleNotFoundError as error:
        raise missing("kv_transfer_config", error.name, "disaggregation") from error
    return Connector(
        wanted,
        scheduler,
        access if ask is None else access.of_all_ranks(ask),
        filled=runner.filled if ask is None else filling(runner.filled, ask),
        fence=runner.fence if ask is None else fencing(runner.fence, ask),
        clock=time.monotonic,
        ring=bell.ring,
    )


def _warn(config: KVTransferConfig) -> None:
    if not config.peers:
        logger.warning(
            "kv_transfer_config lists no peers, so nothing is exchanged: add their addresses or "
            'networks, as in "kv_connector_extra_config": {"peers": ["10.0.0.0/24"]}'
        )
    elif config.peers.are_any:
        logger.warning(
            "kv_transfer_config takes any peer: whoever sends requests with kv_transfer_params "
            "names engines that this one connects to and caches the KV of, and whoever reaches "
            "%s reads what is lent: let only routers and engines through, or list the peers",
            config.kv_ip,
        )


def reader_of(
    runner: Runner,
    access: Access | None,
    answer: Callable[[int, bool], None],
    fail: Callable[[Exception], object],
) -> PartReader | None:
    """Returns the reader of a rank other than the first; None if nothing is exchanged."""
    if access is None:
        return None
    from milepost.disaggregation.access import SOURCE
    from milepost.disaggregation.part_reader import PartReader

    reader = PartReader(runner, access.rank, access.transport, answer, fail)
    runner.carriers[SOURCE] = reader
    return reader
