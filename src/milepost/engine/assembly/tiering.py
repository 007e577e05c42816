"""Each rank's part of the tiers: host memory, files, and the copies between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.parallel import Ranks

if TYPE_CHECKING:
    from milepost.runner.pool_shape import PoolShape
    from milepost.runner.runner import Runner
    from milepost.tiers.device_copies import DeviceHostCopies
    from milepost.tiers.files import Files
    from milepost.tiers.holdings import TierLimits
    from milepost.tiers.rank_worker import RankTierWorker

logger = logging.getLogger(__name__)

MAKE_S = 5.0
"""Time in seconds that the start waits for a directory to be made."""
MIN_PAGES_UNDER_WAY = 64
MIN_STATES_UNDER_WAY, MAX_STATES_UNDER_WAY = 2, 8
SHARE_UNDER_WAY = 1 / 16
"""Share of the device's memory for copies on their way to host memory, once for pages and once for
states, within those bounds."""


def staging_bytes(config: EngineConfig, shape: PoolShape, pool_bytes: int) -> int:
    """Returns the device memory for copies on their way to the host."""
    if not config.has_tiers:
        return 0
    num_pages, num_states = under_way(config, pool_bytes, shape.page_bytes, shape.state_bytes)
    return num_pages * shape.page_bytes + num_states * shape.state_bytes


def under_way(
    config: EngineConfig, pool_bytes: int, page_bytes: int, state_bytes: int
) -> tuple[int, int]:
    """Returns how many pages and states may be on their way from the device at a time: those that
    two steps compute, within a share of the memory so small that caching hardly misses it."""
    share = int(pool_bytes * SHARE_UNDER_WAY)
    most = 2 * config.step_tokens() // config.page_size
    num_pages = max(MIN_PAGES_UNDER_WAY, min(share // max(page_bytes, 1), most))
    num_states = min(share // max(state_bytes, 1), MAX_STATES_UNDER_WAY)
    return num_pages, max(MIN_STATES_UNDER_WAY, num_states)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTierState:
    """A rank's part of the tiers."""

    copies: DeviceHostCopies
    files: Files | None
    limits: TierLimits


def tier_state_of(
    config: EngineConfig, runner: Runner, shape: PoolShape, identity: bytes, ranks: Ranks
) -> RankTierState | None:
    """Returns this rank's part of the configured tiers; None without tiers, or if the system
    refuses the host memory to any rank. Raises ConfigError if the directory cannot be made."""
    if not config.has_tiers:
        return None
    # Imported where it is used: most engines have none.
    from milepost.tiers.arena import allocate_host, device_memory
    from milepost.tiers.device_copies import CudaLink, DeviceHostCopies, DirectLink
    from milepost.tiers.holdings import TierLimits, split

    files = _files(config.cache_dir, identity, ranks.rank)
    device, memory = runner.pools.device, device_memory(runner.pools, shape.windows_each)
    link = CudaLink(device) if device.type == "cuda" else DirectLink()
    num_bytes = config.host_bytes // ranks.size
    num_pages, num_states = split(num_bytes, memory.pages.item_bytes, memory.state_bytes)
    host = None
    try:
        host = allocate_host(memory, num_pages, num_states, is_pinned=isinstance(link, CudaLink))
    except MemoryError as error:
        logger.error("tiers: off, %s", error)
    if not ranks.least(host is not None) or host is None:
        return None
    page_bytes, state_bytes = host.pages.item_bytes, host.states.item_bytes
    num_staged = (0, 0)
    if link.needs_staging:
        pool_bytes = sum(storage.nbytes() for storage in runner.pools.storages())
        most_staged = under_way(config, pool_bytes, page_bytes, state_bytes)
        num_staged = ranks.least(most_staged[0]), ranks.least(most_staged[1])
    disk_bytes = 0 if files is None else int(config.cache_disk_gib * 2**30) // ranks.size
    disk_pages, disk_states = split(disk_bytes, page_bytes, state_bytes)
    limits = TierLimits(
        page_bytes=page_bytes,
        state_bytes=state_bytes,
        num_host_pages=num_pages,
        num_host_states=num_states,
        num_disk_pages=disk_pages,
        num_disk_states=disk_states,
        max_pages_under_way=num_staged[0],
        max_states_under_way=num_staged[1],
    )
    copies = DeviceHostCopies(memory, host, link, num_staged)
    return RankTierState(copies=copies, files=files, limits=limits)


def tier_worker_of(
    runner: Runner, tier_state: RankTierState | None, answer: Callable[[int, bool], None]
) -> RankTierWorker | None:
    """Returns the worker of a rank other than the first; None without tiers."""
    if tier_state is None:
        return None
    from milepost.tiers.loads import Loads
    from milepost.tiers.rank_worker import RankTierWorker

    device = runner.pools.device
    begin_thread = partial(torch.cuda.set_device, device) if device.type == "cuda" else int
    tier_worker = RankTierWorker(runner, tier_state.copies, tier_state.files, answer, begin_thread)
    runner.transfers[Loads.name] = tier_worker
    return tier_worker


def _files(directory: str | None, identity: bytes, rank: int) -> Files | None:
    """Returns this rank's files of the model; None without a directory."""
    if directory is None:
        return None
    from milepost.tiers.files import Files
    from milepost.tiers.threads import Threads

    if rank:
        identity = blake2b(identity + rank.to_bytes(4, "little"), digest_size=16).digest()
    files = Files(Path(directory).expanduser(), identity)
    made = Threads(1, "tiers-make").submit(files.make)
    wait([made], timeout=MAKE_S)
    error = made.exception() if made.done() else None
    if error is not None:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cache_dir={directory!r}: {why}") from error
    if not made.done():
        logger.error("tiers: %s does not answer: the engine starts without", files.directory)
    return files
