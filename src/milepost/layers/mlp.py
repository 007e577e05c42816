"""SwiGLU feed-forward: gate and up in one matrix.

Legend: T tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from milepost.layers.linear import Linear
from milepost.layers.parameters import ParameterKind, Placements, fill_matrix, under


class MLP(nn.Module):
    """`hidden` [T, H] in and out."""

    def __init__(self, hidden_size: int, size: int, kind: ParameterKind) -> None:
        super().__init__()
        self.size = size
        self.gate_up = Linear(hidden_size, 2 * size, kind)
        self.down = Linear(size, hidden_size, kind)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.gate_up.gated(hidden))

    def parts(self, hidden: Tensor, num_real: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """The same, or parts [T, P, H] of it, for whoever reads it to add up. Padding costs nothing
        here, so it does not matter which tokens are real."""
        return self.down.parts(self.gate_up.gated(hidden))

    def placements(self) -> Placements:
        return {
            **under("gate_proj", self.gate_up.placements(0, self.size)),
            **under("up_proj", self.gate_up.placements(self.size)),
            **under("down_proj", self.down.placements()),
        }

    def fill(self, spread: float, generator: torch.Generator) -> None:
        fill_matrix(self.gate_up.weight, spread, generator)
        fill_matrix(self.down.weight, spread, generator)
