"""The forms that a weight may have: raw ones here, `Fp8`, `Int4` and `Fp4` in `quantised.forms`.

Legend: O outputs, I inputs; any leading dimensions (experts).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.quantised.forms import Fp4, Fp8, Int4

_PACKED_ROWS = 16
"""Rows of the GEMMs that a packed weight is arranged for; others are right too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """Weights in the model's dtype."""

    values: Tensor
    """[..., O, I]"""

    @property
    def num_inputs(self) -> int:
        return self.values.shape[-1]

    @property
    def num_outputs(self) -> int:
        return self.values.shape[-2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Raw weights as oneDNN arranges them for small batches on a CPU."""

    values: Tensor
    """What `pack` returns."""
    num_outputs: int
    num_inputs: int

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self.values, bias, "none", [], "")


def pack(raw: Raw) -> Packed | None:
    """Of float32 on a CPU whose torch has oneDNN; None of any other. With 16 rows a GEMM costs 0.5
    to 0.9 of what it did."""
    values = raw.values
    if values.device.type != "cpu" or values.dtype != torch.float32:
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(values.data, _PACKED_ROWS)
    return Packed(values=packed, num_outputs=raw.num_outputs, num_inputs=raw.num_inputs)


RawForm = Raw | Packed
Form = RawForm | Fp8 | Int4 | Fp4
