"""What an engine exchanges with others: KV and states, and what it tells routers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from milepost.config import EngineConfig
from milepost.disaggregation.params import TransferWish, read
from milepost.engine.bell import Bell
from milepost.engine.prompts import Prompt
from milepost.errors import ConfigError, InvalidRequestError
from milepost.runner.runner import Runner
from milepost.scheduler.outside import Outside
from milepost.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from milepost.disaggregation.connector import Connector
    from milepost.kv_events import EventPublisher

INSTALL = "install it with `pip install 'milepost[{}]'`"


def publishing(config: EngineConfig, outside: Outside) -> EventPublisher | None:
    """What tells routers what is cached, if that is asked for. Raises ConfigError."""
    wanted = config.kv_events_config
    if wanted is None or not wanted.is_on:
        return None
    try:
        from milepost.kv_events import EventPublisher
    except ModuleNotFoundError as error:
        how = INSTALL.format("server")
        raise ConfigError(f"kv_events_config needs {error.name}: {how}") from error
    publisher = EventPublisher(wanted, config.page_size)
    outside.add_listener(publisher.publish)
    return publisher


def connecting(
    config: EngineConfig, scheduler: Scheduler, runner: Runner, bell: Bell | None
) -> Connector | None:
    """What fetches from other engines and lends to them, if that is asked for. Raises
    ConfigError."""
    wanted = config.kv_transfer_config
    if wanted is None or bell is None:
        return None
    try:
        from milepost.disaggregation.connector import Connector
        from milepost.disaggregation.memory import memory_of
    except ModuleNotFoundError as error:
        how = INSTALL.format("disaggregation")
        raise ConfigError(f"kv_transfer_config needs {error.name}: {how}") from error
    return Connector(
        wanted,
        scheduler,
        memory_of(runner.pools),
        filled=runner.filled,
        clock=time.monotonic,
        ring=bell.ring,
    )


def wish_of(prompt: Prompt, config: EngineConfig) -> TransferWish | None:
    """What a request has to do with other engines. Raises InvalidRequestError."""
    wish = read(prompt.kv_transfer_params)
    if wish is not None and config.kv_transfer_config is None:
        raise InvalidRequestError(
            "kv_transfer_params: this engine exchanges nothing with others (kv_transfer_config)"
        )
    return wish
