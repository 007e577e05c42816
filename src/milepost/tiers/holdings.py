"""Contents of host memory and disk, and the time to load them: shared by the modules that decide
what is stored and loaded. Pure: the caller measures rates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from milepost.cache.plans import What
from milepost.tiers.tier import Item, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    """Capacities of both tiers, the size of an item, and how many may be on their way."""

    page_bytes: int
    state_bytes: int
    num_host_pages: int
    num_host_states: int
    num_disk_pages: int = 0
    num_disk_states: int = 0
    max_pages_under_way: int = 64
    """Largest number of pages on their way from the device; 0 means no limit for pages and
    states."""
    max_states_under_way: int = 2


STATES_SHARE = 1 / 3
"""Share of a tier's bytes for states, in models with states."""


LEAST_BYTES = 2**14
"""Bytes charged for an item that has fewer, such as a page of a model without attention: each item
is counted and remembered, whatever it holds.
"""
MAX_ITEMS = 2**25
"""Largest number of items of one kind in a tier."""


def split(num_bytes: int, page_bytes: int, state_bytes: int) -> tuple[int, int]:
    """Returns the numbers of pages and states that fit into `num_bytes`."""
    num_states = 0
    if state_bytes:
        state_bytes = max(state_bytes, LEAST_BYTES)
        num_states = min(int(num_bytes * STATES_SHARE) // state_bytes, MAX_ITEMS)
    rest = num_bytes - num_states * state_bytes
    return min(rest // max(page_bytes, LEAST_BYTES), MAX_ITEMS), num_states


@dataclass(slots=True, kw_only=True)
class TierStats:
    """Counters since the start."""

    stored: int = 0
    """Items that reached host memory."""
    written: int = 0
    """Items that reached the disk."""
    loads: int = 0
    failed_loads: int = 0
    too_late: int = 0
    """States that left the device before there was room to copy them."""
    disk_rests: int = 0
    """Times the disk stopped responding."""


class Holdings:
    """Both tiers of one model, whose pages have `page_size` tokens."""

    def __init__(
        self, limits: TierLimits, rates: MeasuredRates, *, page_size: int, has_states: bool
    ) -> None:
        self.limits = limits
        self.rates = rates
        self.stats = TierStats()
        self.page_size = page_size
        self.has_states = has_states
        """Whether recurrent states are in slots; otherwise there are only pages."""
        self.host = Tier(num_pages=limits.num_host_pages, num_states=limits.num_host_states)
        self.disk = Tier(num_pages=limits.num_disk_pages, num_states=limits.num_disk_states)
        self.disk_rests = False
        """Whether the disk does not respond: items that are only there cannot be read."""

    @property
    def head(self) -> What:
        """The kind of item that prompts ask for; all others are kept because a head needs them."""
        return "state" if self.has_states else "page"

    def has(self, tier: Tier, key: bytes, position: int) -> bool:
        """Whether a page, or a state with its tail, is in a tier or on its way there."""
        if tier.get(self.head, key) is None:
            return False
        has_tail = self.has_states and position % self.page_size > 0
        return not has_tail or tier.get("tail", key) is not None

    def is_on_host(self, what: What, key: bytes) -> bool:
        """Whether an item can be read from host memory."""
        return ready(self.host.get(what, key)) is not None

    def find(self, what: What, key: bytes) -> Item | None:
        """Returns the copy of an item that can be read; None while it is on its way to host
        memory.
        """
        on_host = self.host.get(what, key)
        if on_host is None and not self.disk_rests:
            return ready(self.disk.get(what, key))
        return ready(on_host)

    def rest_disk(self) -> None:
        """Stops offering items that are only on the disk, which does not respond."""
        self.disk_rests = True
        self.stats.disk_rests += 1
        self.disk.num_changes += 1

    def wake_disk(self) -> None:
        """Offers items on the disk again, which responds."""
        self.disk_rests = False
        self.disk.num_changes += 1

    def load_seconds(self, num_pages: int, num_pages_from_disk: int, rest: Iterable[Item]) -> float:
        """Returns the time to load `num_pages` pages, `num_pages_from_disk` of them from disk, and
        the items in `rest`.
        """
        num_bytes = num_pages * self.limits.page_bytes
        disk_bytes = num_pages_from_disk * self.limits.page_bytes
        for item in rest:
            size = self._bytes(item.what)
            num_bytes += size
            disk_bytes += 0 if self.is_on_host(item.what, item.key) else size
        return self.rates.load_seconds(num_bytes - disk_bytes, disk_bytes)

    def _bytes(self, what: What) -> int:
        return self.limits.state_bytes if what == "state" else self.limits.page_bytes


def ready(item: Item | None) -> Item | None:
    """Returns the item if its contents are there."""
    return item if item is not None and item.is_ready else None


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
    """A measured amount per second, smoothed. It starts at `guess`, which is too high rather than
    too low for copies: a way that is never tried is never measured.
    """

    guess: float
    least: int
    """Smallest amount that is measured."""
    value: float = field(init=False)
    num_measured: int = 0

    def __post_init__(self) -> None:
        self.value = self.guess

    def measure(self, amount: float, seconds: float) -> bool:
        """Records a measurement. Returns False for one that tells no rate."""
        if amount < self.least or seconds <= 0:
            return False
        self.num_measured += 1
        weight = max(WEIGHT, 1 / self.num_measured)
        self.value += weight * (amount / seconds - self.value)
        return True

    def forget(self) -> None:
        self.value += FORGOTTEN * (self.guess - self.value)


class MeasuredRates:
    """Measured speeds of prefills and copies."""

    def __init__(
        self,
        *,
        tokens_per_s: float = 20_000.0,
        host_bytes_per_s: float = 40e9,
        disk_bytes_per_s: float = 4e9,
        load_s: float = 0.001,
    ) -> None:
        self.prefill = Rate(guess=tokens_per_s, least=MIN_TOKENS)
        """Tokens."""
        self.host = Rate(guess=host_bytes_per_s, least=MIN_BYTES)
        """Bytes between host memory and the device."""
        self.disk = Rate(guess=disk_bytes_per_s, least=MIN_BYTES)
        """Bytes read from disk."""
        self._load_s = load_s
        """Fixed cost of a load, besides its bytes."""

    def computed(self, num_tokens: float, seconds: float) -> None:
        """Records the time of a prefill."""
        if self.prefill.measure(num_tokens, seconds):
            self.host.forget()
            self.disk.forget()

    def load_seconds(self, host_bytes: int, disk_bytes: int) -> float:
        """Returns the time of a load. Bytes on disk pass through host memory too."""
        copying = (host_bytes + disk_bytes) / self.host.value
        return self._load_s + copying + disk_bytes / self.disk.value

    def compute_seconds(self, num_tokens: float) -> float:
        return num_tokens / self.prefill.value
