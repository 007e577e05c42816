"""Forms of weights: raw ones here, FP8, int8 and four bits in `quantised`; `Matrix`, by which the
tables choose a kernel for a weight of any form; and `Epilogue`.

Legend: O outputs, I inputs, R raw outputs, T tokens; any leading dimensions (experts).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import BLOCK
from milepost.kernels.products.forms.quantised import Fp4, Fp8, Int4, Int8, Values

_PACKED_ROWS = 16
"""Number of rows that packed weights are arranged for; other numbers are correct too."""
_LEAST_PACKED = 2**17
"""Number of elements from which a weight is packed. A call of oneDNN takes some 15 µs, more than
packing saves in smaller ones, whatever the number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw(Values):
    """Weights in the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Raw weights as oneDNN arranges them for small batches on a CPU."""

    values: Tensor
    """Opaque: oneDNN's arrangement."""
    num_outputs: int
    num_inputs: int
    order: SumOrder = SumOrder.FREE
    """See `Values`."""

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        multiply = torch.ops.mkldnn._linear_pointwise
        product: Tensor = multiply(rows, self.values, bias, "none", [], "")
        return product


def pack(raw: Raw) -> Packed | None:
    """Returns packed weights if `raw` is large, in float32 and on a CPU, and torch has oneDNN, else
    None. A GEMM of 16 rows takes 0.5 to 0.9 of the time with them."""
    values = raw.values
    if values.device.type != "cpu" or values.dtype != torch.float32:
        return None
    if values.numel() < _LEAST_PACKED:
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(values.data, _PACKED_ROWS)
    return Packed(
        values=packed,
        num_outputs=raw.num_outputs,
        num_inputs=raw.num_inputs,
        order=raw.order,
    )


RawForm = Raw | Packed
Form = RawForm | Fp8 | Int8 | Int4 | Fp4
KernelForm = Raw | Fp8 | Int8 | Int4 | Fp4
"""The forms that kernels read."""


class Epilogue(Enum):
    """Outcome of a product's outputs, and anything else that its launch computes."""

    NONE = "none"
    GATED = "gated"
    """SiLU of the first half of the outputs times the second half: [T, O / 2]."""
    PARTIALS = "partials"
    """[T, O], or float32 split-K partials [T, P, O] that the next reader adds up, which saves a
    launch."""
    FLOAT32 = "float32"
    """Unrounded (float64 for float64 rows): [T, O] or partials."""
    BESIDE = "beside"
    """The launch also multiplies the rows with a small raw weight, whose outputs stand after the
    others: [T, O + R]."""
    NORMED = "normed"
    """The launch also norms the row before it multiplies it."""


class Matrix(NamedTuple):
    """Properties of a weight that decide which kernel multiplies by it."""

    form: type[Any]
    num_outputs: int
    num_inputs: int
    rows: int = 0
    depth: int = 0
    """Outputs and inputs that share a scale, in eight bits."""
    group: int = 0
    """Inputs that share a scale, in four bits."""
    has_input_scale: bool = False
    """The checkpoint sets the scale of all activations."""
    order: SumOrder = SumOrder.FREE
    """Order of sums in its products."""

    @staticmethod
    def of(weight: Form, order: SumOrder = SumOrder.FREE) -> Matrix:
        """Describes `weight` in products with this order, or its own if that is stricter."""
        # Every launch asks, so neither names nor properties stand between.
        order = max(weight.order, order)
        if isinstance(weight, Fp8):
            *_, num_outputs, num_inputs = weight.values.shape
            has_scale = weight.input_scale is not None
            sizes = num_outputs, num_inputs, weight.rows, weight.depth, 0
            return Matrix(Fp8, *sizes, has_scale, order)
        if isinstance(weight, Int8):
            sizes = weight.num_outputs, weight.num_inputs, 1, weight.num_inputs, 0
            return Matrix(Int8, *sizes, weight.input_scale is not None, order)
        group = 0 if isinstance(weight, RawForm) else weight.group
        sizes = weight.num_outputs, weight.num_inputs, 0, 0, group
        return Matrix(type(weight), *sizes, False, order)

    @property
    def num_weights(self) -> int:
        return self.num_outputs * self.num_inputs

    @property
    def is_blocked(self) -> bool:
        """Whether it is FP8 with a scale per block of weights, and rows get a scale per block
        too."""
        return self.rows == self.depth == BLOCK and not self.has_input_scale

    @property
    def has_whole_groups(self) -> bool:
        """Whether scales belong to whole blocks of inputs, or a program finds that of a whole row;
        and rows have scales of their own."""
        if self.form is Int8:
            return not self.has_input_scale
        if self.form is Fp8:
            return self.depth == BLOCK and not self.has_input_scale
        return self.form is not Int4 or self.group % BLOCK == 0

    @property
    def has_whole_steps(self) -> bool:
        """Whether scales belong to whole blocks of inputs, or to halves or quarters of them."""
        return self.has_whole_groups or self.form is Int4
