"""How much memory the pools get, and how it is split between pages and slots.

The rule: every request that may run gets a slot, and of the rest a sixth goes to slots for
checkpoints and the remainder to pages. There are never more slots than pages, nor fewer pages than
one request of full length needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from milepost.errors import ConfigError
from milepost.runner.pools import PoolShape

CHECKPOINT_SHARE = 1 / 6
"""Of recorded traffic, agents do best with a tenth and questions about documents with a fifth
(docs/simulator.md, one byte budget).
"""
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    num_pages: int
    num_slots: int


def split(budget: int, shape: PoolShape, *, max_num_seqs: int) -> PoolSizes:
    """Pages and slots that fit `budget` bytes. Raises ConfigError if not even the least does."""
    page, slot = max(shape.page_bytes, 1), max(shape.slot_bytes, 1)
    least = page + 2 * slot
    if budget < least:
        raise ConfigError(
            f"{budget / GIB:.3f} GiB are left for the cache, {least / GIB:.3f} GiB are the least "
            "that runs: raise gpu_memory_utilization (cpu_cache_gib on a CPU)"
        )
    running = min(max_num_seqs * slot, budget // 2)
    rest = budget - running
    num_slots = int(running + rest * CHECKPOINT_SHARE) // slot
    num_pages = int(rest * (1 - CHECKPOINT_SHARE)) // page
    num_pages = max(num_pages, 1)
    return PoolSizes(
        num_pages=num_pages, num_slots=max(2, min(num_slots, num_pages + max_num_seqs))
    )


def free_bytes(
    device: torch.device, *, utilization: float, activations: int, cpu_cache_gib: float
) -> int:
    """Bytes that the pools may take, after the weights have been loaded.

    `activations` are the most that a step takes besides; captured graphs take a share of that
    again.
    """
    if device.type != "cuda":
        return int(cpu_cache_gib * GIB)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    graphs = activations // 4 + GIB // 4
    return int(free - total * (1 - utilization)) - activations - graphs
