"""The engine's tiers: their sizes, and the work for them between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from milepost.config import EngineConfig
from milepost.engine.metrics import Metric
from milepost.errors import ConfigError
from milepost.parallel import Ranks
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.scheduler import Scheduler
from milepost.tiers.rates import MIN_TOKENS

if TYPE_CHECKING:
    from milepost.runner.pool_shape import PoolShape
    from milepost.runner.runner import Runner
    from milepost.tiers.device_copies import DeviceHostCopies
    from milepost.tiers.files import Files
    from milepost.tiers.orders import SendTierCommand
    from milepost.tiers.policy import Tiers
    from milepost.tiers.rank_worker import RankTierWorker
    from milepost.tiers.transfers import TierTransfers

logger = logging.getLogger(__name__)

GIB = 2**30
MAKE_S = 5.0
"""So long the start waits for a directory to be made."""
MIN_PAGES_UNDER_WAY = 64
MIN_STATES_UNDER_WAY, MAX_STATES_UNDER_WAY = 2, 8
SHARE_UNDER_WAY = 1 / 16
"""Of the device's memory for pages and slots, each for pages and for states that are on their way
to host memory, if those bounds let it be.
"""


def staging_bytes(config: EngineConfig, shape: PoolShape, pool_bytes: int) -> int:
    """Of the device's memory, for copies on their way to the host."""
    if not config.has_tiers:
        return 0
    num_pages, num_states = under_way(config, pool_bytes, shape.page_bytes, shape.slot_bytes)
    return num_pages * shape.page_bytes + num_states * shape.slot_bytes


def under_way(
    config: EngineConfig, pool_bytes: int, page_bytes: int, state_bytes: int
) -> tuple[int, int]:
    """Pages and states that may be on their way from the device at a time: those that two steps
    compute, in so small a share of the memory that caching hardly misses it.
    """
    share = int(pool_bytes * SHARE_UNDER_WAY)
    most = 2 * config.max_num_batched_tokens // config.page_size
    num_pages = max(MIN_PAGES_UNDER_WAY, min(share // max(page_bytes, 1), most))
    num_states = min(share // max(state_bytes, 1), MAX_STATES_UNDER_WAY)
    return num_pages, max(MIN_STATES_UNDER_WAY, num_states)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTierState:
    """What a rank has for its part of the tiers."""

    mover: DeviceHostCopies
    files: Files | None
    num_pages: int
    num_states: int
    """In host memory."""
    num_staged: tuple[int, int]
    """Pages and states that may be on their way there at a time; 0 bounds nothing."""


class Tiering:
    """What an engine's loop calls."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, tiers: Tiers, copier: TierTransfers
    ) -> None:
        self._scheduler, self._runner = scheduler, runner
        self.tiers = tiers
        self.copier = copier

    @property
    def is_busy(self) -> bool:
        """Whether anything is being copied."""
        return self.copier.is_busy

    def poll(self) -> None:
        """Take in what is over."""
        self.copier.poll()

    def wait(self, seconds: float) -> None:
        """Until something is over, or for so long."""
        self.copier.wait(seconds)

    def do_idle_work(self) -> bool:
        """Copy what waits for nothing to run; whether there is more to do."""
        self.copier.poll()
        outside = self._scheduler.outside
        if outside.has_stores:
            plan = self._scheduler.plan_copies()
            if plan.only_copies:
                self._runner.copy(plan)
        is_busy = self.copier.is_busy or self.copier.is_writing or self.tiers.is_behind
        return is_busy or outside.has_stores

    def flush(self) -> None:
        """Wait until all that is to go down is there, and nothing comes up for who is over."""
        while self.copier.is_busy or self._goes_down():
            self.copier.wait(0.01)

    def _goes_down(self) -> bool:
        self.do_idle_work()
        return self.copier.is_busy or self._scheduler.outside.has_stores

    def end_loads(self) -> None:
        """End every load: nobody knows how far the plan that was interrupted has come."""
        self.copier.end_loads()
        for number, (_, offer) in list(self._scheduler.outside.loading.items()):
            if offer.source == self.tiers.name:
                self._scheduler.failed(number)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step's time tells how fast tokens are computed."""
        num_tokens = sum(s.num_tokens for s in plan.sequences if not s.is_decode)
        if num_tokens >= MIN_TOKENS:
            self.tiers.rates.computed(num_tokens, seconds)

    def metrics(self) -> list[Metric]:
        """Counters of what was copied, and how full each tier is."""
        stats = self.tiers.stats
        counters = {
            "tier_stored_items": stats.stored,
            "tier_written_items": stats.written,
            "tier_loads": stats.loads,
            "tier_failed_loads": stats.failed_loads,
            "tier_states_too_late": stats.too_late,
            "tier_disk_rests": stats.disk_rests,
        }
        found = [Metric(name=f"milepost:{name}", value=value) for name, value in counters.items()]
        for name, tier in (("host", self.tiers.host), ("disk", self.tiers.disk)):
            labels = {"tier": name}
            items = Metric(name="milepost:tier_items", value=len(tier), kind="gauge", labels=labels)
            found.append(items)
            for what, budget in tier.budgets.items():
                share = budget.num_used / max(budget.capacity, 1)
                labels = {"tier": name, "what": what}
                usage = Metric(
                    name="milepost:tier_usage_perc", value=share, kind="gauge", labels=labels
                )
                found.append(usage)
        return found

    def reset(self) -> None:
        """Forget what host memory holds."""
        self.copier.end_loads()
        self.tiers.clear()

    def close(self) -> None:
        """Bring down what is still to go."""
        self.flush()
        self.copier.close()


def hands_of(
    config: EngineConfig, runner: Runner, identity: bytes, ranks: Ranks
) -> RankTierState | None:
    """This rank's part of the host memory and of the disk that are asked for; None where none are,
    or where the system refuses the memory to any rank. Raises ConfigError if the directory cannot
    be made."""
    if not config.has_tiers:
        return None
    # Imported where it is used: most engines have none.
    from milepost.tiers.arena import allocate_host, device_memory
    from milepost.tiers.device_copies import CudaLink, DeviceHostCopies, DirectLink, HostLink
    from milepost.tiers.holdings import split

    files = _files(config.cache_dir, identity, ranks.rank)
    device, memory = runner.pools.device, device_memory(runner.pools)
    link: HostLink = CudaLink(device) if device.type == "cuda" else DirectLink()
    num_bytes = config.host_bytes // ranks.size
    num_pages, num_states = split(num_bytes, memory.pages.item_bytes, memory.states.item_bytes)
    host = None
    try:
        host = allocate_host(memory, num_pages, num_states, is_pinned=isinstance(link, CudaLink))
    except MemoryError as error:
        logger.error("tiers: off, %s", error)
    if not ranks.least(host is not None) or host is None:
        return None
    num_staged = (0, 0)
    if link.needs_staging:
        pool_bytes = sum(storage.nbytes() for storage in runner.pools.storages())
        own = under_way(config, pool_bytes, host.pages.item_bytes, host.states.item_bytes)
        num_staged = ranks.least(own[0]), ranks.least(own[1])
    return RankTierState(
        mover=DeviceHostCopies(memory, host, link, num_staged),
        files=files,
        num_pages=num_pages,
        num_states=num_states,
        num_staged=num_staged,
    )


def porter_of(
    runner: Runner, hands: RankTierState | None, answer: Callable[[int, bool], None]
) -> RankTierWorker | None:
    """Of a rank but the first."""
    if hands is None:
        return None
    from milepost.tiers.policy import Tiers
    from milepost.tiers.rank_worker import RankTierWorker

    device = runner.pools.device
    begin_thread = partial(torch.cuda.set_device, device) if device.type == "cuda" else int
    porter = RankTierWorker(runner, hands.mover, hands.files, answer, begin_thread)
    runner.carriers[Tiers.name] = porter
    return porter


def tiering_of(
    config: EngineConfig,
    scheduler: Scheduler,
    runner: Runner,
    hands: RankTierState | None,
    ask: SendTierCommand | None,
) -> Tiering | None:
    """None where none are asked for or could be made; `ask` as for a `TierTransfers`."""
    if hands is None:
        return None
    from milepost.tiers.disk import Disk
    from milepost.tiers.holdings import Limits, split
    from milepost.tiers.policy import Tiers
    from milepost.tiers.transfers import TierTransfers

    host, outside = hands.mover.host, scheduler.outside
    page_bytes, state_bytes = host.pages.item_bytes, host.states.item_bytes
    disk_pages, disk_states = 0, 0
    if hands.files is not None:
        size = int(config.cache_disk_gib * GIB) // config.tensor_parallel_size
        disk_pages, disk_states = split(size, page_bytes, state_bytes)
    limits = Limits(
        page_bytes=page_bytes,
        state_bytes=state_bytes,
        num_host_pages=hands.num_pages,
        num_host_states=hands.num_states,
        num_disk_pages=disk_pages,
        num_disk_states=disk_states,
        max_pages_under_way=hands.num_staged[0],
        max_states_under_way=hands.num_staged[1],
    )
    tiers = Tiers(outside.cache, limits)
    disk = None if hands.files is None else Disk(hands.files, tiers, host, ask)
    outside.add_keeper(tiers)
    outside.add_source(tiers)
    copier = TierTransfers(scheduler, runner, tiers, hands.mover, disk, ask)
    logger.info(
        "tiers: %d pages and %d states in host memory, %d items on disk",
        hands.num_pages, hands.num_states, len(tiers.disk),
    )  # fmt: skip
    return Tiering(scheduler, runner, tiers, copier)


def _files(directory: str | None, identity: bytes, rank: int) -> Files | None:
    """This rank's files of the model."""
    if directory is None:
        return None
    from milepost.tiers.files import Files
    from milepost.tiers.threads import Threads

    if rank:
        identity = blake2b(identity + rank.to_bytes(4, "little"), digest_size=16).digest()
    files = Files(Path(directory).expanduser(), identity)
    made = Threads(1, "tiers-make").submit(files.make)
    wait([made], timeout=MAKE_S)
    error = made.exception() if made.done() else None
    if error is not None:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cache_dir={directory!r}: {why}") from error
    if not made.done():
        logger.error("tiers: %s does not answer: the engine starts without", files.directory)
    return files
