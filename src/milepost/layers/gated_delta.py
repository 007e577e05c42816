"""Gated DeltaNet: short convolution, gated delta rule, gated norm (Yang et al., arXiv 2412.06464).

Legend: T tokens, C hidden size, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from milepost.kernels.recurrent import DeltaWeights, MixerSizes, RecurrentOperation, RecurrentRule
from milepost.layers.linear import Linear
from milepost.layers.parameters import ModuleScope, dummy_taps
from milepost.layers.recurrent import DECAYS, RecurrentMixer
from milepost.layers.weight_slots import place_convolutions, place_rates
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Names of a Gated DeltaNet layer's tensors in a checkpoint, and the projections that it
    has."""

    sections: Callable[[GatedDeltaShapes], list[tuple[str, int]]]
    """The projections that hold queries, keys, values, output gates, betas and decay inputs."""
    orders: Callable[[GatedDeltaShapes], dict[str, Tensor]] = lambda _: {}
    """Order of a projection's outputs in the checkpoint: see `Linear`."""
    segments: Callable[[GatedDeltaShapes], dict[str, tuple[int, ...]]] = lambda _: {}
    """Sizes of the parts of a projection that are split over ranks one by one, in the checkpoint's
    order."""
    norm: str = "norm"
    out: str = "out_proj"


class GatedDelta(RecurrentMixer):
    """Gated DeltaNet. One projection computes, heads side by side: queries, keys, values (which
    pass through the convolution), output gates, betas, decay inputs. Each rank has a share of the
    key heads and their value heads: `shapes` are this rank's sizes, `full` the checkpoint's."""

    def __init__(
        self, shapes: GatedDeltaShapes, scope: ModuleScope, arrangement: Arrangement
    ) -> None:
        super().__init__(scope)
        full, ranks = shapes, scope.ranks
        key_heads = ranks.share(full.num_key_heads, f"{scope.path} num_key_heads").size
        heads = ranks.share(full.num_value_heads, f"{scope.path} num_value_heads").size
        shapes = self.shapes = replace(full, num_key_heads=key_heads, num_value_heads=heads)
        several = arrangement.segments(full)
        self.projection = Linear(
            shapes.hidden_size,
            arrangement.sections(shapes),
            scope,
            orders=arrangement.orders(shapes),
            cuts={
                name: self._segments(*several.get(name, (count,)))
                for name, count in arrangement.sections(full)
            },
        )
        values, head_cut = self._segments(full.values_size), self._segments(full.num_value_heads)
        keys = self._segments(full.keys_size)
        conv = scope.empty(shapes.channels, shapes.conv_width)
        has_one = not scope.has("q_conv1d.weight")
        place = partial(place_convolutions, conv, (keys, keys, values), is_one=has_one)
        self.conv_weight = self.declare_slots(place, conv, dummy_taps)
        self.decay_rate = self.declare(
            "A_log", scope.empty_precise(heads), place=place_rates, cut=head_cut, dummy=DECAYS
        )
        self.decay_bias = self.declare("dt_bias", scope.empty_precise(heads), cut=head_cut)
        norm = f"{arrangement.norm}.weight"
        self.norm_weight = self.declare(norm, scope.empty_precise(shapes.value_dim))
        self.weights = DeltaWeights(
            conv=self.conv_weight,
            decay_rate=self.decay_rate,
            decay_bias=self.decay_bias,
            norm=self.norm_weight,
            norm_eps=shapes.norm_eps,
        )
        self.out = Linear(
            shapes.values_size, ((arrangement.out, shapes.hidden_size),), scope, inputs=values
        )
        sizes = MixerSizes(
            rule=RecurrentRule.GATED_DELTA,
            units=key_heads,
            group=heads // key_heads,
            shared=shapes.key_dim,
            own=shapes.value_dim,
            taps=shapes.conv_width,
            max_beta=shapes.max_beta,
            gates_by_sigmoid=shapes.gates_by_sigmoid,
        )
        self.run_by(RecurrentOperation(sizes=sizes, order=scope.order))

    def _segments(self, *counts: int) -> Cut:
        return self.scope.ranks.segments(*counts, what=self.scope.path)

    @property
    def first(self) -> Linear:
        """The projection that the preceding norm's launch may also compute: see `Block`."""
        return self.projection


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
