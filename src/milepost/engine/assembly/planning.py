"""Sizes an engine without a GPU: what its weights, steps and cache would take, and what fits.

The model is an outline, and its steps run on torch's device `meta` for a chip that the process
pretends to have. Everything else is what a start does (`fitting`, `sizing`), so there is no second
estimate. Only what the driver keeps is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from unittest import mock

import torch

from milepost.config import EngineConfig
from milepost.engine.assembly.auto import folder_of, load_options_of
from milepost.engine.assembly.bitwise import refuse_settings
from milepost.engine.assembly.fitting import RankModel, bytes_of, fit_steps
from milepost.engine.assembly.images import image_settings_of
from milepost.engine.assembly.sizing import max_model_len_of, sizes_of
from milepost.errors import ConfigError
from milepost.kernels.platform.device import hopper_kernels
from milepost.kernels.platform.pretending import Meter, launching_nothing
from milepost.models.loading import META, outline
from milepost.models.room import TOWER
from milepost.runner.measuring import FirstSteps, StepBytes, rehearsal
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pool_sizes import GIB, LAUNCHES_BYTES, Sizes

DRIVER_BYTES = 3 * GIB // 4
"""Assumed bytes of a GPU used by the driver and the context of a process."""
GPU = torch.device("cuda", 0)
"""The device that a process pretends to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of one GPU, or of each of several, as an engine would divide it."""

    config: EngineConfig
    gpu_bytes: int
    weights: Mapping[tuple[str, str], int]
    """Bytes by part and form."""
    shape: PoolShape
    steps: FirstSteps
    step_bytes: StepBytes
    num_positions: int
    """Length of the longest sequence that the model supports."""
    sizes: Sizes | None
    """None if nothing is left for pools."""
    max_model_len: int
    """Length of the longest prompt plus answer that fits; 0 if none does."""
    refused: str
    """Why an engine would not start; empty if it would."""

    @property
    def weights_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def unused_bytes(self) -> int:
        """Bytes that `gpu_memory_utilization` leaves to others."""
        return int(self.gpu_bytes * (1 - self.config.gpu_memory_utilization))

    @property
    def cache_bytes(self) -> int:
        """Bytes of all pages and slots."""
        return 0 if self.sizes is None else self.sizes.num_bytes(self.shape)

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's KV."""
        return self.shape.page_bytes / self.shape.page_size

    def items(self) -> Iterator[tuple[str, int]]:
        """Yields each use of memory with its bytes. Together they add up to the GPU's memory."""
        steps = self.steps.largest
        yield "weights", self.weights_bytes
        yield f"a step of {steps.num_tokens:,} tokens", self.step_bytes.largest
        yield f"CUDA graphs of {len(self.steps.captured)} steps", self.step_bytes.graphs
        yield "sampling", self.step_bytes.sampling
        kept = f"pictures, {self.config.encoder_cache_size or 0:,} tokens kept encoded"
        yield kept, self.step_bytes.total - self.step_bytes.without_pictures
        yield "records of drafts", self.shape.record_bytes
        yield "launches, reserved", LAUNCHES_BYTES
        yield "driver, assumed", DRIVER_BYTES
        yield "left to others", self.unused_bytes
        yield "cache: KV and states", self.cache_bytes

    def num_chats(self, num_tokens: int) -> int:
        """Number of chats with `num_tokens` each whose KV and states the cache holds at once."""
        if self.sizes is None:
            return 0
        return self.sizes.num_sequences(-(-num_tokens // self.shape.page_size))


def outline_of(config: EngineConfig) -> RankModel:
    """Returns the first rank's part of a model. Raises the errors of `load_model`."""
    # Imported here because machines without a GPU need not have what links between them need.
    from milepost.parallel.absent import first_of

    folder = folder_of(replace(config, load_format="dummy"))
    ranks = first_of(
        config.tensor_parallel_size,
        splits_experts=config.enable_expert_parallel,
        batch_invariant=config.batch_invariant,
    )
    options = load_options_of(config, folder, GPU, ranks)
    model, whole = outline(folder, replace(options, device=META))
    settings = image_settings_of(config, folder, whole) if model.tower is not None else None
    return RankModel(model=model, whole=whole, ranks=ranks, settings=settings)


class MemoryPlanner:
    """Plans the memory of models. Measurements are remembered, so planning for further memory sizes
    costs little."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._outlines: dict[str, RankModel] = {}
        self._measured: dict[str, StepBytes] = {}

    def plan(self, config: EngineConfig, gpu_bytes: int) -> MemoryPlan:
        """Returns how `gpu_bytes` are divided on each GPU. Raises ConfigError and
        UnsupportedModelError for configurations that no amount of memory could make work."""
        refuse_settings(config)
        with hopper_kernels(config.hopper_kernels), launching_nothing(), torch.inference_mode():
            part = self._outline(config)
            fitted = fit_steps(config, part, GPU, gpu_bytes)
            config, shape, steps = fitted.config, fitted.shape, fitted.steps
            free = gpu_bytes - DRIVER_BYTES - sum(part.weights.values())
            # Of a model that does not fit anyway, nobody asks what its steps take.
            none = StepBytes()
            step_bytes = self._measure(config, part, shape, steps) if free > 0 else none
        sizes, length, refused = None, 0, ""
        try:
            with mock.patch("torch.cuda.mem_get_info", return_value=(free, gpu_bytes)):
                sizes = sizes_of(config, shape, GPU, step_bytes.total, part.ranks)
            capacity = sizes.storage().max_pages * shape.page_size
            length = min(capacity, part.model.num_positions)
            max_model_len_of(config, part.model, shape, capacity)
        except ConfigError as error:
            refused = str(error)
        return MemoryPlan(
            config=config,
            gpu_bytes=gpu_bytes,
            weights=part.weights,
            shape=shape,
            steps=steps,
            step_bytes=step_bytes,
            num_positions=part.model.num_positions,
            sizes=sizes,
            max_model_len=length,
            refused=refused,
        )

    def _outline(self, config: EngineConfig) -> RankModel:
        key = repr(config)
        if key not in self._outlines:
            self._outlines[key] = outline_of(config)
        return self._outlines[key]

    def _measure(
        self, config: EngineConfig, part: RankModel, shape: PoolShape, steps: FirstSteps
    ) -> StepBytes:
        key = f"{config} {steps}"
        if key not in self._measured:
            with self._meter:
                self._meter.leave_out(part.model.parameters())
                executor = rehearsal(part.model, shape, steps)
                self._measured[key] = bytes_of(config, part, executor, steps)
        return self._measured[key]


def changes(config: EngineConfig, plan: MemoryPlan) -> Iterator[tuple[str, EngineConfig]]:
    """Yields settings that may leave more room, each as a flag and the configuration with it."""
    is_raw = {"fp8", "int4", "fp4"}.isdisjoint(form for _, form in plan.weights)
    has_tower = any(part == TOWER for part, _ in plan.weights)
    if config.quantization is None and is_raw:
        yield "--quantization fp8", replace(config, quantization="fp8")
    if plan.shape.kv_dtype is None:
        yield "--kv-cache-dtype fp8", replace(config, kv_cache_dtype="fp8")
    if has_tower:
        yield "--language-model-only", replace(config, language_model_only=True)
    if config.gpu_memory_utilization < _MOST:
        flag = f"--gpu-memory-utilization {_MOST}"
        yield flag, replace(config, gpu_memory_utilization=_MOST)
    if config.speculative_config is not None:
        yield "no --speculative-config", replace(config, speculative_config=None)
    size = 2 * config.tensor_parallel_size
    yield f"-tp {size}", replace(config, tensor_parallel_size=size)


_MOST = 0.95
"""Largest `gpu_memory_utilization` that is suggested."""
