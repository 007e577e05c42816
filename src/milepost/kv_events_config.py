"""Settings for telling routers what a server has cached, in the form of vLLM's
`--kv-events-config`.

Nothing here reads files, the environment or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from milepost.checks import check_choice
from milepost.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Settings of KV events. Raises ConfigError."""

    enable_kv_cache_events: bool = False
    """Whether to send events."""
    publisher: Literal["null", "zmq"] | None = None
    """`zmq` by default if events are enabled, otherwise `null`."""
    endpoint: str = "tcp://*:5557"
    """Socket that publishes events. It is bound if the address has a `*` or `::` or is no TCP
    address, otherwise connected.
    """
    replay_endpoint: str | None = None
    """Socket that resends messages a subscriber has missed; always bound."""
    buffer_steps: int = 10_000
    """Number of messages that can be resent."""
    hwm: int = 100_000
    """Most messages that wait for a slow subscriber before it misses some."""
    max_queue_size: int = 100_000
    """Most messages that wait for the publishing thread before the engine waits too."""
    topic: str = ""
    """Prefix of each message, by which subscribers of several engines can filter."""
    format: Literal["map", "array"] = "map"
    """Form of an event on the wire: `map`, or `array` for routers from before June 2026."""
    hashes: Literal["int", "bytes"] = "int"
    """Form of a page's hash on the wire: `int` is the last 64 bits of its digest, vLLM's default;
    `bytes` is the whole digest, which Dynamo's routers do not read.
    """

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
