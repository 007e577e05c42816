"""Weights of eight bits. In float8_e4m3fn: the official block format, compressed-tensors' scales
per channel and per tensor, and raw weights that are rounded as they are loaded. In int8: weights
whose activations are rounded to int8 too (W8A8), as compressed-tensors writes them.

Legend: O outputs, I inputs, X experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from milepost.errors import UnsupportedModelError
from milepost.kernels.products.forms.quantised import (
    BLOCK,
    FP8,
    FP8_MAX,
    Fp8,
    Int8,
    quantise_fp8,
)
from milepost.layers.experts import ExpertNames, Experts, ExpertSizes, shapes_of
from milepost.layers.parameters import ModuleScope
from milepost.layers.weight_slots import Rows, WeightSlot, WeightSlots
from milepost.layers.weights import Precision, Weight
from milepost.parallel import Axes

_INT8_MAX = 127
_FILLED_AT_ONCE = 2**26
"""Dummy values filled per launch: more than one expert has, as thousands of experts would each take
a launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Precision(Precision):
    """The scales that a checkpoint has."""

    strategy: Literal["block", "channel", "tensor", "none"]
    """One scale per 128 x 128 weights, per output or per projection. With `none`, the checkpoint is
    raw and is rounded in blocks."""
    scale: str = "weight_scale"
    """Name of the scales' tensor."""
    is_static: bool = False
    """Whether the checkpoint sets the scale of activations, as `input_scale`."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tensor names that mark a projection as this form: it has at least one of them."""
        return ("weight",) if self.strategy == "none" else (self.scale,)

    @property
    def has_blocks(self) -> bool:
        return self.strategy in ("block", "none")

    @property
    def matrix_type(self) -> type[Fp8Matrix]:
        return Fp8Matrix

    def stack(
        self, shape: tuple[int, ...], num_placed: int, scope: ModuleScope, *, rows: int = 0
    ) -> Fp8Matrix:
        """Returns unfilled matrices. `rows` outputs share a scale: by default those of a block, or
        one each if scales have no blocks."""
        rows = rows or (BLOCK if self.has_blocks else 1)
        return self.matrix_type(self, shape, num_placed, scope, rows=rows)

    def experts(self, sizes: ExpertSizes, names: ExpertNames, scope: ModuleScope) -> Fp8Experts:
        fits = sizes.size % BLOCK == 0 and sizes.hidden_size % BLOCK == 0
        shapes = shapes_of(sizes, names, self.unit_block)
        up, down = (self.stack(*each, scope, rows=0 if fits else 1) for each in shapes)
        return Fp8Experts(sizes, names, scope, up, down)

    @property
    def axes(self) -> dict[str, Axes]:
        """Axes of a projection's tensors. With blocks, ranks get whole blocks."""
        block = Axes((0, BLOCK), (1, BLOCK))
        scales = {"block": block, "channel": Axes((0, 1), None)}
        each = scales.get(self.strategy, Axes(None, None))
        return {"weight": Axes(), self.scale: each, "input_scale": Axes(None, None)}

    def count_scales(self, num_outputs: int) -> int:
        """Returns the number of scales that a projection has in the checkpoint along its
        outputs."""
        sizes = {"block": -(-num_outputs // BLOCK), "channel": num_outputs, "tensor": 1}
        return sizes[self.strategy]


class Fp8Matrix(Weight):
    """Values [..., O, I] with their scales."""

    dtype: ClassVar[torch.dtype] = FP8
    types: ClassVar[tuple[str, ...]] = ("F8_E4M3",)
    """Types that the values may have in a checkpoint."""

    def __init__(
        self,
        precision: Fp8Precision,
        shape: tuple[int, ...],
        num_placed: int,
        scope: ModuleScope,
        *,
        rows: int,
    ) -> None:
        super().__init__()
        self.precision, self.scope, self.axes = precision, scope, precision.axes
        self.num_placed, self.rows = num_placed, rows
        self.depth = BLOCK if precision.has_blocks else shape[-1]
        self.values = scope.empty(*shape, dtype=self.dtype)
        self.values.data.view(torch.uint8)[..., num_placed:] = 0
        self.scales = scope.ones(*self._scales_shape(), dtype=torch.float32)
        self.input_scale: nn.Parameter | None = None
        if precision.is_static:
            self.input_scale = scope.ones(*shape[:-2], dtype=torch.float32)
            self.input_scale.data.zero_()

    def _scales_shape(self) -> tuple[int, ...]:
        *stack, num_outputs, num_inputs = self.values.shape
        return (*stack, -(-num_outputs // self.rows), -(-num_inputs // self.depth))

    @property
    def form(self) -> Fp8 | Int8:
        return Fp8(
            values=self.values,
            scales=self.scales,
            rows=self.rows,
            depth=self.depth,
            input_scale=self.input_scale,
            order=self.scope.order,
        )

    def place_projection(
        self,
        rows: Rows,
        at: tuple[int, ...],
        path: str,  # noqa: ARG002
    ) -> WeightSlots:
        precision, num_inputs = self.precision, self.num_placed
        if self.rows == BLOCK and not rows.are_blocks_of(self.values.shape[-2]):
            self._part_blocks()
        shape = (rows.count, num_inputs)
        if precision.strategy == "none":
            return {"weight": WeightSlot(shape, partial(self._round, rows, at))}
        store = partial(self._store_values, rows, at)
        places = {"weight": WeightSlot(shape, store, types=self.types)}
        across = -(-num_inputs // BLOCK) if precision.has_blocks else 1
        down = precision.count_scales(rows.count)
        scales = (1,) if precision.strategy == "tensor" else (down, across)
        places[precision.scale] = WeightSlot(
            scales, partial(self._store_scales, rows, at, (down, across))
        )
        if precision.is_static:
            places["input_scale"] = WeightSlot((1,), partial(self._store_input_scale, at))
        return places

    def _part_blocks(self) -> None:
        """Switches to one scale per row, because a projection's blocks do not align with the
        matrix's."""
        self.rows = 1
        self.scales = self.scope.ones(*self._scales_shape(), dtype=torch.float32)

    def _store_values(self, rows: Rows, at: tuple[int, ...], values: Tensor) -> None:
        target = self.values.data.view(torch.uint8)[at][..., : self.num_placed]
        rows.put(target, values.view(torch.uint8))

    def _store_scales(
        self, rows: Rows, at: tuple[int, ...], shape: tuple[int, int], scales: Tensor
    ) -> None:
        """Stores `scales` of this `shape`; each applies to an equal number of the projection's
        outputs."""
        target, scales = self.scales.data[at], scales.view(shape)
        if self.rows == BLOCK:
            rows.blocks.put(target, scales)
            return
        rows_each = -(-rows.count // shape[0])
        rows_each = BLOCK if self.precision.has_blocks and rows_each > 1 else rows_each
        wide = scales.to(target.device, torch.float32)
        rows.put(target, wide.repeat_interleave(rows_each, 0)[: rows.count])

    def _round(self, rows: Rows, at: tuple[int, ...], raw: Tensor) -> None:
        values, scales = quantise_fp8(raw.to(self.values.device), self.rows)
        self._store_values(rows, at, values)
        target = self.scales.data[at]
        (rows.blocks if self.rows == BLOCK else rows).put(target, scales)

    def _store_input_scale(self, at: tuple[int, ...], tensor: Tensor) -> None:
        """Stores the largest input scale of the projections in one matrix, which read the same
        rows."""
        scale = self.input_scale
        assert scale is not None, "asked for where activations have one"
        value = tensor.to(scale.device, torch.float32).view(())
        scale.data[at] = torch.maximum(scale.data[at], value)

    def clear(self, first: int, count: int) -> None:
        self.values.data.view(torch.uint8)[..., first : first + count, :] = 0

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fills values uniformly."""
        largest = self._fill_values(generator)
        self.scales.data.fill_(spread * math.sqrt(3.0) / largest)
        if self.input_scale is not None:
            self.input_scale.data.fill_(0.05)

    def _fill_values(self, generator: torch.Generator) -> float:
        """Fills a part at a time, so that little memory is needed besides the stack; returns the
        largest value."""
        for values in self.values.data.view(-1).split(_FILLED_AT_ONCE):
            raw = torch.empty(values.shape, dtype=torch.float32, device=values.device)
            values.copy_(raw.uniform_(-FP8_MAX, FP8_MAX, generator=generator))
        return FP8_MAX


class Fp8Experts(Experts):
    """Experts of eight bits, which the checkpoint may stack."""

    can_be_stacked = True

    def placements(self) -> WeightSlots:
        name = self.names.stacked[0]
        assert isinstance(self.up, Fp8Matrix), "matrices of eight bits"
        if self.scope.has(name) and self.up.precision.strategy == "tensor":
            raise UnsupportedModelError(
                f"{self.scope.full(name)}: stacked experts have scales by block or by channel or "
                "none, not one for each tensor"
            )
        return super().placements()


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Precision(Fp8Precision):
    """Integers (`int-quantized`) whose tensors have the names and shapes of FP8's. Checkpoints may
    set the scale of activations; otherwise each token has its own, on several ranks that of the
    rank's part."""

    @property
    def matrix_type(self) -> type[Fp8Matrix]:
        return Int8Matrix


class Int8Matrix(Fp8Matrix):
    """Values [..., O, I] with a scale for each output."""

    dtype: ClassVar[torch.dtype] = torch.int8
    types: ClassVar[tuple[str, ...]] = ("I8",)

    @property
    def form(self) -> Int8:
        return Int8(
            values=self.values,
            scales=self.scales,
            input_scale=self.input_scale,
            order=self.scope.order,
        )

    def _fill_values(self, generator: torch.Generator) -> float:
        self.values.data.random_(-_INT8_MAX, _INT8_MAX + 1, generator=generator)
        return _INT8_MAX
