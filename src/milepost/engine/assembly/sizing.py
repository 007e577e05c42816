"""Sizes the pools: as configured, or else by the memory that every rank has; with room for drafts
if the model takes any."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeGuard

import torch

from milepost.config import EngineConfig
from milepost.engine.assembly.tiering import staging_bytes
from milepost.errors import ConfigError, UnsupportedModelError
from milepost.kernels.platform.device import why_reference
from milepost.kernels.platform.tensors import FP8
from milepost.layers.context import AttentionSpec, LayerSpec, RecurrentSpec
from milepost.models.decoder import Decoder
from milepost.models.early import check_length
from milepost.models.registry import resolve_dtype
from milepost.models.room import available_bytes
from milepost.parallel import Ranks
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pool_sizes import (
    GIB,
    MAX_PAGES,
    Sizes,
    TwoPools,
    free_bytes,
    share,
    split,
    why_not_shared,
)
from milepost.speculative_config import SpeculativeConfig

logger = logging.getLogger(__name__)


def sizes_of(
    config: EngineConfig, shape: PoolShape, device: torch.device, activations: int, ranks: Ranks
) -> Sizes:
    """Returns the configured sizes, or else those that fit the memory of every rank. Raises
    ConfigError for more than there is."""
    for name in ("num_pages", "num_slots"):
        number = getattr(config, name)
        if number is not None and number > MAX_PAGES:
            raise ConfigError(f"{name}={number}: use at most {MAX_PAGES}, or leave it out")
    sizes = _sizes_of(config, shape, device, activations, ranks)
    asked = (config.num_pages, config.num_slots, config.kv_cache_memory_bytes)
    if device.type != "cuda" or any(number is not None for number in asked):
        _check_room(sizes, shape, device)
    return sizes


def _check_room(sizes: Sizes, shape: PoolShape, device: torch.device) -> None:
    """Raises ConfigError for pools that the device's free memory does not hold. Called before the
    cache makes its lists of pages, and before the system promises memory that it lacks."""
    needed, free = sizes.num_bytes(shape), available_bytes(device)
    if free is not None and needed > free:
        raise ConfigError(
            f"the cache takes {needed / GIB:.1f} GiB, by {sizes.describe(shape)}, and {device} has "
            f"{free / GIB:.1f} GiB free: {(needed - free) / GIB:.1f} GiB are missing; lower "
            "num_pages, num_slots, kv_cache_memory_bytes or cpu_cache_gib, or leave them out"
        )


def _sizes_of(
    config: EngineConfig, shape: PoolShape, device: torch.device, activations: int, ranks: Ranks
) -> Sizes:
    num_pages, num_slots = config.num_pages, config.num_slots if shape.uses_slots else 0
    if num_pages is not None and num_slots is not None:
        num_windows = shape.num_windows(num_slots)
        return TwoPools(num_pages=num_pages, num_slots=num_slots, num_windows=num_windows)
    budget = config.kv_cache_memory_bytes or free_bytes(
        device,
        utilization=config.gpu_memory_utilization,
        activations=activations,
        cpu_cache_gib=config.cpu_cache_gib,
    )
    if device.type == "cuda":
        budget -= staging_bytes(config, shape, budget)
    budget = ranks.least(budget - shape.record_bytes)
    may_share = num_pages is None and num_slots is None and config.cache_memory != "split"
    if may_share and (config.cache_memory == "shared" or device.type == "cuda"):
        one = share(budget, shape)
        if one is not None:
            return one
    if config.cache_memory == "shared":
        raise ConfigError(f"cache_memory='shared': {why_not_shared(budget, shape)}")
    sizes = split(budget, shape, max_num_seqs=config.max_num_seqs)
    num_slots = sizes.num_slots if num_slots is None else num_slots
    num_windows = shape.num_windows(num_slots)
    num_pages = num_pages or sizes.num_pages
    return TwoPools(num_pages=num_pages, num_slots=num_slots, num_windows=num_windows)


def max_model_len_of(config: EngineConfig, model: Decoder, shape: PoolShape, capacity: int) -> int:
    """Returns the longest prompt plus answer: as configured, or what both the model and the cache
    hold, which is `capacity` tokens. Raises ConfigError."""
    asked = config.max_model_len
    check_length(asked, model.num_positions)
    if asked is None:
        return min(model.num_positions, capacity)
    if asked > capacity:
        missing = (asked - capacity) / shape.page_size * shape.page_bytes / GIB
        halves = "" if shape.dtype_of_kv == FP8 else "use kv_cache_dtype='fp8' or more GPUs, "
        raise ConfigError(
            f"max_model_len={asked}: the cache holds {capacity} tokens, {missing:.3f} GiB are "
            f"missing for the rest; lower it, {halves}or raise num_pages, gpu_memory_utilization, "
            "kv_cache_memory_bytes or cpu_cache_gib"
        )
    return asked


def pool_shape(
    config: EngineConfig, model: Decoder, device: torch.device, kv_dtype: torch.dtype | None
) -> PoolShape:
    """Returns the shapes of a page and a slot of the model, with room for what drafts record."""
    is_indexed = any(
        spec.is_indexed for spec in model.layer_specs if isinstance(spec, AttentionSpec)
    )
    if is_indexed and kv_dtype is not None:
        raise ConfigError(
            "kv_cache_dtype='fp8': pages hold index keys, which have no scales; leave it out"
        )
    state_dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    if config.mamba_ssm_cache_dtype != "auto":
        state_dtype = resolve_dtype(config.mamba_ssm_cache_dtype, model.config)
    num_drafts = num_drafts_of(
        config.speculative_config,
        model.layer_specs,
        model.mixers_without_drafts,
        has_head=model.mtp is not None,
        is_fused=not why_reference(device, model.dtype, model.operations),
    )
    return PoolShape(
        specs=model.layer_specs,
        page_size=config.page_size,
        dtype=model.dtype,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        carried_size=model.carried_size,
        num_record_rows=config.max_num_seqs if num_drafts else 0,
        num_drafts=num_drafts,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_tokens(),
    )


def num_drafts_of(
    wanted: SpeculativeConfig | None,
    specs: Sequence[LayerSpec],
    without: Sequence[str],
    *,
    has_head: bool,
    is_fused: bool,
) -> int:
    """Returns the largest number of drafts in one step; 0 if nothing is drafted. `without` names
    mixers that have no kernels for drafts. Raises UnsupportedModelError for a model with such
    mixers, or with head sizes that the fused kernels do not support, unless the method is `auto`.
    """
    if wanted is None or (wanted.method == "auto" and not has_head):
        return 0
    odd = {spec.recurrent_shape[1:] for spec in specs if is_fused and _takes_drafts_plain(spec)}
    if not without and not odd:
        return wanted.num_tokens
    which = f"layers of {' and '.join(without)}"
    if not without:
        which = f"heads of {' by '.join(map(str, min(odd)))}, on a GPU,"
    message = f"speculative_config: a model with {which} cannot take drafts"
    if wanted.method != "auto":
        raise UnsupportedModelError(f"{message}; leave it out")
    logger.warning("%s: nothing is drafted", message)
    return 0


def _takes_drafts_plain(spec: LayerSpec) -> TypeGuard[RecurrentSpec]:
    """Whether only the reference kernels support drafts for this layer."""
    return isinstance(spec, RecurrentSpec) and not spec.takes_drafts_fused
