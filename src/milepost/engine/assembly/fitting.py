"""Fits a model into a device's memory: the steps that run there, what they take, and the pools.

The model may be an outline, on torch's device `meta`: then everything is sized without a GPU, by
the same code (see `planning`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from transformers import PreTrainedConfig

from milepost.config import EngineConfig
from milepost.engine.assembly.auto import kv_dtype_of
from milepost.engine.assembly.bitwise import refuse_states
from milepost.engine.assembly.images import token_bytes_of, with_encoder_cache
from milepost.engine.assembly.sizing import pool_shape, sizes_of
from milepost.errors import KernelError
from milepost.images import ImageSettings
from milepost.kernels.attention.table import MOST_CAPTURED_TOKENS, most_copied
from milepost.kernels.platform.device import Chip, describe, probe, why_reference
from milepost.kernels.platform.tensors import FP8
from milepost.models.decoder import Decoder
from milepost.models.room import available_bytes, weigh
from milepost.parallel import Ranks
from milepost.runner.device import DeviceExecutor
from milepost.runner.graphs import ladder, largest_step
from milepost.runner.measuring import (
    FirstSteps,
    StepBytes,
    compile_steps,
    measure_steps,
    measure_tower,
    most_launched_tokens,
    rehearsal,
)
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pool_sizes import GIB, Sizes

logger = logging.getLogger(__name__)

_LEAST_TOKENS, _MOST_TOKENS = 2048, 8192
"""Bounds of a step's token budget, if none is set."""
_LEAST_SEQS = 8
"""Number of sequences that steps are made for at least."""
_KEY_AND_VALUE = 2
"""Rows of a token in pages that are no latents and have no index."""


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """One rank's part of a model, loaded or in outline, and what else its size depends on."""

    model: Decoder
    whole: PreTrainedConfig
    """The checkpoint's whole configuration."""
    ranks: Ranks
    settings: ImageSettings | None
    """How images become patches; None without a tower."""

    @cached_property
    def weights(self) -> Mapping[tuple[str, str], int]:
        """Bytes by part and form."""
        return weigh(self.model)

    def measure_tower(self, config: EngineConfig) -> StepBytes:
        """Measures the vision tower, for which its kernels are compiled; zeros without one."""
        if self.model.tower is None or self.settings is None:
            return StepBytes()
        return measure_tower(
            self.model.tower,
            self.settings,
            joins=config.encode_images_together,
            captures=not config.enforce_eager,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The steps and pools of a device beside the weights, and their memory."""

    config: EngineConfig
    """The configuration, with limits of a step that fit the device."""
    shape: PoolShape
    steps: FirstSteps | None
    """None where the reference kernels run."""
    step_bytes: StepBytes
    sizes: Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSteps:
    """The first steps on a device, and what they are laid out by."""

    config: EngineConfig
    """The configuration, with limits of a step that fit the device."""
    shape: PoolShape
    steps: FirstSteps


def fit(config: EngineConfig, part: RankModel, device: torch.device) -> Fit:
    """Compiles the kernels of a rank's part of the model, measures its steps and sizes its pools.
    Raises ConfigError for more than there is memory for."""
    model = part.model
    shape = _shape_of(config, part, device)
    steps, step_bytes = None, StepBytes()
    is_fused = _announce_kernels(device, model)
    if not is_fused or device.type != "cuda":
        config = with_encoder_cache(config, model, part.settings, available_bytes(device) or 0)
    if is_fused:
        fitted = fit_steps(config, part, device, _total_bytes(device))
        config, shape, steps = fitted.config, fitted.shape, fitted.steps
        try:
            step_bytes = _compiled(config, part, shape, steps)
        except KernelError as error:
            logger.warning("kernels: reference, many times slower; of the fused ones %s", error)
            steps = None
    sizes = sizes_of(config, shape, device, step_bytes.total, part.ranks)
    return Fit(config=config, shape=shape, steps=steps, step_bytes=step_bytes, sizes=sizes)


def fit_steps(
    config: EngineConfig, part: RankModel, device: torch.device, gpu_bytes: int
) -> FittedSteps:
    """Returns the steps that suit a GPU of `gpu_bytes` in the room beside the weights. Raises
    ConfigError."""
    room = part.ranks.least(_room_of(config, gpu_bytes, part.model.num_bytes))
    config = _limited(config, _shape_of(config, part, device), room)
    config = with_encoder_cache(config, part.model, part.settings, room)
    shape = _shape_of(config, part, device)
    steps = _steps_of(config, part, shape, device, room)
    return FittedSteps(config=config, shape=shape, steps=steps)


def _shape_of(config: EngineConfig, part: RankModel, device: torch.device) -> PoolShape:
    """Returns the shapes of a page and a slot on the device. Raises ConfigError."""
    model = part.model
    shape = pool_shape(config, model, device, kv_dtype_of(config, model.dtype, part.whole))
    reason = why_reference(device, model.dtype, model.operations)
    refuse_states(config, shape, is_fused=not reason)
    return shape


def _room_of(config: EngineConfig, total_bytes: int, weights_bytes: int) -> int:
    """Returns the bytes of a GPU available besides the weights. The result is the same at every
    start, whatever else uses the GPU."""
    return max(int(total_bytes * config.gpu_memory_utilization) - weights_bytes, 0)


def _total_bytes(device: torch.device) -> int:
    """Returns a GPU's memory in bytes. Other devices count as unlimited, since their pool sizes are
    configured."""
    if device.type != "cuda":
        return sys.maxsize
    return torch.cuda.get_device_properties(device).total_memory


def _limited(config: EngineConfig, shape: PoolShape, room: int) -> EngineConfig:
    """Returns the configuration with limits of a step that suit the room beside the weights: about
    a fifth of it at most for the largest step, and no more sequences than have states there."""
    tokens = config.step_tokens(_tokens_for(room))
    cache_room = config.kv_cache_memory_bytes or room
    num_states = max(cache_room // max(shape.state_bytes, 1), _LEAST_SEQS)
    return replace(
        config,
        max_num_batched_tokens=tokens,
        max_num_seqs=min(config.max_num_seqs, num_states),
    )


def _tokens_for(room: int) -> int:
    """Returns a power of two: at most 768 tokens for each GiB, which take about a fifth of it."""
    wanted = max(768 * room // GIB, 1)
    return max(_LEAST_TOKENS, min(_MOST_TOKENS, 1 << (wanted.bit_length() - 1)))


def _steps_of(
    config: EngineConfig, part: RankModel, shape: PoolShape, device: torch.device, room: int
) -> FirstSteps:
    """Returns the steps that the fused kernels run first. The longest sequence is no longer than
    its KV has room for."""
    limits = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.step_tokens(),
        "num_drafts": shape.num_drafts,
    }
    model, most_launched = part.model, 0
    if not copies_pages(shape, probe(device)):
        most_launched = part.ranks.least(most_launched_tokens(model, probe(device)))
    return FirstSteps(
        largest=largest_step(**limits),
        captured=[] if config.enforce_eager else ladder(**limits, most_launched=most_launched),
        max_model_len=min(
            config.max_model_len or model.num_positions,
            model.num_positions,
            _most_tokens(config, shape, room),
        ),
    )


def copies_pages(shape: PoolShape, chip: Chip) -> bool:
    """Returns whether steps of many tokens copy FP8 pages to 16 bits: a graph of such a step would
    hold as many as there may be."""
    most, page_size = MOST_CAPTURED_TOKENS, shape.page_size
    return shape.dtype_of_kv == FP8 and any(
        spec.rows_each != _KEY_AND_VALUE
        or most_copied(spec.num_kv_heads, spec.head_dim, page_size, most, chip) > 0
        for spec in shape.attention
    )


def _compiled(
    config: EngineConfig, part: RankModel, shape: PoolShape, steps: FirstSteps
) -> StepBytes:
    """Compiles and measures the steps, and keeps none of the memory that this takes."""
    executor = rehearsal(part.model, shape, steps)
    compile_steps(executor, steps)
    return bytes_of(config, part, executor, steps)


def _most_tokens(config: EngineConfig, shape: PoolShape, room: int) -> int:
    """Returns a bound on the tokens whose KV the cache may hold."""
    cache_room = config.kv_cache_memory_bytes or room
    num_pages = config.num_pages or max(cache_room // max(shape.page_bytes, 1), 1)
    return num_pages * shape.page_size


def bytes_of(
    config: EngineConfig, part: RankModel, executor: DeviceExecutor, steps: FirstSteps
) -> StepBytes:
    """Measures the steps, and the vision tower if there is one."""
    found = measure_steps(executor, steps)
    if part.model.tower is None or part.settings is None:
        return found
    return replace(
        part.measure_tower(config),
        largest=found.largest,
        graphs=found.graphs,
        sampling=found.sampling,
        encoded=(config.encoder_cache_size or 0) * token_bytes_of(part.model),
    )


def _announce_kernels(device: torch.device, model: Decoder) -> bool:
    """Logs which kernels run, and why others do not. Returns whether the GPU kernels run."""
    reason = why_reference(device, model.dtype, model.operations)
    is_unexpected = reason and device.type == "cuda"
    log = logger.warning if is_unexpected else logger.info
    log("kernels: %s", describe(device, model.dtype, model.operations))
    return not reason
