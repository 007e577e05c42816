"""The engine's tiers: their sizes, and what is to be done for them between steps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.config import EngineConfig
from milepost.engine.metrics import Metric
from milepost.errors import ConfigError
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.scheduler import Scheduler
from milepost.tiers.rates import MIN_TOKENS

if TYPE_CHECKING:
    from milepost.runner.pools import PoolShape
    from milepost.runner.runner import Runner
    from milepost.tiers.arena import Memory
    from milepost.tiers.copier import Copier
    from milepost.tiers.disk import Disk
    from milepost.tiers.policy import Tiers

logger = logging.getLogger(__name__)

GIB = 2**30
STATES_SHARE = 1 / 3
"""Of host memory and of the disk, for states, in models that have them."""
PAGES_UNDER_WAY, STATES_UNDER_WAY = 64, 2
"""Between the device and host memory at a time; so much of the device's memory is for that."""


def staging_bytes(config: EngineConfig, shape: PoolShape) -> int:
    """Of the device's memory, for copies on their way to the host."""
    if not config.has_tiers:
        return 0
    return PAGES_UNDER_WAY * shape.page_bytes + STATES_UNDER_WAY * shape.slot_bytes


def split(num_bytes: int, page_bytes: int, state_bytes: int) -> tuple[int, int]:
    """Pages and states that fit."""
    if not state_bytes:
        return num_bytes // max(page_bytes, 1), 0
    num_states = int(num_bytes * STATES_SHARE) // state_bytes
    return (num_bytes - num_states * state_bytes) // max(page_bytes, 1), num_states


class Tiering:
    """What an engine's loop calls."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, tiers: Tiers, copier: Copier, host: Memory
    ) -> None:
        self._scheduler, self._runner = scheduler, runner
        self.tiers = tiers
        self.host = host
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

    def tend(self) -> bool:
        """Copy what waits for nothing to run; whether there is more to do."""
        self.copier.poll()
        outside = self._scheduler.outside
        if outside.has_stores:
            plan = self._scheduler.plan_copies()
            if plan.only_copies:
                self._runner.copy(plan)
        return self.copier.is_busy or self.copier.is_writing or outside.has_stores

    def flush(self) -> None:
        """Wait until all that is to go down is there, and nothing comes up for who is over."""
        while self.copier.is_busy or self._goes_down():
            self.copier.wait(0.01)

    def _goes_down(self) -> bool:
        self.tend()
        return self.copier.is_busy or self._scheduler.outside.has_stores

    def end_loads(self) -> None:
        """Have every load over: nobody knows how far a plan has come."""
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


def tiering_of(config: EngineConfig, scheduler: Scheduler, runner: Runner) -> Tiering | None:
    """None where none are asked for, or where the system refuses the memory."""
    if not config.has_tiers:
        return None
    # Imported where it is used: most engines have none.
    from milepost.tiers.arena import allocate_host, device_memory
    from milepost.tiers.copier import Copier, CudaLink, DirectLink, Link
    from milepost.tiers.policy import Limits, Tiers

    device, outside = runner.pools.device, scheduler.outside
    memory = device_memory(runner.pools)
    page_bytes, state_bytes = memory.pages.item_bytes, memory.states.item_bytes
    num_pages, num_states = split(int(config.host_bytes), page_bytes, state_bytes)
    link: Link = CudaLink(device) if device.type == "cuda" else DirectLink()
    try:
        host = allocate_host(memory, num_pages, num_states, is_pinned=isinstance(link, CudaLink))
    except MemoryError as error:
        logger.error("tiers: off, %s", error)
        return None
    disk_pages, disk_states = 0, 0
    if config.cache_dir is not None:
        size = int(config.cache_disk_gib * GIB)
        disk_pages, disk_states = split(size, page_bytes, state_bytes)
    limits = Limits(
        page_bytes=page_bytes,
        state_bytes=state_bytes,
        num_host_pages=num_pages,
        num_host_states=num_states,
        num_disk_pages=disk_pages,
        num_disk_states=disk_states,
        max_pages_under_way=PAGES_UNDER_WAY if link.needs_staging else 0,
        max_states_under_way=STATES_UNDER_WAY if link.needs_staging else 0,
    )
    tiers = Tiers(outside.cache, limits)
    disk = _disk(config.cache_dir, outside.cache.identity, tiers, host)
    outside.add_keeper(tiers)
    outside.add_source(tiers)
    copier = Copier(scheduler, runner, tiers, (memory, host), link, disk)
    logger.info(
        "tiers: %d pages and %d states in host memory, %d items on disk",
        num_pages, num_states, len(tiers.disk),
    )  # fmt: skip
    return Tiering(scheduler, runner, tiers, copier, host)


def _disk(directory: str | None, identity: bytes, tiers: Tiers, host: Memory) -> Disk | None:
    """The files of this model. Raises ConfigError if the directory cannot be made."""
    if directory is None:
        return None
    from milepost.tiers.disk import Disk
    from milepost.tiers.files import Files

    try:
        return Disk(Files(Path(directory).expanduser(), identity), tiers, host)
    except OSError as error:
        raise ConfigError(f"cache_dir={directory!r}: {error.strerror or error}") from error
