"""Builds an engine from its configuration: model, tokenizer, pools, cache, scheduler, runner.

Everything that can be wrong with a configuration and a checkpoint is found here, before the first
request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from milepost.cache import Cache
from milepost.cache.tree import FullAttention, LayerKind, Recurrent, ShortConvolution
from milepost.config import DType, EngineConfig
from milepost.engine.drafting import accept_of, num_drafts_of, speculation_of
from milepost.engine.facts import Facts
from milepost.engine.generation_config import end_token_ids, sampling_defaults
from milepost.engine.team import Team
from milepost.engine.tiering import Tiering, staging_bytes, tiering_of
from milepost.engine.tokenizer import load_tokenizer
from milepost.errors import ConfigError, KernelError
from milepost.kernels.batch import Capacity
from milepost.kernels.device import allow_hopper_kernels, describe, why_plain
from milepost.kernels.float8 import FP8
from milepost.models.decoder import Decoder
from milepost.models.folder import EMBEDDED_MODEL, find_folder
from milepost.models.identity import identify
from milepost.models.loading import (
    Head,
    check_split,
    load_config,
    load_model,
    resolve_dtype,
)
from milepost.models.quantization import has_fp8_kv
from milepost.parallel import ALONE, Ranks
from milepost.parallel.gloo import GlooLink
from milepost.runner.device import DeviceExecutor, measure_activations
from milepost.runner.graphs import ladder, largest_step
from milepost.runner.memory import (
    GIB,
    MIN_UNITS,
    OneMemory,
    Sizes,
    TwoPools,
    free_bytes,
    share,
    split,
)
from milepost.runner.plain import PlainExecutor
from milepost.runner.pools import Pools, PoolShape
from milepost.runner.recording import PlanLog
from milepost.runner.runner import Executor, Runner
from milepost.scheduler.scheduler import Scheduler
from milepost.speculative import Speculation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine runs on."""

    scheduler: Scheduler
    runner: Runner
    tokenizer: PreTrainedTokenizerBase | None
    end_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, int | float]
    """Fields of SamplingParams for requests that do not set them."""
    vocab_size: int
    max_model_len: int
    facts: Facts
    speculation: Speculation | None = None
    """None where nothing is drafted."""
    tiering: Tiering | None = None
    """What is kept outside the device; None where nothing is."""
    runs_ahead: bool = False
    """Whether a step is launched before the tokens of the one before are read."""
    team: Team | None = None
    """The other ranks, if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What every rank has: its part of the model, pools, and a runner."""

    model: Decoder
    weights_bytes: int
    device: torch.device
    shape: PoolShape
    sizes: Sizes
    cache: Cache
    max_model_len: int
    kv_dtype: str
    """Empty where KV has the model's type."""
    num_graphs: int
    runner: Runner


def build(config: EngineConfig) -> Parts:
    """Load and allocate everything. Raises ConfigError, UnsupportedModelError and WeightsError."""
    folder = _folder(config)
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = load_tokenizer(config.tokenizer or folder, config.revision)
    log = PlanLog(config.record_plans, config) if config.record_plans else None
    team = None
    if config.tensor_parallel_size > 1:
        _check_split(config, folder)
        team = Team(config)
    try:
        own = build_rank(config, ALONE if team is None else team.ranks, log=log, team=team)
    except Exception as error:
        if team is None:
            raise
        # What another rank could not do says more than that it did not answer.
        raise team.reason(error) from None
    if team is not None:
        team.be_prompt()
    model, shape, sizes = own.model, own.shape, own.sizes
    scheduler = Scheduler(
        own.cache,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_lookahead_tokens=_num_lookahead_tokens(config, model),
    )
    return Parts(
        scheduler=scheduler,
        runner=own.runner,
        tiering=tiering_of(config, scheduler, own.runner),
        speculation=speculation_of(
            config.speculative_config, scheduler, shape.num_drafts, has_head=model.mtp is not None
        ),
        tokenizer=tokenizer,
        end_token_ids=end_token_ids(folder, tokenizer),
        sampling_defaults=sampling_defaults(folder, config.generation_config),
        vocab_size=model.vocab_size,
        max_model_len=own.max_model_len,
        facts=Facts(
            device=_device_name(own.device, config.tensor_parallel_size),
            dtype=str(shape.dtype).removeprefix("torch."),
            state_dtype=str(shape.state_dtype).removeprefix("torch."),
            kv_dtype=own.kv_dtype,
            weights_bytes=own.weights_bytes,
            page_bytes=shape.page_bytes,
            slot_bytes=shape.slot_bytes,
            cache_bytes=sizes.num_bytes(shape),
            is_shared=isinstance(sizes, OneMemory),
            num_graphs=own.num_graphs,
            model_type=load_config(folder).model_type,
        ),
        runs_ahead=_runs_ahead(config, own.device),
        team=team,
    )


def build_rank(
    config: EngineConfig,
    ranks: Ranks,
    *,
    log: PlanLog | None = None,
    team: Team | None = None,
) -> RankParts:
    """What one rank runs with; `log` and `team` are told what its runner is told."""
    folder = _folder(config)
    device = _device(config.device, ranks.rank)
    if device.type == "cuda" and not ranks.is_alone:
        ranks = _reaching(ranks, device, team)
    model, whole = load_model(
        folder,
        dtype=_dtype(config, folder, device),
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        head=_head(config),
        quantization=config.quantization,
        max_model_len=config.max_model_len,
        ranks=ranks,
    )
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.pack()
    kv_dtype = _kv_dtype(config, model.dtype, whole)
    shape = _pool_shape(config, model, device, kv_dtype)
    fused = _fused(config, device, model, shape)
    sizes = _sizes(config, shape, device, fused.activations if fused else 0, ranks)
    cache = _cache(config, folder, shape, sizes, model.num_positions)
    max_model_len = _max_model_len(config, model, shape, cache.capacity)
    pools = sizes.allocate(shape, device)
    logger.info("cache: %s", sizes.describe(shape))
    num_requests = sizes.num_slots if shape.uses_slots else config.max_num_seqs
    executor = _executor(model, pools, fused, num_requests, max_model_len)
    runner = Runner(
        executor,
        pools,
        num_slots=sizes.num_slots,
        logs=[each for each in (log, team) if each is not None],
        accept=accept_of(config.speculative_config),
        wait=team.wait if team is not None else None,
    )
    return RankParts(
        model=model,
        weights_bytes=weights_bytes,
        device=device,
        shape=shape,
        sizes=sizes,
        cache=cache,
        max_model_len=max_model_len,
        kv_dtype="" if kv_dtype is None else str(kv_dtype).removeprefix("torch."),
        num_graphs=len(fused.captured) if fused else 0,
        runner=runner,
    )


def _reaching(ranks: Ranks, device: torch.device, team: Team | None) -> Ranks:
    """The same ranks, whose GPUs reach each other."""
    # Imported where it is used: machines without a GPU need not have what it needs.
    from milepost.parallel.gpu import GpuLink

    assert isinstance(ranks.link, GlooLink), "hosts reach each other first"
    index = device.index or 0
    torch.cuda.set_device(index)
    link = GpuLink(ranks.link, torch.device("cuda", index))
    if team is not None:
        team.closing.append(link.close)
    return replace(ranks, link=link)


def _folder(config: EngineConfig) -> Path:
    source = config.model or str(EMBEDDED_MODEL)
    has_weights = config.load_format != "dummy"
    return find_folder(source, revision=config.revision, with_weights=has_weights)


def _check_split(config: EngineConfig, folder: Path) -> None:
    """Raise what is wrong with so many ranks, before any of them starts."""
    device, size = _device(config.device), config.tensor_parallel_size
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size={size}: torch sees {torch.cuda.device_count()} GPUs here"
        )
    check_split(
        folder,
        dtype=_dtype(config, folder, device),
        load_format=config.load_format,
        head=_head(config),
        quantization=config.quantization,
        ranks=Ranks(size=size, splits_experts=config.enable_expert_parallel),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fused:
    """The steps that the fused kernels run."""

    largest: Capacity
    captured: list[Capacity]
    activations: int
    """Bytes that the largest takes besides weights and pools."""


def _fused(
    config: EngineConfig, device: torch.device, model: Decoder, shape: PoolShape
) -> _Fused | None:
    """Compile the fused kernels and run the largest step once; None where the reference kernels
    are to run.
    """
    if not _announce_kernels(config, device, model):
        return None
    limits = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_drafts": shape.num_drafts,
    }
    largest = largest_step(**limits)
    captured = [] if config.enforce_eager else ladder(**limits)
    try:
        activations = measure_activations(model, shape, largest, captured)
    except KernelError as error:
        logger.warning("kernels: reference, many times slower; of the fused ones %s", error)
        return None
    return _Fused(largest=largest, captured=captured, activations=activations)


def _cache(
    config: EngineConfig, folder: Path, shape: PoolShape, sizes: Sizes, num_positions: int
) -> Cache:
    return Cache(
        storage=sizes.storage(),
        page_size=config.page_size,
        kinds=_kinds(shape),
        identity=_identity(config, folder, shape, num_positions),
        mode=config.mamba_cache_mode if config.enable_prefix_caching else "none",
        block_size=config.mamba_block_size,
    )


def _kinds(shape: PoolShape) -> tuple[LayerKind, ...]:
    """Of the model's layers, for the cache."""
    kinds: list[LayerKind] = [FullAttention(page_bytes=shape.kv_bytes)]
    if shape.convolutions:
        kinds.append(ShortConvolution(grid=shape.page_size, page_bytes=shape.conv_bytes))
    if shape.uses_slots:
        kinds.append(Recurrent(grid=shape.grid, state_bytes=shape.slot_bytes))
    return tuple(kinds)


def _executor(
    model: Decoder, pools: Pools, fused: _Fused | None, num_requests: int, max_model_len: int
) -> Executor:
    if fused is None:
        return PlainExecutor(model, pools, num_requests=num_requests, max_model_len=max_model_len)
    executor = DeviceExecutor(
        model, pools, num_requests=num_requests, max_model_len=max_model_len, largest=fused.largest
    )
    if fused.captured:
        executor.capture(fused.captured)
    return executor


def _identity(config: EngineConfig, folder: Path, shape: PoolShape, num_positions: int) -> bytes:
    """Of the model as it is run here, for the keys of what it caches."""
    has_weights = config.load_format != "dummy"
    facts: dict[str, str | int] = {
        "dtype": str(shape.dtype),
        "quantization": config.quantization or "",
        "state_dtype": str(shape.state_dtype),
        "kv_dtype": str(shape.dtype_of_kv),
        "page_size": config.page_size,
        # The angles of some models depend on it.
        "num_positions": num_positions,
    }
    if not has_weights:
        facts["seed"] = config.seed
    if shape.carried_size:
        facts["head"] = "mtp"
    if config.tensor_parallel_size > 1:
        facts["ranks"] = config.tensor_parallel_size
    return identify(folder, has_weights=has_weights, facts=facts)


def _device_name(device: torch.device, num_ranks: int) -> str:
    times = f"{num_ranks} x " if num_ranks > 1 else ""
    if device.type == "cuda":
        return times + torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{times}CPU ({threads} thread{'s' * (threads != 1)})"


def _announce_kernels(config: EngineConfig, device: torch.device, model: Decoder) -> bool:
    """Say which kernels run and why not others; whether those for a GPU do."""
    allow_hopper_kernels(config.hopper_kernels)
    reason = why_plain(device, model.dtype, model.operations)
    is_unexpected = reason and device.type == "cuda"
    log = logger.warning if is_unexpected else logger.info
    log("kernels: %s", describe(device, model.dtype, model.operations))
    return not reason


def _runs_ahead(config: EngineConfig, device: torch.device) -> bool:
    """Steps overlap by default where the host would otherwise wait for the device."""
    return device.type == "cuda" if config.async_scheduling is None else config.async_scheduling


def _device(name: str, rank: int = 0) -> torch.device:
    """Of a rank: one GPU behind the other, from the named one on."""
    device = _named_device(name)
    if rank and device.type == "cuda":
        return torch.device("cuda", (device.index or 0) + rank)
    return device


def _named_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r}: use auto, cpu, cuda or cuda:0 ...") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: torch sees no CUDA device here; use device='cpu'")
    return device


def _num_lookahead_tokens(config: EngineConfig, model: Decoder) -> int:
    """What the head drafts behind a token has to fit page tables."""
    wanted = config.speculative_config
    return wanted.num_tokens if wanted is not None and model.mtp is not None else 0


def _head(config: EngineConfig) -> Head:
    """Whether the checkpoint's head is loaded: `auto` does so if it can."""
    methods = config.speculative_config.methods if config.speculative_config else ()
    return "mtp" if "mtp" in methods else "auto" if "auto" in methods else "none"


def _dtype(config: EngineConfig, folder: Path, device: torch.device) -> DType:
    """On a CPU half precision is slower and less exact than float32: `auto` avoids it there."""
    if config.dtype != "auto" or device.type != "cpu":
        return config.dtype
    own = resolve_dtype("auto", load_config(folder))
    return "float32" if own.itemsize < torch.float32.itemsize else "auto"


def _kv_dtype(
    config: EngineConfig, dtype: torch.dtype, whole: PreTrainedConfig
) -> torch.dtype | None:
    """Of keys and values; None: the model's."""
    asked = config.kv_cache_dtype
    if asked == "auto":
        return FP8 if has_fp8_kv(whole) else None
    if asked == "bfloat16":
        if dtype != torch.bfloat16:
            raise ConfigError(
                f"kv_cache_dtype='bfloat16' with a model in {str(dtype).removeprefix('torch.')}: "
                "use 'auto' for the model's own type, or 'fp8'"
            )
        return None
    return FP8


def _pool_shape(
    config: EngineConfig, model: Decoder, device: torch.device, kv_dtype: torch.dtype | None
) -> PoolShape:
    state_dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    if config.mamba_ssm_cache_dtype != "auto":
        state_dtype = resolve_dtype(config.mamba_ssm_cache_dtype, model.config)
    num_drafts = num_drafts_of(
        config.speculative_config,
        model.layer_specs,
        has_head=model.mtp is not None,
        is_fused=not why_plain(device, model.dtype, model.operations),
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
    )


def _sizes(
    config: EngineConfig, shape: PoolShape, device: torch.device, activations: int, ranks: Ranks
) -> Sizes:
    """What was asked for, and else what the memory of every rank has room for."""
    num_pages, num_slots = config.num_pages, config.num_slots if shape.uses_slots else 0
    if num_pages is not None and num_slots is not None:
        return TwoPools(num_pages=num_pages, num_slots=num_slots)
    budget = free_bytes(
        device,
        utilization=config.gpu_memory_utilization,
        activations=activations,
        cpu_cache_gib=config.cpu_cache_gib,
    )
    if device.type == "cuda":
        budget -= staging_bytes(config, shape)
    budget = ranks.least(budget - shape.record_bytes)
    may_share = num_pages is None and num_slots is None and config.cache_memory != "split"
    if may_share and (config.cache_memory == "shared" or device.type == "cuda"):
        one = share(budget, shape)
        if one is not None:
            return one
    if config.cache_memory == "shared":
        raise ConfigError(
            "cache_memory='shared': the model needs both kinds of layers, a state no smaller than "
            f"a page of {shape.page_size} tokens ({shape.slot_bytes} and {shape.page_bytes} bytes) "
            f"and room for {MIN_UNITS} of the larger; use 'auto' or 'split'"
        )
    sizes = split(budget, shape, max_num_seqs=config.max_num_seqs)
    num_slots = sizes.num_slots if num_slots is None else num_slots
    return TwoPools(num_pages=num_pages or sizes.num_pages, num_slots=num_slots)


def _max_model_len(config: EngineConfig, model: Decoder, shape: PoolShape, capacity: int) -> int:
    """The longest prompt plus answer: as asked, or what the model and the cache both hold, which is
    `capacity` tokens.
    """
    limit = model.num_positions
    asked = config.max_model_len
    if asked is None:
        return min(limit, capacity)
    if asked > limit:
        raise ConfigError(f"max_model_len={asked}: the model's own limit is {limit} positions")
    if asked > capacity:
        missing = (asked - capacity) / shape.page_size * shape.page_bytes / GIB
        halves = "" if shape.dtype_of_kv == FP8 else "use kv_cache_dtype='fp8' or more GPUs, "
        raise ConfigError(
            f"max_model_len={asked}: the cache holds {capacity} tokens, {missing:.3f} GiB are "
            f"missing for the rest; lower it, {halves}or raise num_pages, gpu_memory_utilization "
            "or cpu_cache_gib"
        )
    return asked
