"""Weights of four bits that are floats: NVFP4 as compressed-tensors and ModelOpt write it, and
compressed-tensors' MXFP4 (see `kernels.products.forms.quantised.Fp4`).

Scales of activations, meant for chips that round activations to four bits too, are ignored unless
activations are to be rounded (`kernels.products.forms.w4a4.W4A4`).

Legend: O outputs, I inputs, G groups of inputs, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from milepost.errors import ConfigError
from milepost.kernels.products.forms.quantised import BLOCK, FP8, Fp4, pack
from milepost.kernels.products.forms.w4a4 import W4A4
from milepost.layers.parameters import ModuleScope
from milepost.layers.weight_slots import FLOATS, Rows, WeightSlot, WeightSlots
from milepost.layers.weights import Precision, Weight, refuse_inputs
from milepost.parallel import Axes

_MX_GROUP = 32
_BYTES = ("U8",)
_LARGEST = 8
"""Exponent of the power of two that a row's largest MXFP4 scale is stored as, near the top of
float8's range."""
_MX_BIAS = 127
_SPREAD = (68.5 / 8) ** 0.5
"""Standard deviation of dummy numbers: all sixteen values are equally frequent."""
_DUMMY_FACTOR = 2.0**-8
"""Factor of dummy activations' scales: numbers up to 10 have scales of float8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Precision(Precision):
    """Names of a checkpoint's four-bit float tensors, and the kind of their scales."""

    maker: Literal["compressed-tensors", "modelopt"]
    group: Literal[16, 32] = 16
    """Inputs that share a scale: 16 in NVFP4, with float8 scales and one factor for all of them; 32
    in MXFP4, with powers of two."""
    rounds: bool = False
    """Whether activations are rounded too."""

    @property
    def values(self) -> str:
        """Name of the tensor with the numbers."""
        return "weight" if self.maker == "modelopt" else "weight_packed"

    @property
    def factor(self) -> str:
        """Name of the tensor that all scales are multiplied or divided by."""
        return "weight_scale_2" if self.maker == "modelopt" else "weight_global_scale"

    @property
    def of_inputs(self) -> str:
        """Name of the tensor with the activations' scale."""
        return "input_scale" if self.maker == "modelopt" else "input_global_scale"

    @property
    def markers(self) -> tuple[str, ...]:
        """Tensor names that mark a projection as this form: it has at least one of them."""
        return (self.factor if self.maker == "modelopt" else self.values,)

    def stack(self, shape: tuple[int, ...], num_placed: int, scope: ModuleScope) -> Fp4Matrix:
        return Fp4Matrix(self, shape, num_placed, scope)

    @property
    def axes(self) -> dict[str, Axes]:
        """Axes of a projection's tensors. Ranks get whole groups."""
        return {
            self.values: Axes((0, 1), (1, 2)),
            "weight_scale": Axes((0, 1), (1, self.group)),
            self.factor: Axes(None, None),
            self.of_inputs: Axes(None, None),
        }


class Fp4Matrix(Weight):
    """Numbers [..., O, J / 2] with scales and factors. J is I rounded up to whole blocks."""

    def __init__(
        self,
        precision: Fp4Precision,
        shape: tuple[int, ...],
        num_placed: int,
        scope: ModuleScope,
    ) -> None:
        super().__init__()
        *rows, num_inputs = shape
        self.precision, self.scope, self.axes = precision, scope, precision.axes
        self.num_inputs, self.num_placed = num_inputs, num_placed
        if num_placed % precision.group:
            refuse_inputs(num_placed, f"are not whole groups of {precision.group}", scope)
        padded = -(-num_inputs // BLOCK) * BLOCK
        self.packed = scope.empty(*rows, padded // 2, dtype=torch.uint8)
        self.packed.data.zero_()
        self.scales = scope.empty(*rows, padded // precision.group, dtype=FP8)
        self.scales.data.view(torch.uint8).zero_()
        self.factors = scope.ones(*rows, dtype=torch.float32)
        self.input_factor: nn.Parameter | None = None
        if precision.rounds:
            self.input_factor = scope.ones(dtype=torch.float32)
            self.input_factor.data.fill_(float(precision.group == _MX_GROUP))

    @property
    def form(self) -> Fp4:
        parts: dict[str, Any] = {
            "packed": self.packed,
            "scales": self.scales,
            "factors": self.factors,
            "group": self.precision.group,
            "num_inputs": self.num_inputs,
            "order": self.scope.order,
        }
        if self.input_factor is None:
            return Fp4(**parts)
        return W4A4(input_factor=self.input_factor, **parts)

    def place_projection(self, rows: Rows, at: tuple[int, ...], path: str) -> WeightSlots:
        precision, count, is_mx = self.precision, rows.count, self.precision.group == _MX_GROUP
        numbers, groups = (count, self.num_placed // 2), (count, self.num_placed // precision.group)
        store = partial(self._store_powers if is_mx else self._store_scales, rows, at)
        types = _BYTES if is_mx else ("F8_E4M3",)
        places = {
            precision.values: WeightSlot(
                numbers, partial(self._store_numbers, rows, at), types=_BYTES
            ),
            "weight_scale": WeightSlot(groups, store, types=types),
        }
        if not is_mx:
            store = partial(self._store_factor, rows, at)
            places[precision.factor] = WeightSlot((1,), store, types=("F32",))
        if f"{path}.{precision.of_inputs}" in self.scope.names:
            is_read = precision.rounds and not is_mx
            keep = self._store_input_factor if is_read else len
            places[precision.of_inputs] = WeightSlot((1,), keep, types=FLOATS)
        elif precision.rounds and not is_mx and self.scope.names:
            raise ConfigError(
                f"fp4_activations: {path} has no {precision.of_inputs}; leave the option out"
            )
        return places

    def _store_numbers(self, rows: Rows, at: tuple[int, ...], pairs: Tensor) -> None:
        """Stores numbers. Two adjacent inputs share a byte; the first is its low half."""
        pairs = pairs.to(self.packed.device)
        q = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
        padding = 2 * self.packed.shape[-1] - self.num_placed
        rows.put(self.packed.data[at], pack(nn.functional.pad(q, (0, padding)), self.form.lane))

    def _store_scales(self, rows: Rows, at: tuple[int, ...], scales: Tensor) -> None:
        target = self.scales.data.view(torch.uint8)[at]
        rows.put(target[..., : scales.shape[-1]], scales.view(torch.uint8))

    def _store_factor(self, rows: Rows, at: tuple[int, ...], value: Tensor) -> None:
        factor = value.to(self.factors.device, torch.float32).view(1).expand(rows.count)
        is_divisor = self.precision.maker == "compressed-tensors"
        rows.put(self.factors.data[at], 1 / factor if is_divisor else factor)

    def _store_input_factor(self, value: Tensor) -> None:
        """Stores the largest factor of all projections, since they may read the same rows."""
        assert self.input_factor is not None, "asked for where activations are rounded"
        factor = value.to(self.input_factor.device, torch.float32).view(())
        factor = 1 / factor if self.precision.maker == "compressed-tensors" else factor
        self.input_factor.data.copy_(torch.maximum(self.input_factor.data, factor))

    def _store_powers(self, rows: Rows, at: tuple[int, ...], bits: Tensor) -> None:
        """Stores the scales of a row relative to its factor. A scale smaller than 2^-17 of the
        largest becomes 0, which is less than the rounding error of the row's sum."""
        powers = bits.to(self.scales.device, torch.float32)
        largest = powers.amax(-1)
        scales = torch.exp2(powers - largest[:, None] + _LARGEST)
        self._store_scales(rows, at, scales.to(FP8))
        rows.put(self.factors.data[at], torch.exp2(largest - _MX_BIAS - _LARGEST))

    def clear(self, first: int, count: int) -> None:
        self.packed.data[..., first : first + count, :] = 0

    def fill(self, spread: float, generator: torch.Generator) -> None:
        self.packed.data.random_(0, 256, generator=generator)
        one = torch.ones((), dtype=FP8).view(torch.uint8)
        whole = self.num_placed // self.precision.group
        self.scales.data.view(torch.uint8)[..., :whole] = one
        self.factors.data.fill_(spread / _SPREAD)
        if self.input_factor is not None and self.precision.group != _MX_GROUP:
            self.input_factor.data.fill_(_DUMMY_FACTOR)
