"""Mixture of experts: each token's best experts, and optionally one expert that every token shares.

Legend: T tokens, H hidden size, I intermediate size of an expert, X experts, N experts for each
token.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from milepost.kernels import moe
from milepost.layers.linear import Linear
from milepost.layers.mlp import MLP
from milepost.layers.parameters import (
    ParameterKind,
    Placement,
    Placements,
    fill_matrix,
    place_whole,
    under,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShapes:
    """Sizes of a mixture; a `shared_size` of 0 means that there is no shared expert."""

    num_experts: int
    num_chosen: int
    size: int
    shared_size: int
    normalise: bool
    """Weights of a token's chosen experts add up to 1."""


class MoE(nn.Module):
    """`hidden` [T, H] in and out."""

    def __init__(self, hidden_size: int, shapes: ExpertShapes, kind: ParameterKind) -> None:
        super().__init__()
        self.shapes = shapes
        self.router = Linear(hidden_size, shapes.num_experts, kind)
        self.gate_up = kind.empty(shapes.num_experts, 2 * shapes.size, hidden_size)
        self.down = kind.empty(shapes.num_experts, hidden_size, shapes.size)
        self.shared = self.shared_gate = None
        if shapes.shared_size:
            self.shared = MLP(hidden_size, shapes.shared_size, kind)
            self.shared_gate = Linear(hidden_size, 1, kind)

    def forward(self, hidden: Tensor) -> Tensor:
        weights, experts = moe.route(
            self.router(hidden), self.shapes.num_chosen, normalise=self.shapes.normalise
        )
        output = moe.apply(hidden, weights, experts, self.gate_up, self.down)
        if self.shared is not None:
            output.addcmul_(self.shared_gate(hidden).sigmoid_(), self.shared(hidden))
        return output

    def placements(self, prefix: str, names: Container[str]) -> Placements:
        """Full names from `prefix` on, for experts in one tensor or one by one, as `names` has
        them."""
        placements = {"gate.weight": place_whole(self.router.weight)}
        fused = f"{prefix}.experts.gate_up_proj" in names
        placements |= self._fused_experts() if fused else self._single_experts()
        if self.shared is not None:
            placements |= under("shared_expert", self.shared.placements())
            placements |= under("shared_expert_gate", self.shared_gate.placements())
        elif f"{prefix}.shared_expert_gate.weight" in names:
            placements |= _empty_shared_expert(self.gate_up.shape[2])
        return under(prefix, placements)

    def _fused_experts(self) -> Placements:
        return {
            "experts.gate_up_proj": place_whole(self.gate_up),
            "experts.down_proj": place_whole(self.down),
        }

    def _single_experts(self) -> Placements:
        placements, size = {}, self.shapes.size
        for expert in range(self.shapes.num_experts):
            name, gate_up = f"experts.{expert}", self.gate_up[expert]
            placements[f"{name}.gate_proj.weight"] = place_whole(gate_up[:size])
            placements[f"{name}.up_proj.weight"] = place_whole(gate_up[size:])
            placements[f"{name}.down_proj.weight"] = place_whole(self.down[expert])
        return placements

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for weight in (self.router.weight, self.gate_up, self.down):
            fill_matrix(weight, spread, generator)
        if self.shared is not None:
            self.shared.fill(spread, generator)
            fill_matrix(self.shared_gate.weight, spread, generator)


def _empty_shared_expert(hidden_size: int) -> Placements:
    """A checkpoint whose shared expert has no units still holds its tensors; they change
    nothing."""
    shapes = {
        "shared_expert.gate_proj.weight": (0, hidden_size),
        "shared_expert.up_proj.weight": (0, hidden_size),
        "shared_expert.down_proj.weight": (hidden_size, 0),
        "shared_expert_gate.weight": (1, hidden_size),
    }
    return {name: Placement(shape, lambda values: None) for name, shape in shapes.items()}  # noqa: ARG005
