"""How a server tells routers what it has cached, as a user says it: vLLM's `--kv-events-config`.

Nothing here reads files, the environment or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from milepost.errors import ConfigError
from milepost.json_settings import check_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Raises ConfigError."""

    enable_kv_cache_events: bool = False
    """Send events at all."""
    publisher: Literal["null", "zmq"] | None = None
    """`zmq` where events are enabled, and nothing is said."""
    endpoint: str = "tcp://*:5557"
    """A socket that publishes: bound where it has a `*` or `::` or is no TCP address, else
    connected."""
    replay_endpoint: str | None = None
    """A socket that sends again what a subscriber has missed; always bound."""
    buffer_steps: int = 10_000
    """Messages that can be sent again."""
    hwm: int = 100_000
    """Messages that wait for a slow subscriber before it misses some."""
    max_queue_size: int = 100_000
    """Messages that wait for the publishing thread before the engine does."""
    topic: str = ""
    """What each message begins with, for subscribers of several engines to choose by."""
    format: Literal["map", "array"] = "map"
    """An event on the wire: `map`, or `array` for routers of before June 2026."""
    hashes: Literal["int", "bytes"] = "int"
    """A page's on the wire: the last 64 bits of its digest, as vLLM's are unless it is told
    otherwise, or all of it, which Dynamo's routers do not read."""

    def __post_init__(self) -> None:
        if self.publisher is None:
            chosen = "zmq" if self.enable_kv_cache_events else "null"
            object.__setattr__(self, "publisher", chosen)
        check_choice("publisher", self.publisher, ("null", "zmq"))
        check_choice("format", self.format, ("map", "array"))
        check_choice("hashes", self.hashes, ("int", "bytes"))
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ConfigError(f"enable_kv_cache_events={self.enable_kv_cache_events!r}: use true")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31 - 1:
                raise ConfigError(f"{name}={value!r}: use 0 or more, and less than 2**31 - 1")
        for name in ("endpoint", "topic", "replay_endpoint"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name != "replay_endpoint"):
                raise ConfigError(f"{name}={value!r}: use text")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"
