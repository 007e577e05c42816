"""Mixture of experts: each routed token's best experts, and optionally one expert that every token
shares.

A shared expert of the same size as the others is kept as one more of them, after the last, and its
gate, if it has one, as one more row of the router: every token chooses it, so it costs no GEMM of
its own. One of another size is an MLP beside them.

Legend: T tokens, H hidden size, X experts, N experts for each token, P split-K partials.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from milepost.kernels import moe
from milepost.kernels.moe import SOFTMAX, Scores
from milepost.layers.context import Context
from milepost.layers.linear import Linear
from milepost.layers.mlp import MLP
from milepost.layers.parameters import ParameterKind
from milepost.layers.placements import Placement, Placements, place_whole
from milepost.layers.weights import ExpertSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShapes:
    """Sizes of a mixture; a `shared_size` of 0 means that there is no shared expert."""

    num_experts: int
    num_chosen: int
    size: int
    shared_size: int
    normalise: bool
    """Weights of a token's chosen experts add up to 1."""
    scores: Scores = SOFTMAX
    has_bias: bool = False
    """A correction is added to the scores by which experts are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls tensors whose names differ from family to family."""

    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_expert"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Of routed experts where they stand one by one."""


class MoE(nn.Module):
    """`hidden` [T, H] to partials [T, P, H] of the output; a `Part`."""

    spec = None
    operation = None
    rotary = None

    def __init__(
        self,
        hidden_size: int,
        shapes: ExpertShapes,
        kind: ParameterKind,
        names: ExpertNames = ExpertNames(),
    ) -> None:
        super().__init__()
        self.shapes, self.kind, self.hidden_size = shapes, kind, hidden_size
        self.names = names
        self.is_joint = shapes.shared_size == shapes.size
        """The shared expert stands among the others."""
        has_gate = bool(shapes.shared_size) and shapes.scores.gates_shared
        self.num_logits = shapes.num_experts + (self.is_joint and has_gate)
        # Products with whole groups of 8 outputs are faster.
        sections = (
            ("gate", shapes.num_experts),
            (f"{names.shared}_gate", int(self.is_joint and has_gate)),
            (None, -self.num_logits % 8),
        )
        self.router = Linear(hidden_size, [each for each in sections if each[1]], kind)
        self.bias = kind.empty_precise(shapes.num_experts) if shapes.has_bias else None
        experts = [f"experts.{expert}" for expert in range(shapes.num_experts)]
        sizes = ExpertSizes(
            hidden_size=hidden_size,
            size=shapes.size,
            names=(*experts, names.shared) if self.is_joint else tuple(experts),
            num_stacked=shapes.num_experts,
            projections=names.projections,
        )
        self.experts = kind.precision("experts").experts(sizes, kind)
        self.shared = self.shared_gate = None
        if shapes.shared_size and not self.is_joint:
            self.shared = MLP(hidden_size, shapes.shared_size, kind.under(names.shared))
            if has_gate:
                self.shared_gate = Linear(hidden_size, ((f"{names.shared}_gate", 1),), kind)

    def run(self, hidden: Tensor, ctx: Context, number: int) -> Tensor:  # noqa: ARG002
        """The output in partials, for whoever reads it to add up."""
        return self.partials(hidden, ctx.num_real)

    def partials(self, hidden: Tensor, num_real: Tensor | None = None) -> Tensor:
        """`run`; tokens from `num_real` [1] on are padding."""
        is_precise = self.shapes.scores.kind == "sigmoid"
        logits = self.router.precise(hidden) if is_precise else self.router.partials(hidden)
        shares, experts = moe.route(
            logits[..., : self.num_logits],
            self.shapes.num_chosen,
            normalise=self.shapes.normalise,
            has_shared=self.is_joint,
            scores=self.shapes.scores,
            bias=self.bias,
            dtype=hidden.dtype,
            num_real=num_real,
        )
        partials = self.experts.mix(hidden, shares, experts)
        if self.shared_gate is not None:
            partials[:, 0].addcmul_(self.shared_gate(hidden).sigmoid_(), self.shared(hidden))
        elif self.shared is not None:
            partials[:, 0].add_(self.shared(hidden))
        return partials

    def placements(self) -> Placements:
        """A checkpoint whose shared expert has no units still holds its tensors; they change
        nothing."""
        placements = {}
        if self.bias is not None:
            placements[self.kind.full(self.names.bias)] = place_whole(self.bias)
        if self.shapes.shared_size or not self.kind.has("shared_expert_gate.weight"):
            return placements
        shapes = {
            "shared_expert.gate_proj.weight": (0, self.hidden_size),
            "shared_expert.up_proj.weight": (0, self.hidden_size),
            "shared_expert.down_proj.weight": (self.hidden_size, 0),
            "shared_expert_gate.weight": (1, self.hidden_size),
        }
        empty = {self.kind.full(name): Placement(shape, len) for name, shape in shapes.items()}
        return placements | empty

    def fill(self, spread: float, generator: torch.Generator) -> None:  # noqa: ARG002
        """Of what it holds itself."""
        if self.bias is not None:
            self.bias.zero_()
