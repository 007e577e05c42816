"""Mixture of experts: each token's best experts, and optionally one expert that every token shares.

A shared expert of the same size as the others is kept as one more of them, after the last, and its
gate as one more row of the router: every token chooses it, so it costs no product of its own. One
of another size is an MLP beside them.

Legend: T tokens, H hidden size, I intermediate size of an expert, X experts, N experts for each
token, P parts of an output.
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
    place_rows,
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
    """`hidden` [T, H] to an output in parts [T, P, H]."""

    def __init__(self, hidden_size: int, shapes: ExpertShapes, kind: ParameterKind) -> None:
        super().__init__()
        self.shapes = shapes
        self.is_joint = shapes.shared_size == shapes.size
        """The shared expert stands among the others."""
        self.num_logits = shapes.num_experts + self.is_joint
        self.router = Linear(hidden_size, _align(self.num_logits), kind)
        self.router.weight[self.num_logits :].zero_()
        self.gate_up = kind.empty(self.num_logits, 2 * shapes.size, hidden_size)
        self.down = kind.empty(self.num_logits, hidden_size, shapes.size)
        self.shared = self.shared_gate = None
        if shapes.shared_size and not self.is_joint:
            self.shared = MLP(hidden_size, shapes.shared_size, kind)
            self.shared_gate = Linear(hidden_size, 1, kind)

    def parts(self, hidden: Tensor, num_real: Tensor | None = None) -> Tensor:
        """The output in parts, for whoever reads it to add up. Tokens from `num_real` [1] on are
        padding."""
        weights, experts = moe.route(
            self.router.parts(hidden)[..., : self.num_logits],
            self.shapes.num_chosen,
            normalise=self.shapes.normalise,
            has_shared=self.is_joint,
            dtype=hidden.dtype,
            num_real=num_real,
        )
        parts = moe.parts(hidden, weights, experts, self.gate_up, self.down)
        if self.shared is not None:
            parts[:, 0].addcmul_(self.shared_gate(hidden).sigmoid_(), self.shared(hidden))
        return parts

    def placements(self, prefix: str, names: Container[str]) -> Placements:
        """Full names from `prefix` on, for experts in one tensor or one by one, as `names` has
        them."""
        num_experts = self.shapes.num_experts
        placements = under("gate", self.router.placements(0, num_experts))
        fused = f"{prefix}.experts.gate_up_proj" in names
        placements |= self._fused_experts() if fused else self._single_experts()
        if self.is_joint:
            placements |= self._place_expert("shared_expert", num_experts)
            placements |= under("shared_expert_gate", self.router.placements(num_experts, 1))
        elif self.shared is not None:
            placements |= under("shared_expert", self.shared.placements())
            placements |= under("shared_expert_gate", self.shared_gate.placements())
        elif f"{prefix}.shared_expert_gate.weight" in names:
            placements |= _empty_shared_expert(self.gate_up.shape[2])
        return under(prefix, placements)

    def _fused_experts(self) -> Placements:
        num_experts = self.shapes.num_experts
        return {
            "experts.gate_up_proj": place_rows(self.gate_up, 0, num_experts),
            "experts.down_proj": place_rows(self.down, 0, num_experts),
        }

    def _single_experts(self) -> Placements:
        placements: Placements = {}
        for expert in range(self.shapes.num_experts):
            placements |= self._place_expert(f"experts.{expert}", expert)
        return placements

    def _place_expert(self, name: str, expert: int) -> Placements:
        size, gate_up = self.shapes.size, self.gate_up[expert]
        return {
            f"{name}.gate_proj.weight": place_rows(gate_up, 0, size),
            f"{name}.up_proj.weight": place_rows(gate_up, size, size),
            f"{name}.down_proj.weight": place_whole(self.down[expert]),
        }

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for weight in (self.router.weight, self.gate_up, self.down):
            fill_matrix(weight, spread, generator)
        if self.shared is not None:
            self.shared.fill(spread, generator)
            fill_matrix(self.shared_gate.weight, spread, generator)


def _align(num_rows: int) -> int:
    """Rows of the router's matrix: products with whole groups of 8 outputs are faster."""
    return -(-num_rows // 8) * 8


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
