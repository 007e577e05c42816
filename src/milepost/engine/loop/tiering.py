"""Opens what an engine keeps or exchanges outside its device (tiers, other engines, KV events), and
runs the tiers: loads and stores between steps, and how fast they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

from milepost.annexes import annex
from milepost.config import EngineConfig
from milepost.engine.assembly import AnnexCommand, EngineParts, RankTierState
from milepost.engine.loop.completion import Completion
from milepost.engine.loop.group import RequestGroup
from milepost.engine.metrics import Metric
from milepost.engine.off_device import OffDevice
from milepost.scheduler.plans import StepPlan
from milepost.scheduler.scheduler import Scheduler
from milepost.tiers.holdings import MIN_TOKENS

if TYPE_CHECKING:
    from milepost.runner.runner import Runner
    from milepost.tiers.commands import SendTierCommand
    from milepost.tiers.policy import Tiers
    from milepost.tiers.transfers import TierTransfers


logger = logging.getLogger(__name__)


class Tiering(OffDevice):
    """The host memory and the disk of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tiers: Tiers,
        transfers: TierTransfers,
        flush_s: float,
    ) -> None:
        self._scheduler, self._runner = scheduler, runner
        self.tiers = tiers
        self.transfers = transfers
        self._flush_s = flush_s

    @property
    def rest_s(self) -> float | None:
        """Seconds until the disk is tried again after an error; None for never."""
        return self.transfers.rest_s

    def poll(self) -> None:
        """Reports the copies that are done."""
        self.transfers.poll()

    def wait(self, seconds: float) -> bool:
        """Waits for a copy, for `seconds` at most. Returns False at once if none is under way."""
        if not self.transfers.is_busy:
            return False
        self.transfers.wait(seconds)
        return True

    def do_idle_work(self) -> bool:
        """Makes the copies that were left for an idle moment. Returns whether there
        will be more."""
        self.transfers.poll()
        outside = self._scheduler.outside
        if outside.has_stores:
            plan = self._scheduler.plan_copies()
            if plan.only_copies:
                self._runner.copy(plan)
        is_busy = self.transfers.is_busy or self.transfers.is_writing or self.tiers.is_behind
        return is_busy or outside.has_stores

    def flush(self) -> None:
        """Waits until all stores are done, and all loads of requests that have ended."""
        self._flush_until(inf)

    def _flush_until(self, end_s: float) -> None:
        while (self.transfers.is_busy or self._continue_storing()) and perf_counter() < end_s:
            self.transfers.wait(0.01)

    def _continue_storing(self) -> bool:
        self.do_idle_work()
        return self.transfers.is_busy or self._scheduler.outside.has_stores

    def end_loads(self) -> None:
        """Ends every load, since an interrupted plan may or may not have begun it."""
        self.transfers.end_loads()
        for number, (_, offer) in list(self._scheduler.outside.loading.items()):
            if offer.source == self.tiers.loads.name:
                self._scheduler.failed(number)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Measures how fast prompts are computed, from the time of a step. Pictures count as the
        tokens of text that take as many operations."""
        num_tokens = sum(s.num_tokens for s in plan.sequences if not s.is_decode)
        if num_tokens >= MIN_TOKENS:
            work = self._scheduler.tower_cost.of_step(plan)
            self.tiers.holdings.rates.computed(num_tokens + work, seconds)

    def metrics(self) -> list[Metric]:
        """Returns counters of what was copied, and how full each tier is."""
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

    def reset(self, *, with_files: bool) -> None:
        """Drops the contents of host memory, and with `with_files` this model's files."""
        self.transfers.end_loads()
        self.tiers.clear(with_files=with_files)
        self.transfers.poll()

    def close(self, *, is_whole: bool) -> None:
        """Stores and writes what is left, for as long as the configuration allows, unless a step
        has failed."""
        if is_whole:
            end_s = perf_counter() + self._flush_s
            self._flush_until(end_s)
            self.transfers.close(end_s)


def tiering_of(
    config: EngineConfig,
    scheduler: Scheduler,
    runner: Runner,
    state: RankTierState | None,
    ask: SendTierCommand | None,
) -> Tiering | None:
    """Returns the tiers of an engine whose rank has `state`; None without one. `ask` is as for
    `TierTransfers`."""
    if state is None:
        return None
    from milepost.tiers.disk import Disk
    from milepost.tiers.policy import Tiers
    from milepost.tiers.transfers import TierTransfers

    host, limits, outside = state.copies.host, state.limits, scheduler.outside
    tiers = Tiers(outside.cache, limits, cost=scheduler.tower_cost)
    disk = None if state.files is None else Disk(state.files, tiers, host, ask)
    outside.add_keeper(tiers)
    outside.add_source(tiers.loads)
    transfers = TierTransfers(scheduler, runner, tiers, state.copies, disk, ask)
    logger.info(
        "tiers: %d pages and %d states in host memory, %d items on disk",
        limits.num_host_pages, limits.num_host_states, len(tiers.disk),
    )  # fmt: skip
    return Tiering(scheduler, runner, tiers, transfers, config.flush_s)


def open_off_device(
    config: EngineConfig,
    parts: EngineParts,
    enter: Callable[[RequestGroup, Completion], None],
) -> tuple[OffDevice, ...]:
    """Returns the parts that the configuration asks for, in the order in which the loop runs them.
    `enter` begins a completion whose prompt has arrived from another engine. Raises ConfigError if
    an annex that is asked for is not installed.
    """
    scheduler, team = parts.scheduler, parts.team
    events = exchange = tell = None
    if config.kv_events_config is not None and config.kv_events_config.is_on:
        opened = annex("events", wanted_by="kv_events_config").open_publisher
        events = opened(config.kv_events_config, config.page_size, scheduler.outside)
    ask = None if team is None else team.ask
    tiers = tiering_of(config, scheduler, parts.runner, parts.tier_state, ask)
    if parts.access is not None:
        if ask is not None:
            tell = lambda body: ask(AnnexCommand(body))  # noqa: E731
        exchange = parts.access.off_device(scheduler, parts.runner, enter, tell)
    return tuple(part for part in (tiers, exchange, events) if part is not None)


def close_off_device(parts: Sequence[OffDevice], *, is_whole: bool) -> None:
    """Closes all parts, as `OffDevice.close` says. The caller's frame keeps none of them, since
    they have the runner."""
    for part in parts:
        part.close(is_whole=is_whole)
