"""Kimi Delta Attention: short convolution, delta rule with a decay per channel, gated norm (Kimi
Linear, arXiv 2510.26692).

Legend: C hidden size, H heads, K head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from milepost.kernels.layout.emit import Inputs
from milepost.kernels.recurrent import (
    DeltaWeights,
    KDAProjected,
    MixerSizes,
    RecurrentOperation,
    RecurrentRule,
)
from milepost.layers.context import Context
from milepost.layers.linear import Linear
from milepost.layers.parameters import ModuleScope, dummy_taps
from milepost.layers.recurrent import DECAYS, RecurrentMixer
from milepost.layers.weight_slots import place_convolutions, place_rates


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


class KDA(RecurrentMixer):
    """Kimi Delta Attention. One projection computes, heads side by side: queries, keys, values
    (which pass through the convolution), betas; then two low-rank parts, each one head wide. Two
    more projections turn these into decay inputs and output gates. At full rank the first
    projection begins with these."""

    def __init__(self, shapes: KDAShapes, scope: ModuleScope) -> None:
        super().__init__(scope)
        head_cut = scope.ranks.share(shapes.num_heads, f"{scope.path} num_heads")
        cut = head_cut.times(shapes.head_dim)
        shapes = self.shapes = replace(shapes, num_heads=head_cut.size)
        heads, size, rank = shapes.num_heads, shapes.size, shapes.head_dim
        forget = "forget_gate." if scope.has("forget_gate.A_log") else ""
        wide = (f"{forget}f_proj", "g_proj") if shapes.is_full_rank else ()
        narrow = () if wide else (f"{forget}f_a_proj", "g_a_proj")
        convolved = dict.fromkeys(("q_proj", "k_proj", "v_proj"), size)
        cuts = dict.fromkeys((*convolved, *wide, f"{forget}f_b_proj", "g_b_proj"), cut)
        cuts["b_proj"] = head_cut
        sections = [
            *((name, size) for name in wide),
            *convolved.items(),
            ("b_proj", heads),
        ]
        sections += [(name, rank) for name in narrow]
        rest = -sum(count for _, count in sections) % 8
        padding = [(None, rest)] if rest else []
        self.projection = Linear(shapes.hidden_size, [*sections, *padding], scope, cuts=cuts)
        self.decay = self.gate = None
        if narrow:
            self.decay = Linear(rank, ((f"{forget}f_b_proj", size),), scope, cuts=cuts)
            self.gate = Linear(rank, (("g_b_proj", size),), scope, cuts=cuts)
        conv, is_one = scope.empty(3 * size, shapes.conv_width), scope.has("conv1d.weight")
        place = partial(place_convolutions, conv, [cut] * 3, is_one=is_one)
        self.conv_weight = self.declare_slots(place, conv, dummy_taps)
        # AliceAI's name, for one rate a head; Kimi Linear's tensor has further dimensions.
        is_alice = scope.has("a_log_bias")
        by_head = (-1,) if shapes.is_full_rank or is_alice else (1, 1, -1, 1)
        self.decay_rate = self.declare(
            "a_log_bias" if is_alice else f"{forget}A_log",
            scope.empty_precise(heads),
            place=lambda rates: place_rates(rates.view(by_head)),
            cut=head_cut,
            dim=len(by_head) // 2,
            dummy=DECAYS,
        )
        self.decay_bias = self.declare(f"{forget}dt_bias", scope.empty_precise(size), cut=cut)
        self.norm_weight = self.declare("o_norm.weight", scope.empty_precise(rank))
        self.weights = DeltaWeights(
            conv=self.conv_weight,
            decay_rate=self.decay_rate,
            decay_bias=self.decay_bias,
            norm=self.norm_weight,
            norm_eps=shapes.norm_eps,
        )
        self.out = Linear(size, (("o_proj", shapes.hidden_size),), scope, inputs=cut)
        sizes = MixerSizes(
            rule=RecurrentRule.KDA,
            units=heads,
            group=1,
            shared=rank,
            own=rank,
            taps=shapes.conv_width,
            least_decay=shapes.least_decay,
            gates_by_sigmoid=True,
        )
        self.run_by(RecurrentOperation(sizes=sizes, order=scope.order))

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
