"""What an engine exchanges with others: KV and states with engines, events with routers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from milepost.config import EngineConfig
from milepost.disaggregation.all_ranks import fencing, filling
from milepost.disaggregation.params import Remote, TransferWish, check_exchange, read
from milepost.engine.loop.bell import Bell
from milepost.engine.loop.requests import Completion, RequestGroup
from milepost.engine.metrics import Metric
from milepost.engine.prompts import Prompt
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


class Exchange:
    """What an engine's loop calls; `ask` has the other ranks do their part, if there are any.
    Raises ConfigError. `close` it at the end."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        access: Access | None,
        ask: SendTransferCommand | None,
    ) -> None:
        self._cache = scheduler.cache
        self.bell = Bell() if config.kv_exchange is not None else None
        self._publisher = publishing(config, scheduler.outside)
        self.connector = connecting(config, scheduler, runner, self.bell, access, ask)
        self._looking: dict[int, tuple[RequestGroup, Completion]] = {}
        """Not queued yet: another engine is asked what it has of them."""

    @property
    def is_looking(self) -> bool:
        return bool(self._looking)

    def look(self, job: RequestGroup, answer: Completion) -> bool:
        """Ask another engine for what an answer that is to be prefilled here goes on from; False
        if there is nobody to be asked."""
        if not job.prefills or self.connector is None:
            return False
        number = self.connector.look_elsewhere(answer.request.chain)
        if number is not None:
            self._looking[number] = (job, answer)
        return number is not None

    def want(self, answer: Completion, remote: Remote | None) -> None:
        """The request of an answer was queued, and may fetch something from there; not where its
        prompt is scored, and so is computed whole."""
        if remote is None or self.connector is None:
            return
        if answer.request.num_prompt_logprobs is not None:
            self.connector.refuse(remote)
        else:
            self.connector.want(answer.request, remote)

    def found(self) -> Iterator[tuple[RequestGroup, Completion, Remote | None]]:
        """Take in what has come from other engines: answers that can be queued by now, and where
        something of them is."""
        if self.connector is None or self.bell is None:
            return
        self.bell.clear()
        for found in self.connector.settle():
            if found.number in self._looking:
                yield *self._looking.pop(found.number), found.remote
            elif found.remote is not None:
                self.connector.refuse(found.remote)

    def drop(self, job: RequestGroup) -> list[Completion]:
        """Queue none of a job's answers any more; returns those."""
        numbers = [number for number, known in self._looking.items() if known[0] is job]
        return [self._looking.pop(number)[1] for number in numbers]

    def fetch(self, loads: tuple[Load, ...], fence: Callable[[], Callable[[], bool]]) -> None:
        """Have other engines' pages and states fetched, where a plan that was launched says so;
        `fence` is `Runner.fence`."""
        if self.connector is not None and loads:
            self.connector.fetch(loads, fence())

    def end_loads(self) -> None:
        if self.connector is not None:
            self.connector.end_loads()

    def lend(self, job: RequestGroup) -> None:
        """Keep what was prefilled for other engines, and say where it is."""
        if self.connector is not None and job.prefills:
            salt = job.answers[0].request.chain.salt
            chain = self._cache.chain(job.prompt.packed, salt)
            job.kv_transfer_params = self.connector.lend(chain)

    def metrics(self) -> list[Metric]:
        """Counters of what was exchanged."""
        counters = {} if self.connector is None else self.connector.counters
        return [Metric(name=f"milepost:{name}", value=n) for name, n in counters.items()]

    def close(self) -> None:
        for each in (self._publisher, self.connector, self.bell):
            if each is not None:
                each.close()


def publishing(config: EngineConfig, outside: Outside) -> EventPublisher | None:
    """What tells routers what is cached, if that is asked for. Raises ConfigError."""
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
    bell: Bell | None,
    access: Access | None,
    ask: SendTransferCommand | None,
) -> Connector | None:
    """What fetches from other engines and lends to them, if that is asked for. Raises
    ConfigError."""
    wanted = config.kv_exchange
    if config.kv_transfer_config is not None:
        _warn(config.kv_transfer_config)
    if wanted is None or bell is None or access is None:
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
    """Of a rank but the first."""
    if access is None:
        return None
    from milepost.disaggregation.access import SOURCE
    from milepost.disaggregation.part_reader import PartReader

    reader = PartReader(runner, access.rank, access.transport, answer, fail)
    runner.carriers[SOURCE] = reader
    return reader


def wish_of(prompt: Prompt, config: EngineConfig) -> TransferWish | None:
    """What a request has to do with other engines. Raises InvalidRequestError."""
    wish = read(prompt.kv_transfer_params)
    if wish is not None:
        check_exchange(wish, config.kv_transfer_config)
    return wish
