"""A linear projection, which may hold several of a checkpoint's projections below one another.

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from milepost.kernels import linear, norm
from milepost.layers.parameters import ParameterKind, Placements, place_rows

_PACKED_ROWS = 16
"""Rows of the products that a packed weight is arranged for; others are right too."""


class Linear(nn.Module):
    """`hidden` [T, I] to [T, O], with an optional bias. `weight` [O, I] may be shared (tied)."""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        kind: ParameterKind,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weight = kind.empty(num_outputs, num_inputs) if weight is None else weight
        self.bias = kind.empty(num_outputs) if bias else None
        self._packed: Tensor | None = None

    def forward(self, hidden: Tensor, *, lets_next_start: bool = True) -> Tensor:
        """See `linear.multiply`."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(
                hidden, self._packed, self.bias, "none", [], ""
            )
        return linear.multiply(hidden, self.weight, self.bias, lets_next_start=lets_next_start)

    def parts(self, hidden: Tensor) -> Tensor:
        """The same, or parts [T, P, O] of it, for whoever reads it to add up."""
        if self._packed is not None:
            return self.forward(hidden)
        return linear.parts(hidden, self.weight, self.bias)

    def gated(self, hidden: Tensor) -> Tensor:
        """SiLU of the first half of the outputs times the other half: [T, O / 2]."""
        if self._packed is not None or self.bias is not None:
            return norm.silu_mul(self.forward(hidden))
        return linear.multiply_gated(hidden, self.weight)

    __call__ = forward
    """There are no hooks to run, and a module's own call costs as much as a small operation."""

    def pack(self) -> None:
        """Arrange the weight for small batches on a CPU, and release it as a parameter.

        For a float32 weight on a CPU whose torch has oneDNN; does nothing to any other. With 16
        rows a product costs 0.5 to 0.9 of what it did. No placement can be made afterwards.
        """
        if self.weight is None or self.weight.device.type != "cpu":
            return
        if torch.backends.mkldnn.is_available() and self.weight.dtype == torch.float32:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, _PACKED_ROWS)
            self.weight = None

    def placements(self, first: int = 0, count: int | None = None) -> Placements:
        """A checkpoint's projection that makes up `count` outputs from `first` on; all of them by
        default."""
        count = self.weight.shape[0] - first if count is None else count
        placements = {"weight": place_rows(self.weight, first, count)}
        if self.bias is not None:
            placements["bias"] = place_rows(self.bias, first, count)
        return placements
