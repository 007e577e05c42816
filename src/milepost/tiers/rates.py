"""How fast tokens are computed and bytes are copied: facts that are handed in, smoothed."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.2
"""Of the newest measurement."""
MIN_TOKENS = 256
"""Prefills of fewer tokens are too short to tell a rate."""
MIN_BYTES = 2**20
"""Likewise of copies."""


@dataclass(slots=True, kw_only=True)
class Rates:
    """In tokens and bytes a second. What stands here at first is a guess, on the low side for what
    is copied: a load that is not tried is never measured.
    """

    tokens_per_s: float = 20_000.0
    """Computed by a prefill."""
    host_bytes_per_s: float = 20e9
    disk_bytes_per_s: float = 1e9
    load_s: float = 0.001
    """What a load costs beside its bytes."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= MIN_TOKENS and seconds > 0:
            self.tokens_per_s += WEIGHT * (num_tokens / seconds - self.tokens_per_s)

    def copied(self, num_bytes: int, seconds: float) -> None:
        """Between host memory and the device."""
        if num_bytes >= MIN_BYTES and seconds > 0:
            self.host_bytes_per_s += WEIGHT * (num_bytes / seconds - self.host_bytes_per_s)

    def read(self, num_bytes: int, seconds: float) -> None:
        """From disk."""
        if num_bytes >= MIN_BYTES and seconds > 0:
            self.disk_bytes_per_s += WEIGHT * (num_bytes / seconds - self.disk_bytes_per_s)

    def load_seconds(self, host_bytes: int, disk_bytes: int) -> float:
        """Of a load; what is on disk crosses host memory too."""
        copying = (host_bytes + disk_bytes) / self.host_bytes_per_s
        return self.load_s + copying + disk_bytes / self.disk_bytes_per_s

    def compute_seconds(self, num_tokens: int) -> float:
        return num_tokens / self.tokens_per_s
