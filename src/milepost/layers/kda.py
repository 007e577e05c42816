"""Kimi Delta Attention: short convolution, delta rule with a decay per channel, gated norm (Kimi
Linear, arXiv 2510.26692).

Legend: T tokens, C hidden size, H heads, K head_dim, P split-K partials.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from milepost.kernels import products, recurrent
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.products import Epilogue
from milepost.kernels.recurrent import (
    KDAProjected,
    KDAWeights,
    Recurrence,
    RecurrentOperation,
)
from milepost.layers.context import Context, RecurrentSpec
from milepost.layers.linear import Linear
from milepost.layers.parameters import ModuleScope
from milepost.layers.weight_slots import (
    WeightSlots,
    cut_all,
    fill_matrix,
    place_rates,
    place_rows,
    place_whole,
)
from milepost.parallel.cut import join


@dataclass(frozen=True, slots=True, kw_only=True)
class KDAShapes:
    """Sizes of a KDA layer."""

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_width: int
    norm_eps: float

    @property
    def size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim


class KDA(nn.Module):
    """Kimi Delta Attention from `hidden` [T, C] to the output [T, C]; a `Part`. Reads and writes
    its states in the step's slots.

    One projection computes, heads side by side: queries, keys, values (which pass through the
    convolution), betas; then two low-rank parts, each one head wide. Two more projections turn
    these into decay inputs and output gates.
    """

    rotary = None

    def __init__(self, shapes: KDAShapes, kind: ModuleScope) -> None:
        super().__init__()
        self.kind = kind
        self.head_cut = kind.ranks.share(shapes.num_heads, f"{kind.path} num_heads")
        self.cut = self.head_cut.times(shapes.head_dim)
        shapes = self.shapes = replace(shapes, num_heads=self.head_cut.size)
        size, rank = shapes.size, shapes.head_dim
        self.forget = "forget_gate." if kind.has("forget_gate.A_log") else ""
        sections = (
            ("q_proj", size),
            ("k_proj", size),
            ("v_proj", size),
            ("b_proj", shapes.num_heads),
            (f"{self.forget}f_a_proj", rank),
            ("g_a_proj", rank),
            (None, -(shapes.num_heads + 2 * rank) % 8),
        )
        own = dict.fromkeys(
            ("q_proj", "k_proj", "v_proj", f"{self.forget}f_b_proj", "g_b_proj"), self.cut
        )
        cuts = {**own, "b_proj": self.head_cut}
        self.projection = Linear(
            shapes.hidden_size, [each for each in sections if each[1]], kind, cuts=cuts
        )
        self.decay = Linear(rank, ((f"{self.forget}f_b_proj", size),), kind, cuts=cuts)
        self.gate = Linear(rank, (("g_b_proj", size),), kind, cuts=cuts)
        self.conv_weight = kind.empty(3 * size, shapes.conv_width)
        self.decay_rate = kind.empty_precise(shapes.num_heads)
        self.decay_bias = kind.empty_precise(size)
        self.norm_weight = kind.empty_precise(rank)
        self.out = Linear(size, (("o_proj", shapes.hidden_size),), kind, inputs=self.cut)
        heads = shapes.num_heads
        self.operation = RecurrentOperation(
            recurrence=Recurrence(
                rule=KDAWeights, num_units=heads, num_heads=heads, shared=rank, own=rank
            ),
            conv_width=shapes.conv_width,
            batch_invariant=kind.batch_invariant,
        )

    @property
    def spec(self) -> RecurrentSpec:
        shapes = self.shapes
        return RecurrentSpec(
            conv_shape=(3 * shapes.size, shapes.conv_width - 1),
            recurrent_shape=(shapes.num_heads, shapes.head_dim, shapes.head_dim),
            grid=recurrent.CHUNK,
            record_size=4 * shapes.size + shapes.num_heads,
        )

    @property
    def reads(self) -> Emit:
        """See `Part`."""
        return self.projection.reads

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """Returns the output, or split-K partials [T, P, C] of it."""
        shapes = self.shapes
        weights = KDAWeights(
            conv=self.conv_weight,
            decay_rate=self.decay_rate,
            decay_bias=self.decay_bias,
            norm=self.norm_weight,
            norm_eps=shapes.norm_eps,
        )
        projected = self.projection(rows)
        first, rank = 3 * shapes.size + shapes.num_heads, shapes.head_dim
        decays, gates = products.multiply_both(
            (projected[:, first : first + rank], projected[:, first + rank : first + 2 * rank]),
            (self.decay.form, self.gate.form),
            launch_dependents=ctx.decodes,
        )
        mixed = recurrent.mix(
            KDAProjected(projected[:, :first], decays, gates),
            weights,
            ctx.layer_states(number),
            ctx.step.layouts[self.operation],
        )
        return self.out(mixed, epilogue=Epilogue.PARTIALS)

    def placements(self) -> WeightSlots:
        tensors = {
            f"{self.forget}A_log": cut_all(
                place_rates(self.decay_rate.view(1, 1, -1, 1)), self.head_cut, 2
            ),
            f"{self.forget}dt_bias": cut_all(place_whole(self.decay_bias), self.cut),
            "o_norm.weight": place_whole(self.norm_weight),
            **self._convolutions(),
        }
        return {self.kind.full(name): place for name, place in tensors.items()}

    def _convolutions(self) -> WeightSlots:
        """Places one convolution for all channels, or one each for queries, keys and values."""
        size, weight = self.shapes.size, self.conv_weight.unsqueeze(1)
        if self.kind.has("conv1d.weight"):
            return {"conv1d.weight": cut_all(place_whole(weight), join(*[self.cut] * 3))}
        return {
            f"{letter}_conv1d.weight": cut_all(place_rows(weight, index * size, size), self.cut)
            for index, letter in enumerate("qkv")
        }

    def fill(self, spread: float, generator: torch.Generator) -> None:  # noqa: ARG002
        fill_matrix(self.conv_weight, self.shapes.conv_width**-0.5, generator)
        # Half-lives range from about one token to a hundred, as in trained models.
        self.decay_rate.uniform_(-0.5, -0.005, generator=generator)
        self.decay_bias.fill_(1)
        self.norm_weight.fill_(1)
