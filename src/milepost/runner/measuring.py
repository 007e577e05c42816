"""Measures the memory that steps take, before the pools are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt, prod
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from milepost.images import ImageSettings
from milepost.kernels.layout.batch import Capacity
from milepost.kernels.layout.emit import Emit
from milepost.kernels.platform.device import Chip
from milepost.layers.linear import Linear
from milepost.layers.moe import MoE
from milepost.layers.tower import Tower
from milepost.layers.tower_parts import TowerLayout
from milepost.models.decoder import Decoder
from milepost.runner.device import DeviceExecutor
from milepost.runner.pool_shape import PoolShape
from milepost.runner.pools import allocate
from milepost.runner.tower_graphs import graph_bytes, largest_kind

_SMALL_GRID = 1, 16, 16
"""Patches of a picture that is encoded with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """The steps that an engine compiles, measures and captures before its first one."""

    largest: Capacity
    captured: Sequence[Capacity]
    max_model_len: int
    """Length of the longest sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The bytes that steps take besides weights and pools."""

    largest: int = 0
    """Bytes of the largest step."""
    graphs: int = 0
    """Bytes of captured steps, which have memory of their own, and of their outputs."""
    sampling: int = 0
    tower: int = 0
    """Encoding the largest picture, beyond what steps have anyway."""
    under_way: int = 0
    """State of a picture that stays between the steps in which it is encoded."""
    tower_graphs: int = 0
    """Captured runs of the tower, with what they read and write."""
    encoded: int = 0
    """Pictures whose embeddings are kept."""

    @property
    def without_pictures(self) -> int:
        return self.largest + self.graphs + self.sampling

    @property
    def total(self) -> int:
        kept = self.tower_graphs + self.encoded
        return max(self.without_pictures + self.under_way, self.tower) + kept


def rehearsal(model: Decoder, shape: PoolShape, steps: FirstSteps) -> DeviceExecutor:
    """Returns an executor with tiny pools, to compile and measure `steps` with."""
    pools = allocate(shape, num_pages=1, num_slots=1, num_windows=1, device=model.embedding.device)
    return DeviceExecutor(
        model, pools, num_requests=1, max_model_len=steps.max_model_len, largest=steps.largest
    )


def compile_steps(executor: DeviceExecutor, steps: FirstSteps) -> None:
    """Compiles the kernels of all these steps and of the sizes between, which may use others.
    Raises KernelError if one does not run."""
    between = _uncaptured(steps.largest, steps.captured)
    executor.compile([steps.largest, *between, *steps.captured])


def measure_steps(executor: DeviceExecutor, steps: FirstSteps) -> StepBytes:
    """Measures the largest step, with a sequence of `max_model_len`, and the graphs."""
    captured, model = steps.captured, executor.model
    results = sum(each.num_sampled for each in captured) * model.vocab_size * model.dtype.itemsize
    largest_captured = max(captured, key=attrgetter("num_tokens"), default=None)
    return StepBytes(
        largest=executor.measure(steps.largest),
        graphs=results + (executor.measure(largest_captured) if largest_captured else 0),
        sampling=executor.num_sampling_bytes,
    )


def measure_tower(
    tower: Tower, settings: ImageSettings, *, joins: bool = False, captures: bool = False
) -> StepBytes:
    """Measures a vision tower's memory, besides its weights. Compiles its kernels, with `joins`
    also those for several pictures, and with `captures` those of the largest graph."""
    shapes, device = tower.shapes, tower.scope.device
    down = isqrt(settings.max_tokens)
    grid = 1, down * shapes.merge_size, settings.max_tokens // down * shapes.merge_size
    rows = torch.zeros(prod(grid), shapes.frame_bytes, dtype=torch.uint8, device=device)
    if joins:
        layout = tower.lay_out([_SMALL_GRID], is_fixed=True)
        _measure_run(tower, rows[: prod(_SMALL_GRID)], layout)
    largest = _measure_run(tower, rows, tower.lay_out([grid]))
    return StepBytes(
        tower=largest.peak + rows.nbytes,
        under_way=largest.held,
        tower_graphs=_measure_graphs(tower) if captures else 0,
    )


def _measure_graphs(tower: Tower) -> int:
    kind = largest_kind(tower)
    layout, device = tower.lay_out(kind.grids), tower.scope.device
    rows = torch.zeros(kind.num_patches, kind.row_bytes, dtype=torch.uint8, device=device)
    return graph_bytes(tower, _measure_run(tower, rows, layout).peak, layout)


class _RunBytes(NamedTuple):
    peak: int
    held: int
    """Bytes that stay between two blocks."""


def _measure_run(tower: Tower, rows: Tensor, layout: TowerLayout) -> _RunBytes:
    """Measures a block of each kind and the layers around the blocks, since each block reuses the
    memory of the one before."""
    device, dtype = rows.device, tower.scope.dtype
    table = torch.zeros(tower.shapes.num_channels, 256, dtype=dtype, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run = tower.begin(rows, table, layout)
    for number in tower.one_of_each_kind():
        tower.advance(run, number, number + 1)
    tower.end(run)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device) - before
    return _RunBytes(peak + layout.num_bytes, run.num_bytes)


def _uncaptured(largest: Capacity, captured: Sequence[Capacity]) -> Iterator[Capacity]:
    """Yields steps that no graph covers, one for each choice of kernels by size. The last has one
    sequence and no drafts, since other kernels verify drafts."""
    num_tokens = max((each.num_tokens for each in captured), default=largest.num_sequences)
    while 3 * num_tokens // 2 < largest.num_tokens:
        # Kernels for experts change within a factor of two.
        yield replace(largest, num_tokens=3 * num_tokens // 2)
        num_tokens *= 2
        if num_tokens < largest.num_tokens:
            yield replace(largest, num_tokens=num_tokens)
    yield replace(largest, num_sequences=1, num_drafts=0)


_LAUNCH_S = 0.85e-3
"""Time to launch a layer: 0.4 to 1.5 ms on the measured hosts."""
_FLOPS = ((9, 0), 4e12), ((8, 0), 1.5e12), ((0, 0), 2e12)
"""FLOPS of one SM in a whole 16-bit prefill, by lowest compute capability. The last row is for AMD.
An H200 reaches 2.6e12 to 5e12."""


def most_launched_tokens(model: Decoder, chip: Chip) -> int:
    """Returns the number of tokens up to which a prefill is bound by its launches: launching its
    kernels takes as long as running them, or longer.

    A rule of thumb instead of a measurement, so that it is the same on every machine with such a
    chip and on every rank: the choice of steps that are graphs decides how their sums are rounded.
    """
    flops = next(rate for capability, rate in _FLOPS if chip.capability >= capability)
    return int(len(model.layers) * _LAUNCH_S * chip.num_sms * flops / (2 * num_weights(model)))


def num_weights(model: Decoder) -> float:
    """Counts the weights of layers that a token is multiplied by on this rank, at least 1; FP8 by
    FP8 counts half, as it takes half as long."""
    modules = (module for layer in model.layers for module in layer.modules())
    return max(sum(map(_of_module, modules)), 1)


def _of_module(module: nn.Module) -> float:
    if isinstance(module, MoE):
        return module.num_weights / (1 if module.experts.reads is Emit.VALUES else 2)
    if isinstance(module, Linear):
        return module.num_weights / (1 if module.reads is Emit.VALUES else 2)
    return 0
