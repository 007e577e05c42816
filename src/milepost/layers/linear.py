"""A linear projection, which may hold several of a checkpoint's projections below one another.

Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from milepost.layers.parameters import ParameterKind, Placements, place_rows


class Linear(nn.Module):
    """`hidden` [T, I] to [T, O], with an optional bias."""

    def __init__(
        self, num_inputs: int, num_outputs: int, kind: ParameterKind, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = kind.empty(num_outputs, num_inputs)
        self.bias = kind.empty(num_outputs) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)

    def placements(self, first: int = 0, count: int | None = None) -> Placements:
        """A checkpoint's projection that makes up `count` outputs from `first` on; all of them by
        default."""
        count = self.weight.shape[0] - first if count is None else count
        placements = {"weight": place_rows(self.weight, first, count)}
        if self.bias is not None:
            placements["bias"] = place_rows(self.bias, first, count)
        return placements
