"""Kimi Delta Attention: short convolution, delta rule with a decay per channel, gated norm (Kimi
Linear, arXiv 2510.26692).

Legend: T tokens, C hidden size, H heads, K head_dim, P split-K partials.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from milepost.kernels import recurrent
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
    place_convolutions,
    place_rates,
    place_whole,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KDAShapes:
    """Sizes of a KDA layer."""

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_width: int
    norm_eps: float
    least_decay: float = 0.0
    """Lower bound of log decays; 0 if there is none."""
    is_full_rank: bool = False
    """Whether decay inputs and output gates each have one projection, not two of low rank."""

    @property
    def size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim


class KDA(nn.Module):
    """Kimi Delta Attention from `hidden` [T, C] to the output [T, C]; a `Part`. Reads and writes
    its states in the step's slots.

    One projection computes, heads side by side: queries, keys, values (which pass through the
    convolution), betas; then two low-rank parts, each one head wide. Two more projections turn
    these into decay inputs and output gates. At full rank the first projection begins with these.
    """

    rotary = None

    def __init__(self, shapes: KDAShapes, scope: ModuleScope) -> None:
        super().__init__()
        self.scope = scope
        self.head_cut = scope.ranks.share(shapes.num_heads, f"{scope.path} num_heads")
        self.cut = self.head_cut.times(shapes.head_dim)
        shapes = self.shapes = replace(shapes, num_heads=self.head_cut.size)
        size, rank = shapes.size, shapes.head_dim
        self.forget = forget = "forget_gate." if scope.has("forget_gate.A_log") else ""
        # AliceAI's name, for one rate a head; Kimi Linear's tensor has further dimensions.
        self.has_flat_rates = shapes.is_full_rank or scope.has("a_log_bias")
        self.rates = "a_log_bias" if scope.has("a_log_bias") else f"{forget}A_log"
        wide = (f"{forget}f_proj", "g_proj") if shapes.is_full_rank else ()
        narrow = () if wide else (f"{forget}f_a_proj", "g_a_proj")
        convolved = dict.fromkeys(("q_proj", "k_proj", "v_proj"), size)
        cuts = dict.fromkeys((*convolved, *wide, f"{forget}f_b_proj", "g_b_proj"), self.cut)
        cuts["b_proj"] = self.head_cut
        sections = [
            *((name, size) for name in wide),
            *convolved.items(),
            ("b_proj", shapes.num_heads),
        ]
        sections += [(name, rank) for name in narrow]
        rest = -sum(count for _, count in sections) % 8
        padding = [(None, rest)] if rest else []
        self.projection = Linear(shapes.hidden_size, [*sections, *padding], scope, cuts=cuts)
        self.decay = self.gate = None
        if narrow:
            self.decay = Linear(rank, ((f"{forget}f_b_proj", size),), scope, cuts=cuts)
            self.gate = Linear(rank, (("g_b_proj", size),), scope, cuts=cuts)
        self.conv_weight = scope.empty(3 * size, shapes.conv_width)
        self.decay_rate = scope.empty_precise(shapes.num_heads)
        self.decay_bias = scope.empty_precise(size)
        self.norm_weight = scope.empty_precise(rank)
        self.out = Linear(size, (("o_proj", shapes.hidden_size),), scope, inputs=self.cut)
        heads = shapes.num_heads
        self.operation = RecurrentOperation(
            recurrence=Recurrence(
                rule=KDAWeights, num_units=heads, num_heads=heads, shared=rank, own=rank
            ),
            conv_width=shapes.conv_width,
            order=scope.order,
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
        """The form of rows that the part reads."""
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
            least_decay=shapes.least_decay,
        )
        mixed = recurrent.mix(
            self._project(rows, ctx),
            weights,
            ctx.layer_states(number),
            ctx.step.layouts[self.operation],
        )
        return self.out(mixed, epilogue=Epilogue.PARTIALS)

    def _project(self, rows: Inputs, ctx: Context) -> KDAProjected:
        shapes, projected = self.shapes, self.projection(rows)
        size, rank, count = shapes.size, shapes.head_dim, 3 * shapes.size + shapes.num_heads
        if self.decay is None or self.gate is None:
            decays, gates, convolved = projected[:, : 2 * size + count].split(
                (size, size, count), -1
            )
            return KDAProjected(convolved, decays, gates)
        convolved, first, second = projected[:, : count + 2 * rank].split((count, rank, rank), -1)
        gates = self.gate(second, launch_dependents=ctx.decodes)
        return KDAProjected(convolved, self.decay(first), gates)

    def placements(self) -> WeightSlots:
        by_head = (-1,) if self.has_flat_rates else (1, 1, -1, 1)
        rates = place_rates(self.decay_rate.view(by_head))
        is_one = self.scope.has("conv1d.weight")
        tensors = {
            self.rates: cut_all(rates, self.head_cut, len(by_head) // 2),
            f"{self.forget}dt_bias": cut_all(place_whole(self.decay_bias), self.cut),
            "o_norm.weight": place_whole(self.norm_weight),
            **place_convolutions(self.conv_weight, [self.cut] * 3, is_one=is_one),
        }
        return {self.scope.full(name): place for name, place in tensors.items()}

    def fill(self, spread: float, generator: torch.Generator) -> None:  # noqa: ARG002
        fill_matrix(self.conv_weight, self.shapes.conv_width**-0.5, generator)
        # Half-lives range from about one token to a hundred, as in trained models.
        self.decay_rate.uniform_(-0.5, -0.005, generator=generator)
        self.decay_bias.fill_(1)
        self.norm_weight.fill_(1)
