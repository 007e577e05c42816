"""Weights in int8 whose activations are rounded to int8 too (W8A8), as compressed-tensors writes
them: `int-quantized`, with scales per channel or per tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from milepost.kernels.products.forms.quantised import Int8
from milepost.layers.quantised.fp8 import Fp8Matrix, Fp8Precision

_LARGEST = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Precision(Fp8Precision):
    """Integers whose tensors have the names and shapes of FP8's. Checkpoints may set the scale of
    activations; otherwise each token has its own, on several ranks that of the rank's part."""

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
        self.values.data.random_(-_LARGEST, _LARGEST + 1, generator=generator)
        return _LARGEST
