"""Decides how much memory pages and slots get, and how it is laid out.

With two pools, memory is split once: every request that may run gets a slot, a sixth of the rest
goes to slots for checkpoints, and the remainder to pages. Pages and slots share one memory with a
moving boundary if the model has layers of both kinds and there is room for enough units.

The host keeps a record of each page. So the number of pages is bounded, and each is charged a
minimum size, even if it holds nothing: in a model without attention, pages only lead to states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from milepost.cache.memory import Split, UnifiedPool
from milepost.errors import ConfigError
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pools import Pools, allocate
from milepost.runner.shared import allocate_shared, best_unit, why_apart

CHECKPOINT_SHARE = 1 / 6
"""Share of memory for checkpoints. In recorded traffic, agents do best with a tenth and questions
about documents with a fifth."""
MAX_PAGES = 2**21
"""Largest number of pages: more than fit in today's memories, unless pages hold next to nothing.
Counting this many takes 120 MB on the host before they are used, and about 2 GB when all of them
cache something."""
PAGE_HOST_BYTES = 1024
"""Smallest size charged for a page: what the host remembers about a cached one."""
MIN_UNITS = 4
"""Fewest units that may be shared; fewer would leave too little choice. A unit is a slot, or the
pages that fit in its place."""
GIB, MIB = 2**30, 2**20
LAUNCHES_BYTES = GIB // 4
"""Memory for launching graphs, and for anything else that is not counted."""

_RAISED = "gpu_memory_utilization (cpu_cache_gib on a CPU) or, if it was set, kv_cache_memory_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoPools:
    """Sizes of separate pools of pages and slots, not counting the zero slot."""

    num_pages: int
    num_slots: int
    num_windows: int = 0
    """Number of window pages, for layers with a sliding window."""

    def storage(self) -> Split:
        """Returns the cache's view of the pools."""
        return Split(self.num_pages, self.num_slots)

    def allocate(self, shape: PoolShape, device: torch.device) -> Pools:
        """Allocates the tensors."""
        return allocate(
            shape,
            num_pages=self.num_pages,
            num_slots=self.num_slots,
            num_windows=self.num_windows,
            device=device,
        )

    def num_bytes(self, shape: PoolShape) -> int:
        """Bytes of all pages and slots, including the zero slot."""
        windows = self.num_windows * shape.window_bytes
        return self.num_pages * shape.page_bytes + (self.num_slots + 1) * shape.slot_bytes + windows

    def num_sequences(self, num_pages: int) -> int:
        """Number of sequences that fit at once, each with a slot and `num_pages` pages."""
        return min(self.num_slots, self.num_pages // max(num_pages, 1))

    def describe(self, shape: PoolShape) -> str:
        """Describes the pools for the log."""
        pages = f"{self.num_pages} pages of {shape.page_size} tokens"
        page_mib = self.num_pages * shape.page_bytes / MIB
        slot_mib = (self.num_slots + 1) * shape.slot_bytes / MIB
        slots = f"{self.num_slots} state slots ({slot_mib:.1f} MiB)"
        if not shape.windows:
            return f"{pages} ({page_mib:.1f} MiB), {slots}"
        window_mib = self.num_windows * shape.window_bytes / MIB
        windows = f"{self.num_windows} pages of windows ({window_mib:.1f} MiB)"
        return f"{pages} ({page_mib:.1f} MiB), {slots}, {windows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneMemory:
    """Size of a shared memory: `num_units` units, not counting the zero slot's, each one slot or
    `pages_each` pages."""

    num_units: int
    pages_each: int
    unit_bytes: int

    @property
    def num_slots(self) -> int:
        """Largest possible number of slots."""
        return self.num_units

    num_windows = 0

    def storage(self) -> UnifiedPool:
        """Returns the cache's view of the memory."""
        return UnifiedPool(self.num_units, self.pages_each)

    def allocate(self, shape: PoolShape, device: torch.device) -> Pools:
        """Allocates the tensors."""
        return allocate_shared(
            shape, num_units=self.num_units, pages_each=self.pages_each, device=device
        )

    def num_bytes(self, _: PoolShape) -> int:
        """Bytes of all units, including the zero slot's."""
        return (self.num_units + 1) * self.unit_bytes

    def num_sequences(self, num_pages: int) -> int:
        """Number of sequences that fit at once, each with a slot and `num_pages` pages."""
        return self.num_units * self.pages_each // (self.pages_each + num_pages)

    def describe(self, shape: PoolShape) -> str:
        """Describes the memory for the log."""
        pages = f"{self.pages_each} pages of {shape.page_size} tokens"
        total = self.num_bytes(shape) / MIB
        return f"{self.num_units} units, each a state slot or {pages} ({total:.1f} MiB)"


Sizes = TwoPools | OneMemory


def share(budget: int, shape: PoolShape) -> OneMemory | None:
    """Returns the shared memory that fits `budget` bytes, or None if two pools serve better."""
    if why_not_shared(budget, shape):
        return None
    unit = best_unit(shape)
    return OneMemory(
        num_units=min(budget // unit.num_bytes - 1, MAX_PAGES // unit.pages_each),
        pages_each=unit.pages_each,
        unit_bytes=unit.num_bytes,
    )


def why_not_shared(budget: int, shape: PoolShape) -> str:
    """Says why two pools serve better, and what to do if the `budget` is the reason; empty if they
    do not."""
    reason = why_apart(shape)
    if reason:
        return f"{reason}; use 'auto' or 'split'"
    unit = best_unit(shape).num_bytes
    least = (MIN_UNITS + 1) * unit
    if budget >= least:
        return ""
    return (
        f"{max(budget, 0)} bytes are left for the cache, {least} are the least that is shared, "
        f"{MIN_UNITS} units of {unit} besides the zero slot; use 'auto' or 'split', or raise "
        f"{_RAISED}"
    )


def split(budget: int, shape: PoolShape, *, max_num_seqs: int) -> TwoPools:
    """Returns pages and slots that fit `budget` bytes. Slots never outnumber pages, except for
    those of running requests. Raises ConfigError if not even the least fits."""
    page, slot = max(shape.page_bytes, PAGE_HOST_BYTES), max(shape.state_bytes, 1)
    under_way = shape.num_windows(0) * shape.window_bytes  # for the window pages that steps write
    least = page + 2 * slot + under_way
    if budget < least:
        raise ConfigError(
            f"{max(budget, 0) / GIB:.3f} GiB are left for the cache, {least / GIB:.3f} GiB are the "
            f"least that runs: {(least - budget) / GIB:.3f} GiB are missing; raise "
            f"{_RAISED}, lower max_num_batched_tokens, end what else uses the device, "
            "or use quantised weights or more GPUs"
        )
    budget -= under_way
    if not shape.uses_slots:
        return TwoPools(num_pages=min(budget // page, MAX_PAGES), num_slots=0)
    running = min(max_num_seqs * slot, budget // 2)
    rest = budget - running
    # Where pages hold nothing, states are all that there is to keep.
    share = CHECKPOINT_SHARE if shape.page_bytes else 1 - CHECKPOINT_SHARE
    num_slots = int(running + rest * share) // slot
    num_pages = min(max(int(rest * (1 - share)) // page, 1), MAX_PAGES)
    num_slots = max(2, min(num_slots, num_pages + max_num_seqs))
    return TwoPools(
        num_pages=num_pages, num_slots=num_slots, num_windows=shape.num_windows(num_slots)
    )


def free_bytes(
    device: torch.device, *, utilization: float, activations: int, cpu_cache_gib: float
) -> int:
    """Returns the bytes that the pools may take, once the weights are loaded.

    `activations` is the memory of steps and their graphs.
    """
    if device.type != "cuda":
        return int(cpu_cache_gib * GIB)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - total * (1 - utilization)) - activations - LAUNCHES_BYTES
