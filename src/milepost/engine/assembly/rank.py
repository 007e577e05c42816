"""Builds what one rank needs: its part of the model, pools, a cache, a runner with kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from milepost.annexes import annex
from milepost.cache import Cache
from milepost.cache.tree import FullAttention, LayerKind, Recurrent, ShortConvolution, SlidingWindow
from milepost.config import EngineConfig
from milepost.engine.assembly.auto import device_of, folder_of, load_options_of
from milepost.engine.assembly.bitwise import facts_of
from milepost.engine.assembly.fitting import RankModel, fit
from milepost.engine.assembly.images import image_settings_of
from milepost.engine.assembly.sizing import max_model_len_of
from milepost.engine.assembly.team import Team
from milepost.engine.assembly.tiering import RankTierState, tier_state_of
from milepost.engine.off_device import PoolAccess
from milepost.images import ImageSettings
from milepost.kernels.platform.device import hopper_kernels
from milepost.models.decoder import Decoder
from milepost.models.identity import identify
from milepost.models.loading import load_model
from milepost.parallel import Ranks
from milepost.parallel.gloo import GlooLink
from milepost.runner.device import DeviceExecutor
from milepost.runner.in_flight import accept_at, accept_equal
from milepost.runner.measuring import FirstSteps
from milepost.runner.plain import PlainExecutor
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pool_sizes import Sizes
from milepost.runner.pools import Pools
from milepost.runner.recording import PlanLog
from milepost.runner.runner import Executor, Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """The parts of one rank: its shard of the model, pools, and a runner."""

    config: EngineConfig
    """The configuration, with limits of a step that fit the device."""
    model: Decoder
    whole: PreTrainedConfig
    weights_bytes: int
    shape: PoolShape
    sizes: Sizes
    cache: Cache
    max_model_len: int
    num_graphs: int
    runner: Runner
    tier_state: RankTierState | None
    """This rank's part of the tiers; None without tiers."""
    access: PoolAccess | None
    """Gives other engines access to the pools; None if nothing is exchanged."""


def build_rank(
    config: EngineConfig,
    ranks: Ranks,
    *,
    log: PlanLog | None = None,
    team: Team | None = None,
) -> RankParts:
    """Builds the parts of one rank. `log` and `team` receive its runner's records."""
    with hopper_kernels(config.hopper_kernels):  # an executor keeps to what it was made with
        return _build(config, ranks, log, team)


def _build(config: EngineConfig, ranks: Ranks, log: PlanLog | None, team: Team | None) -> RankParts:
    folder = folder_of(config)
    device = device_of(config.device, ranks.rank)
    if device.type == "cuda" and not ranks.is_alone:
        ranks = _reaching(config, ranks, device, team)
    model, whole = load_model(folder, load_options_of(config, folder, device, ranks))
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.pack()
    settings = image_settings_of(config, folder, whole) if model.tower is not None else None
    part = RankModel(model=model, whole=whole, ranks=ranks, settings=settings)
    fitted = fit(config, part, device)
    config, shape, sizes = fitted.config, fitted.shape, fitted.sizes
    facts = facts_of(config, device, ranks, is_fused=fitted.steps is not None)
    identity = identity_of(config, folder, model, shape, facts)
    cache = _cache(config, shape, sizes, identity)
    max_model_len = max_model_len_of(config, model, shape, cache.capacity)
    pools = sizes.allocate(shape, device)
    logger.info("cache: %s", sizes.describe(shape))
    # Without slots to bound them: those in their seats, and those whose last step is not read yet.
    num_requests = sizes.num_slots if shape.uses_slots else 2 * config.max_num_seqs
    executor = _executor(model, pools, fitted.steps, num_requests, max_model_len, settings)
    if executor.pictures is not None:
        executor.pictures.joins = config.encode_images_together
        if fitted.step_bytes.tower_graphs:
            executor.pictures.capture(fitted.step_bytes.tower_graphs)
    drafted = config.speculative_config
    rates = None if drafted is None else drafted.synthetic_acceptance_rates
    runner = Runner(
        executor,
        pools,
        num_slots=sizes.num_slots,
        logs=[each for each in (log, team) if each is not None],
        accept=accept_equal if rates is None else accept_at(rates),
        wait=team.wait if team is not None else None,
    )
    return RankParts(
        config=config,
        model=model,
        whole=whole,
        weights_bytes=weights_bytes,
        shape=shape,
        sizes=sizes,
        cache=cache,
        max_model_len=max_model_len,
        num_graphs=len(fitted.steps.captured) if fitted.steps else 0,
        runner=runner,
        tier_state=tier_state_of(config, runner, shape, cache.identity, ranks),
        access=_access(config, pools, ranks),
    )


def _access(config: EngineConfig, pools: Pools, ranks: Ranks) -> PoolAccess | None:
    wanted = config.kv_exchange
    if wanted is None:
        return None
    exchange = annex("exchange", wanted_by="kv_transfer_config")
    access: PoolAccess = exchange.open_access(wanted, pools, ranks.rank, ranks.gather)
    return access


def _reaching(config: EngineConfig, ranks: Ranks, device: torch.device, team: Team | None) -> Ranks:
    """Returns the ranks with a link between their GPUs."""
    # Imported where it is used: machines without a GPU need not have what it needs.
    from milepost.parallel.gpu import GpuLink

    assert isinstance(ranks.link, GlooLink), "hosts reach each other first"
    index = device.index or 0
    torch.cuda.set_device(index)
    gpu = torch.device("cuda", index)
    link = GpuLink(ranks.link, gpu, batch_invariant=config.batch_invariant)
    if team is not None:
        team.closing.append(link.close)
    return replace(ranks, link=link)


def _cache(config: EngineConfig, shape: PoolShape, sizes: Sizes, identity: bytes) -> Cache:
    return Cache(
        storage=sizes.storage(),
        num_windows=sizes.num_windows,
        page_size=config.page_size,
        kinds=_kinds(shape),
        identity=identity,
        mode=config.mamba_cache_mode if config.enable_prefix_caching else "none",
        block_size=config.mamba_block_size,
        bitwise=config.batch_invariant,
    )


def _kinds(shape: PoolShape) -> tuple[LayerKind, ...]:
    """Returns the kinds of the model's layers, for the cache."""
    kinds: list[LayerKind] = [FullAttention()]
    if shape.convolutions:
        kinds.append(ShortConvolution(grid=shape.page_size))
    if shape.uses_slots:
        kinds.append(Recurrent(grid=shape.grid))
    if shape.windows:
        kinds.append(SlidingWindow(window=shape.window))
    return tuple(kinds)


def _executor(
    model: Decoder,
    pools: Pools,
    steps: FirstSteps | None,
    num_requests: int,
    max_model_len: int,
    settings: ImageSettings | None,
) -> Executor:
    sizes = {"num_requests": num_requests, "max_model_len": max_model_len}
    if steps is None:
        return PlainExecutor(model, pools, **sizes, image_settings=settings)
    executor = DeviceExecutor(model, pools, **sizes, largest=steps.largest, image_settings=settings)
    if steps.captured:
        executor.capture(steps.captured)
    return executor


def identity_of(
    config: EngineConfig,
    folder: Path,
    model: Decoder,
    shape: PoolShape,
    bitwise: Mapping[str, str | int],
) -> bytes:
    """Returns the identity of the model as it runs here, which goes into the keys of cached
    items."""
    has_weights = config.load_format != "dummy"
    facts: dict[str, str | int] = {
        **bitwise,
        "dtype": str(shape.dtype),
        "quantization": config.quantization or "",
        "state_dtype": str(shape.state_dtype),
        "kv_dtype": str(shape.dtype_of_kv),
        # Hopper's attention takes pages from a size on.
        "page_size": config.page_size,
        # The angles of some models depend on it.
        "num_positions": model.num_positions,
    }
    if config.fp4_activations:
        facts["fp4_activations"] = True
    if config.hf_overrides is not None:
        facts["overrides"] = config.hf_overrides
    if not has_weights:
        facts["seed"] = config.seed
    if model.mtp is not None:
        facts["head"] = "mtp"
    if config.tensor_parallel_size > 1:
        facts["ranks"] = config.tensor_parallel_size
    return identify(folder, has_weights=has_weights, facts=facts)
