"""Hands what becomes true of the cache to all who want to know, and takes it from there once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from milepost.cache import Cache
from milepost.cache.events import Event
from milepost.config import EngineConfig
from milepost.errors import ConfigError

if TYPE_CHECKING:
    from milepost.kv_events import Publisher

Listener = Callable[[tuple[Event, ...]], None]


class Telling:
    """Listeners are told all events in their order, the first ones what is there already."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._listeners: list[Listener] = []

    def add(self, listener: Listener) -> None:
        """From now on; all are added before the first request comes."""
        self._cache.listen()
        self._listeners.append(listener)

    def tell(self) -> None:
        """Tell what has happened since the last time."""
        if self._listeners and (events := self._cache.take_events()):
            for listener in self._listeners:
                listener(events)


def publishing(config: EngineConfig, telling: Telling) -> Publisher | None:
    """What tells routers, if that is asked for. Raises ConfigError."""
    wanted = config.kv_events_config
    if wanted is None or not wanted.is_on:
        return None
    try:
        from milepost.kv_events import Publisher
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kv_events_config needs {error.name}: install it with `pip install 'milepost[server]'`"
        ) from error
    publisher = Publisher(wanted, config.page_size)
    telling.add(publisher.publish)
    return publisher
