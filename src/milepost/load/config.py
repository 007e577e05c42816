"""Configures how a server is loaded. The flags of `milepost bench` are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from milepost.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveConfig:
    """How the load is sent. Raises ConfigError."""

    base_url: str = "http://127.0.0.1:8000"
    """The server, with or without /v1."""
    api_key: str | None = None
    """Sent as a bearer token."""
    served_model: str | None = None
    """Name of the model; by default the first that the server lists."""
    concurrency: int = 16
    """Number of sessions at once (closed loop), if there is no request rate."""
    request_rate: float | None = None
    """Sessions per second, with exponential gaps (open loop); inf sends all at once."""
    num_warmups: int = 4
    """Number of requests before the measurement, with texts of their own."""
    temperature: float = 0.0
    """Sent with every request."""
    ignore_eos: bool = False
    """Ask for answers of full length; servers without this field refuse it."""
    timeout_s: float = 600.0
    """Longest time for one request."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={self.base_url!r}: begin it with http:// or https://")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency}: use 1 or more")
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request_rate={self.request_rate}: use more than 0")
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups={self.num_warmups}: use 0 or more")
        if not 0 <= self.temperature < inf:
            raise ConfigError(f"temperature={self.temperature}: use 0 for greedy, or more")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s}: use more than 0")
        if not (self.api_key or "").isprintable():
            raise ConfigError("api_key: use one line of text")
