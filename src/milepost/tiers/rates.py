"""Measured speeds of prefills and copies, smoothed. The caller measures."""

from __future__ import annotations

from dataclasses import dataclass, field

WEIGHT = 0.2
"""Least weight of a new measurement; the first ones are averaged evenly."""
FORGOTTEN = 0.01
"""Share by which the measured speed of copies returns to the guess with each prefill. Loads that
seem too slow are not tried, so their speed would never be measured again.
"""
MIN_TOKENS = 256
"""Fewest tokens of a prefill that is measured; shorter ones do not tell a rate."""
MIN_BYTES = 2**20
"""Fewest bytes of a copy that is measured."""


@dataclass(slots=True, kw_only=True)
class Rate:
    """A measured rate. It starts at `guess`, which is too high rather than too low for copies: a
    way that is never tried is never measured.
    """

    guess: float
    value: float = field(init=False)
    num_measured: int = 0

    def __post_init__(self) -> None:
        self.value = self.guess

    def measure(self, amount: float, seconds: float) -> None:
        self.num_measured += 1
        weight = max(WEIGHT, 1 / self.num_measured)
        self.value += weight * (amount / seconds - self.value)

    def forget(self) -> None:
        self.value += FORGOTTEN * (self.guess - self.value)


class MeasuredRates:
    """Rates in tokens and bytes per second."""

    def __init__(
        self,
        *,
        tokens_per_s: float = 20_000.0,
        host_bytes_per_s: float = 40e9,
        disk_bytes_per_s: float = 4e9,
        load_s: float = 0.001,
    ) -> None:
        self._tokens = Rate(guess=tokens_per_s)
        self._host = Rate(guess=host_bytes_per_s)
        self._disk = Rate(guess=disk_bytes_per_s)
        self._load_s = load_s
        """Fixed cost of a load, besides its bytes."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens that a prefill computes per second."""
        return self._tokens.value

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes per second between host memory and the device."""
        return self._host.value

    @property
    def disk_bytes_per_s(self) -> float:
        return self._disk.value

    def computed(self, num_tokens: float, seconds: float) -> None:
        if num_tokens >= MIN_TOKENS and seconds > 0:
            self._tokens.measure(num_tokens, seconds)
            self._host.forget()
            self._disk.forget()

    def copied(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= MIN_BYTES and seconds > 0:
            self._host.measure(num_bytes, seconds)

    def read(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= MIN_BYTES and seconds > 0:
            self._disk.measure(num_bytes, seconds)

    def load_seconds(self, host_bytes: int, disk_bytes: int) -> float:
        """Returns the time of a load. Bytes on disk pass through host memory too."""
        copying = (host_bytes + disk_bytes) / self.host_bytes_per_s
        return self._load_s + copying + disk_bytes / self.disk_bytes_per_s

    def compute_seconds(self, num_tokens: float) -> float:
        return num_tokens / self.tokens_per_s
