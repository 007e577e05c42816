"""Mamba2: short convolution, SSD recurrence, grouped gated norm (Dao and Gu, arXiv 2405.21060).

Legend: H heads, P head_dim, G groups, N state_size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from milepost.errors import ConfigError
from milepost.kernels import recurrent
from milepost.kernels.recurrent import Mamba2Weights, MixerSizes, RecurrentOperation, RecurrentRule
from milepost.layers.linear import Linear
from milepost.layers.norm import NormedPart, norm_over_ranks
from milepost.layers.parameters import ModuleScope, dummy_between, dummy_taps
from milepost.layers.recurrent import RecurrentMixer
from milepost.layers.weight_slots import place_rates, place_whole
from milepost.parallel import Cut
from milepost.parallel.ranks import join

_RATES, _TIME_STEPS = dummy_between(-16, -1), dummy_between(-7, -2)
"""Dummy rates and time steps: half-lives from a few tokens to thousands, as in trained models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shapes:
    """Sizes and options of a Mamba2 layer; `num_heads` is a multiple of `num_groups`."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    chunk_size: int
    """Chunk size of the model. The kernels use the nearest chunk size that they support."""
    norm_eps: float
    has_norm: bool = True
    norm_before_gate: bool = False
    bias: bool = False
    """Whether the projections have a bias."""
    conv_bias: bool = True
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size


class Mamba2(RecurrentMixer):
    """Mamba2. One projection computes, in the published order: gates [H * P], x [H * P], B [G * N],
    C [G * N], time steps [H]. x, B and C pass through the convolution."""

    def __init__(self, shapes: Mamba2Shapes, scope: ModuleScope) -> None:
        super().__init__(scope)
        head_cut = scope.ranks.share(shapes.num_heads, f"{scope.path} num_heads")
        inner_cut, groups = head_cut.times(shapes.head_dim), self._own_groups(shapes)
        states = groups.times(shapes.state_size)
        channel_cut = join(inner_cut, states, states)
        shapes = self.shapes = replace(shapes, num_heads=head_cut.size, num_groups=groups.size)
        heads, channels, inner = shapes.num_heads, shapes.channels, shapes.inner_size
        self.projection = Linear(
            shapes.hidden_size,
            (("in_proj", inner + channels + heads),),
            scope,
            bias=shapes.bias,
            cuts={"in_proj": join(inner_cut, channel_cut, head_cut)},
        )
        self.conv_weight = self.declare(
            "conv1d.weight",
            scope.empty(channels, shapes.conv_width),
            place=lambda weight: place_whole(weight.unsqueeze(1)),
            cut=channel_cut,
            dummy=dummy_taps,
        )
        self.rate = self.declare(
            "A_log", scope.empty_precise(heads), place=place_rates, cut=head_cut, dummy=_RATES
        )
        self.dt_bias = self.declare(
            "dt_bias", scope.empty_precise(heads), cut=head_cut, dummy=_TIME_STEPS
        )
        self.skip = self.declare("D", scope.empty_precise(heads), cut=head_cut)
        self.conv_bias = self.norm_weight = None
        if shapes.conv_bias:
            bias = scope.empty(channels)
            self.conv_bias = self.declare("conv1d.bias", bias, cut=channel_cut, dummy=0)
        if shapes.has_norm:
            weight = scope.empty_precise(inner)
            self.norm_weight = self.declare("norm.weight", weight, cut=inner_cut)
        self.weights = Mamba2Weights(
            conv=self.conv_weight,
            conv_bias=self.conv_bias,
            rate=self.rate,
            dt_bias=self.dt_bias,
            skip=self.skip,
            norm=None if self._shares_group else self.norm_weight,
            norm_eps=shapes.norm_eps,
            dt_limit=shapes.time_step_limit,
        )
        self.out = Linear(
            inner,
            (("out_proj", shapes.hidden_size),),
            scope,
            bias=shapes.bias,
            inputs=inner_cut,
        )
        sizes = MixerSizes(
            rule=RecurrentRule.MAMBA2,
            units=shapes.num_groups,
            group=heads // shapes.num_groups,
            shared=shapes.state_size,
            own=shapes.head_dim,
            taps=shapes.conv_width,
            gates_first=not shapes.norm_before_gate,
        )
        chunk = recurrent.choose_chunk(shapes.chunk_size)
        self.run_by(RecurrentOperation(sizes=sizes, order=scope.order, chunk=chunk))

    def _own_groups(self, shapes: Mamba2Shapes) -> Cut:
        """Returns this rank's groups. If there are fewer than ranks, each has the group of its
        heads."""
        ranks, path = self.scope.ranks, self.scope.path
        groups = ranks.share_few(shapes.num_groups, f"{path} n_groups")
        self._shares_group = shapes.num_groups < ranks.size
        if self._shares_group and shapes.has_norm and shapes.norm_before_gate:
            raise ConfigError(
                f"tensor_parallel_size={ranks.size}: {path} has n_groups={shapes.num_groups}, each "
                f"normed at once and before it is gated; use {shapes.num_groups}"
            )
        self._group, self._num_groups = groups.spans[0][0], shapes.num_groups
        return groups

    def _finish(self, mixed: Tensor) -> Tensor:
        """Norms a group whose heads are split over several ranks."""
        if not self._shares_group or self.norm_weight is None:
            return mixed
        scale, num_features = self.norm_weight, mixed.shape[1] * self.scope.ranks.size
        part = NormedPart(
            mixed, scale, column=self._group, num_features=num_features // self._num_groups
        )
        return norm_over_ranks([part], self.shapes.norm_eps, self._num_groups, self.scope)[0]
