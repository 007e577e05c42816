"""Opens what an engine keeps or exchanges outside its device: tiers, other engines, KV events."""

from __future__ import annotations

from collections.abc import Callable

from milepost.annexes import annex
from milepost.config import EngineConfig
from milepost.engine.assembly import AnnexCommand, EngineParts
from milepost.engine.loop.completion import Completion
from milepost.engine.loop.group import RequestGroup
from milepost.engine.loop.tiering import tiering_of
from milepost.engine.off_device import OffDevice


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
