"""Builds an engine from its configuration: model, tokenizer, pools, cache, scheduler, runner.

Everything that can be wrong with a configuration and a checkpoint is found here, before the first
request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from milepost.config import EngineConfig
from milepost.engine.assembly.auto import (
    device_of,
    folder_of,
    load_options_of,
    runs_ahead,
)
from milepost.engine.assembly.bitwise import refuse_settings
from milepost.engine.assembly.images import image_facts, tower_cost
from milepost.engine.assembly.rank import RankParts, build_rank
from milepost.engine.assembly.team import Team
from milepost.engine.assembly.tiering import RankTierState
from milepost.engine.constraints import think_ids
from milepost.engine.facts import Facts
from milepost.engine.media import ImageFacts
from milepost.engine.off_device import PoolAccess
from milepost.engine.text import end_token_ids, load_tokenizer, sampling_defaults, within_vocabulary
from milepost.engine.validation import Limits
from milepost.errors import ConfigError
from milepost.layers.rotary import num_positions, run_up_to
from milepost.models.decoder import Decoder
from milepost.models.early import check_length
from milepost.models.loading import LoadOptions, check_quantization, check_split
from milepost.models.quantization import has_fp8_kv
from milepost.models.registry import load_config
from milepost.parallel import ALONE, Ranks
from milepost.runner.pool_sizes import OneMemory
from milepost.runner.recording import PlanLog
from milepost.runner.runner import Runner
from milepost.scheduler.scheduler import Scheduler
from milepost.speculative import Speculation, speculation_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts that an engine runs on."""

    scheduler: Scheduler
    runner: Runner
    tokenizer: PreTrainedTokenizerBase | None
    end_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, int | float]
    """Fields of SamplingParams for requests that do not set them."""
    limits: Limits
    """Limits that requests are validated against."""
    facts: Facts
    speculation: Speculation | None = None
    """None where nothing is drafted."""
    tier_state: RankTierState | None = None
    """This rank's part of the tiers; None without tiers."""
    images: ImageFacts | None = None
    """How images enter prompts; None for a model that takes none."""
    runs_ahead: bool = False
    """Whether a step is launched before the tokens of the one before are read."""
    team: Team | None = None
    """The other ranks, if there are any."""
    access: PoolAccess | None = None
    """Gives other engines access to this rank's pools; None if nothing is exchanged."""


def build(config: EngineConfig) -> EngineParts:
    """Loads and allocates everything. Raises ConfigError, UnsupportedModelError and
    WeightsError."""
    folder = folder_of(config)
    _check_settings(config, folder)
    tokenizer = None
    if not config.skip_tokenizer_init:
        source = config.tokenizer or folder
        tokenizer = load_tokenizer(source, config.revision, config.download_dir, config.hf_token)
    log = PlanLog(config.record_plans, config) if config.record_plans else None
    team = Team(config) if config.tensor_parallel_size > 1 else None
    try:
        rank = build_rank(config, ALONE if team is None else team.ranks, log=log, team=team)
    except Exception as error:
        if team is None:
            raise
        # What another rank could not do says more than that it did not answer.
        raise team.reason(error) from None
    if team is not None:
        team.expect_prompt_answers()
    model = rank.model
    ends = within_vocabulary(end_token_ids(folder, tokenizer, config.overrides), model.vocab_size)
    scheduler = Scheduler(
        rank.cache,
        max_num_seqs=rank.config.max_num_seqs,
        max_num_batched_tokens=rank.config.step_tokens(),
        encoder_cache_size=rank.config.encoder_cache_size or 0,
        tower_cost=tower_cost(model),
        num_lookahead_tokens=_num_lookahead_tokens(config, model),
        max_queue_wait_s=config.max_queue_wait_s,
    )
    return EngineParts(
        scheduler=scheduler,
        runner=rank.runner,
        tier_state=rank.tier_state,
        speculation=speculation_of(
            config.speculative_config,
            scheduler,
            rank.shape.num_drafts,
            has_head=model.mtp is not None,
        ),
        tokenizer=tokenizer,
        end_token_ids=ends,
        sampling_defaults=sampling_defaults(folder, config.generation_config),
        limits=Limits.of(
            config,
            vocab_size=model.vocab_size,
            max_model_len=rank.max_model_len,
            closes_reasoning=think_ids(tokenizer)[1] is not None,
            has_tower=model.tower is not None,
        ),
        facts=_facts(config, rank),
        images=(
            image_facts(config, folder, rank.whole, tokenizer) if model.tower is not None else None
        ),
        runs_ahead=runs_ahead(config, rank.runner.pools.device),
        team=team,
        access=rank.access,
    )


def _check_settings(config: EngineConfig, folder: Path) -> None:
    """Raises the errors that can be found from settings and `config.json` alone, before anything is
    loaded."""
    refuse_settings(config)
    whole = load_config(folder, config.overrides)
    text = whole.get_text_config()
    run_up_to(text, config.max_model_len)
    check_length(config.max_model_len, num_positions(text))
    if config.kv_cache_dtype == "auto":
        has_fp8_kv(whole)
    sampling_defaults(folder, config.generation_config)
    if config.kv_transfer_config is not None and not config.kv_transfer_config.exchange.peers:
        logger.warning(
            "kv_transfer_config lists no peers, so nothing is exchanged: add their addresses or "
            'networks, as in "kv_connector_extra_config": {"peers": ["10.0.0.0/24"]}'
        )
    if config.tensor_parallel_size > 1:
        _check_split(config, folder)
    else:
        asked = LoadOptions(
            quantization=config.quantization, fp4_activations=config.fp4_activations
        )
        check_quantization(whole, asked)


def _check_split(config: EngineConfig, folder: Path) -> None:
    """Raises ConfigError for a number of ranks that the model does not allow, before any starts."""
    device, size = device_of(config.device), config.tensor_parallel_size
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size={size}: torch sees {torch.cuda.device_count()} GPUs here"
        )
    ranks = Ranks(size=size, splits_experts=config.enable_expert_parallel)
    check_split(folder, load_options_of(config, folder, device, ranks))


def _facts(config: EngineConfig, rank: RankParts) -> Facts:
    shape = rank.shape
    return Facts(
        device=_device_name(rank.runner.pools.device, config.tensor_parallel_size),
        dtype=str(shape.dtype).removeprefix("torch."),
        state_dtype=str(shape.state_dtype).removeprefix("torch."),
        kv_dtype="" if shape.kv_dtype is None else str(shape.kv_dtype).removeprefix("torch."),
        weights_bytes=rank.weights_bytes,
        page_bytes=shape.page_bytes,
        slot_bytes=shape.state_bytes,
        cache_bytes=rank.sizes.num_bytes(shape),
        is_shared=isinstance(rank.sizes, OneMemory),
        num_graphs=rank.num_graphs,
        fingerprint=f"bitwise-{rank.cache.identity.hex()}" if config.batch_invariant else "",
        model_type=rank.whole.model_type,
        num_positions=rank.model.num_positions,
        step_tokens=rank.config.step_tokens(),
    )


def _device_name(device: torch.device, num_ranks: int) -> str:
    times = f"{num_ranks} x " if num_ranks > 1 else ""
    if device.type == "cuda":
        return times + torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{times}CPU ({threads} thread{'s' * (threads != 1)})"


def _num_lookahead_tokens(config: EngineConfig, model: Decoder) -> int:
    """Returns by how many tokens page tables must reach ahead, for the drafts that the head makes
    after a token."""
    wanted = config.speculative_config
    return wanted.num_tokens if wanted is not None and model.mtp is not None else 0
