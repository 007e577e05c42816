"""Gated DeltaNet: short convolution, gated delta rule, gated norm (Yang et al., arXiv 2412.06464).

Legend: T tokens, C hidden size, G key heads, V value heads, K key_dim, W value_dim, P split-K
partials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from milepost.kernels import recurrent
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.products import Epilogue
from milepost.kernels.recurrent import (
    GatedDeltaWeights,
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
from milepost.parallel import Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaShapes:
    """Sizes of a Gated DeltaNet layer; `num_value_heads` is a multiple of `num_key_heads`."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    max_beta: float = 1.0
    """Upper bound of beta. Above 1, a token may reverse the value that the state holds for its
    key."""
    gates_by_sigmoid: bool = False
    """Whether outputs are multiplied by the sigmoid of their gate, not by its SiLU."""

    @property
    def keys_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys_size + self.values_size


def _in_order(_: GatedDeltaShapes) -> dict[str, Tensor]:
    return {}


def _in_one(_: GatedDeltaShapes) -> dict[str, tuple[int, ...]]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Names of a Gated DeltaNet layer's tensors in a checkpoint, and the projections that it
    has."""

    sections: Callable[[GatedDeltaShapes], list[tuple[str, int]]]
    """The projections that hold queries, keys, values, output gates, betas and decay inputs."""
    orders: Callable[[GatedDeltaShapes], dict[str, Tensor]] = _in_order
    """Order of a projection's outputs in the checkpoint: see `Linear`."""
    segments: Callable[[GatedDeltaShapes], dict[str, tuple[int, ...]]] = _in_one
    """Sizes of the parts of a projection that are split over ranks one by one, in the checkpoint's
    order."""
    norm: str = "norm"
    out: str = "out_proj"


class GatedDelta(nn.Module):
    """Gated DeltaNet from `hidden` [T, C] to the output [T, C]; a `Part`. Reads and writes its
    states in the step's slots.

    One projection computes, heads side by side: queries, keys, values (which pass through the
    convolution), output gates, betas, decay inputs. Each rank has a share of the key heads and
    their value heads: `shapes` are this rank's sizes, `full` the checkpoint's.
    """

    rotary = None

    def __init__(
        self, shapes: GatedDeltaShapes, scope: ModuleScope, arrangement: Arrangement
    ) -> None:
        super().__init__()
        self.full, self.scope, self.arrangement = shapes, scope, arrangement
        shapes = self.shapes = self._own(shapes)
        heads, hidden_size = shapes.num_value_heads, shapes.hidden_size
        self.projection = Linear(
            hidden_size,
            arrangement.sections(shapes),
            scope,
            orders=arrangement.orders(shapes),
            cuts=self._cuts(),
        )
        self.conv_weight = scope.empty(shapes.channels, shapes.conv_width)
        self.decay_rate = scope.empty_precise(heads)
        self.decay_bias = scope.empty_precise(heads)
        self.norm_weight = scope.empty_precise(shapes.value_dim)
        self.out = Linear(
            shapes.values_size,
            ((arrangement.out, hidden_size),),
            scope,
            inputs=self._segments(self.full.values_size),
        )
        self.operation = RecurrentOperation(
            recurrence=Recurrence(
                rule=GatedDeltaWeights,
                num_units=shapes.num_key_heads,
                num_heads=heads,
                shared=shapes.key_dim,
                own=shapes.value_dim,
                gates_by_sigmoid=shapes.gates_by_sigmoid,
            ),
            conv_width=shapes.conv_width,
            order=scope.order,
        )

    def _own(self, shapes: GatedDeltaShapes) -> GatedDeltaShapes:
        """Returns this rank's sizes: its key heads and the value heads that belong to them."""
        ranks, path = self.scope.ranks, self.scope.path
        return replace(
            shapes,
            num_key_heads=ranks.share(shapes.num_key_heads, f"{path} num_key_heads").size,
            num_value_heads=ranks.share(shapes.num_value_heads, f"{path} num_value_heads").size,
        )

    def _cuts(self) -> dict[str, Cut]:
        """Returns the part of each projection that this rank keeps."""
        full = self.arrangement.sections(self.full)
        several = self.arrangement.segments(self.full)
        return {name: self._segments(*several.get(name, (count,))) for name, count in full}

    def _segments(self, *counts: int) -> Cut:
        return self.scope.ranks.segments(*counts, what=self.scope.path)

    @property
    def spec(self) -> RecurrentSpec:
        shapes = self.shapes
        return RecurrentSpec(
            conv_shape=(shapes.channels, shapes.conv_width - 1),
            recurrent_shape=(shapes.num_value_heads, shapes.key_dim, shapes.value_dim),
            grid=recurrent.CHUNK,
            record_size=shapes.channels + 2 * shapes.num_value_heads,
            takes_drafts_fused=recurrent.takes_drafts_fused(shapes.key_dim, shapes.value_dim),
        )

    @property
    def first(self) -> Linear:
        """The projection that the preceding norm's launch may also compute: see `Block`."""
        return self.projection

    @property
    def reads(self) -> Emit:
        """The form of rows that the part reads."""
        return self.projection.reads

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """Returns the output, or split-K partials [T, P, C] of it."""
        weights = GatedDeltaWeights(
            conv=self.conv_weight,
            decay_rate=self.decay_rate,
            decay_bias=self.decay_bias,
            norm=self.norm_weight,
            norm_eps=self.shapes.norm_eps,
            max_beta=self.shapes.max_beta,
            gates_by_sigmoid=self.shapes.gates_by_sigmoid,
        )
        mixed = recurrent.mix(
            self.projection(rows, launch_dependents=ctx.decodes, order=ctx.order),
            weights,
            ctx.layer_states(number),
            ctx.step.layouts[self.operation],
        )
        return self.out(mixed, epilogue=Epilogue.PARTIALS, order=ctx.order)

    def placements(self) -> WeightSlots:
        full = self.full
        heads = self._segments(full.num_value_heads)
        sizes = full.keys_size, full.keys_size, full.values_size
        is_one = not self.scope.has("q_conv1d.weight")
        tensors = {
            "A_log": cut_all(place_rates(self.decay_rate), heads),
            "dt_bias": cut_all(place_whole(self.decay_bias), heads),
            f"{self.arrangement.norm}.weight": place_whole(self.norm_weight),
            **place_convolutions(self.conv_weight, map(self._segments, sizes), is_one=is_one),
        }
        return {self.scope.full(name): place for name, place in tensors.items()}

    def fill(self, spread: float, generator: torch.Generator) -> None:  # noqa: ARG002
        fill_matrix(self.conv_weight, self.shapes.conv_width**-0.5, generator)
        # Half-lives range from about one token to a hundred, as in trained models.
        self.decay_rate.uniform_(-0.5, -0.005, generator=generator)
        self.decay_bias.fill_(1)
        self.norm_weight.fill_(1)


def _separate(shapes: GatedDeltaShapes) -> list[tuple[str, int]]:
    heads = shapes.num_value_heads
    return [
        ("in_proj_qkv", shapes.channels),
        ("in_proj_z", shapes.values_size),
        ("in_proj_b", heads),
        ("in_proj_a", heads),
    ]


def _interleaved(shapes: GatedDeltaShapes) -> list[tuple[str, int]]:
    sizes = shapes.channels + shapes.values_size, 2 * shapes.num_value_heads
    return [("in_proj_qkvz", sizes[0]), ("in_proj_ba", sizes[1])]


def _by_key_head(shapes: GatedDeltaShapes) -> dict[str, Tensor]:
    """Returns the order of interleaved projections. The first has, for each key head: its query,
    its key, the values of its value heads and their gates. The second has the b of its value heads,
    then their a."""
    keys, values, heads = shapes.keys_size, shapes.values_size, shapes.num_value_heads

    def order(*parts: int) -> Tensor:
        groups = [
            part.view(shapes.num_key_heads, -1) for part in torch.arange(sum(parts)).split(parts)
        ]
        return torch.cat(groups, 1).flatten()

    return {"in_proj_qkvz": order(keys, keys, values, values), "in_proj_ba": order(heads, heads)}


def _by_letter(shapes: GatedDeltaShapes) -> list[tuple[str, int]]:
    keys, values, heads = shapes.keys_size, shapes.values_size, shapes.num_value_heads
    sizes = {"q": keys, "k": keys, "v": values, "g": values, "b": heads, "a": heads}
    return [(f"{letter}_proj", size) for letter, size in sizes.items()]


def _separate_segments(shapes: GatedDeltaShapes) -> dict[str, tuple[int, ...]]:
    return {"in_proj_qkv": (shapes.keys_size, shapes.keys_size, shapes.values_size)}


SEPARATE = Arrangement(sections=_separate, segments=_separate_segments)
"""Four projections, heads side by side: qkv, z, b, a (Qwen3.5)."""
INTERLEAVED = Arrangement(sections=_interleaved, orders=_by_key_head)
"""Two projections, key head by key head: qkvz and ba (Qwen3-Next)."""
BY_LETTER = Arrangement(sections=_by_letter, norm="o_norm", out="o_proj")
"""Six projections: q, k, v, g, b, a (FLA's own layers, OLMo-Hybrid)."""
