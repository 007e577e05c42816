"""Mamba2: short convolution, SSD recurrence, grouped gated norm (Dao and Gu, arXiv 2405.21060).

Legend: T tokens, C hidden size, H heads, P head_dim, G groups, N state_size, Q split-K partials.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from milepost.errors import ConfigError
from milepost.kernels import recurrent
from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.products import Epilogue
from milepost.kernels.recurrent import Mamba2Weights, Recurrence, RecurrentOperation
from milepost.layers.context import Context, RecurrentSpec
from milepost.layers.linear import Linear
from milepost.layers.norm import NormedPart, norm_over_ranks
from milepost.layers.parameters import ModuleScope
from milepost.layers.weight_slots import (
    WeightSlots,
    cut_all,
    fill_matrix,
    place_rates,
    place_whole,
)
from milepost.parallel import Cut
from milepost.parallel.ranks import join


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


class Mamba2(nn.Module):
    """Mamba2 from `hidden` [T, C] to the output [T, C]; a `Part`. Reads and writes its states in
    the step's slots.

    One projection computes, in the published order: gates [H * P], x [H * P], B [G * N], C [G * N],
    time steps [H]. x, B and C pass through the convolution.
    """

    rotary = None

    def __init__(self, shapes: Mamba2Shapes, scope: ModuleScope) -> None:
        super().__init__()
        self.scope = scope
        what = f"{scope.path} num_heads"
        self.head_cut = scope.ranks.share(shapes.num_heads, what)
        self.inner_cut = self.head_cut.times(shapes.head_dim)
        self.channel_cut, shapes = self._split(shapes)
        self.shapes = shapes
        heads, channels, inner = shapes.num_heads, shapes.channels, shapes.inner_size
        self.projection = Linear(
            shapes.hidden_size,
            (("in_proj", inner + channels + heads),),
            scope,
            bias=shapes.bias,
            cuts={"in_proj": join(self.inner_cut, self.channel_cut, self.head_cut)},
        )
        self.conv_weight = scope.empty(channels, shapes.conv_width)
        self.conv_bias = scope.empty(channels) if shapes.conv_bias else None
        self.rate, self.dt_bias, self.skip = (scope.empty_precise(heads) for _ in range(3))
        self.norm_weight = scope.empty_precise(inner) if shapes.has_norm else None
        self.out = Linear(
            inner,
            (("out_proj", shapes.hidden_size),),
            scope,
            bias=shapes.bias,
            inputs=self.inner_cut,
        )
        self.operation = RecurrentOperation(
            recurrence=Recurrence(
                rule=Mamba2Weights,
                num_units=shapes.num_groups,
                num_heads=heads,
                shared=shapes.state_size,
                own=shapes.head_dim,
            ),
            conv_width=shapes.conv_width,
            order=scope.order,
            chunk=recurrent.choose_chunk(shapes.chunk_size),
        )

    def _split(self, shapes: Mamba2Shapes) -> tuple[Cut, Mamba2Shapes]:
        """Returns this rank's channels and sizes. If there are fewer groups than ranks, each rank
        has the group of its heads."""
        ranks, path = self.scope.ranks, self.scope.path
        groups = ranks.share_few(shapes.num_groups, f"{path} n_groups")
        self._shares_group = shapes.num_groups < ranks.size
        if self._shares_group and shapes.has_norm and shapes.norm_before_gate:
            raise ConfigError(
                f"tensor_parallel_size={ranks.size}: {path} has n_groups={shapes.num_groups}, each "
                f"normed at once and before it is gated; use {shapes.num_groups}"
            )
        self._group, self._num_groups = groups.spans[0][0], shapes.num_groups
        states = groups.times(shapes.state_size)
        rank_shapes = replace(shapes, num_heads=self.head_cut.size, num_groups=groups.size)
        return join(self.inner_cut, states, states), rank_shapes

    @property
    def spec(self) -> RecurrentSpec:
        shapes = self.shapes
        return RecurrentSpec(
            conv_shape=(shapes.channels, shapes.conv_width - 1),
            recurrent_shape=(shapes.num_heads, shapes.head_dim, shapes.state_size),
            grid=self.operation.chunk,
            record_size=shapes.channels + shapes.num_heads,
        )

    @property
    def reads(self) -> Emit:
        """The form of rows that the part reads."""
        return self.projection.reads

    def run(self, rows: Inputs, ctx: Context, number: int) -> Tensor:
        """Returns the output, or split-K partials [T, Q, C] of it."""
        weights = Mamba2Weights(
            conv=self.conv_weight,
            conv_bias=self.conv_bias,
            rate=self.rate,
            dt_bias=self.dt_bias,
            skip=self.skip,
            norm=None if self._shares_group else self.norm_weight,
            norm_eps=self.shapes.norm_eps,
            norm_before_gate=self.shapes.norm_before_gate,
            dt_limit=self.shapes.time_step_limit,
            order=self.scope.order,
        )
        mixed = recurrent.mix(
            self.projection(rows, launch_dependents=ctx.decodes),
            weights,
            ctx.layer_states(number),
            ctx.step.layouts[self.operation],
        )
        if self._shares_group and self.norm_weight is not None:
            mixed = self._norm(mixed, self.norm_weight)
        return self.out(mixed, epilogue=Epilogue.PARTIALS)

    def _norm(self, mixed: Tensor, scale: Tensor) -> Tensor:
        """Norms a group whose heads are split over several ranks."""
        num_features = mixed.shape[1] * self.scope.ranks.size // self._num_groups
        part = NormedPart(mixed, scale, column=self._group, num_features=num_features)
        return norm_over_ranks([part], self.shapes.norm_eps, self._num_groups, self.scope)[0]

    def placements(self) -> WeightSlots:
        heads, channels = self.head_cut, self.channel_cut
        tensors = {
            "A_log": cut_all(place_rates(self.rate), heads),
            "D": cut_all(place_whole(self.skip), heads),
            "dt_bias": cut_all(place_whole(self.dt_bias), heads),
            "conv1d.weight": cut_all(place_whole(self.conv_weight.unsqueeze(1)), channels),
        }
        if self.conv_bias is not None:
            tensors["conv1d.bias"] = cut_all(place_whole(self.conv_bias), channels)
        if self.norm_weight is not None:
            tensors["norm.weight"] = cut_all(place_whole(self.norm_weight), self.inner_cut)
        return {self.scope.full(name): place for name, place in tensors.items()}

    def fill(self, spread: float, generator: torch.Generator) -> None:  # noqa: ARG002
        fill_matrix(self.conv_weight, self.shapes.conv_width**-0.5, generator)
        # Half-lives range from a few tokens to thousands, as in trained models.
        self.rate.uniform_(-16, -1, generator=generator)
        self.dt_bias.uniform_(-7, -2, generator=generator)
        self.skip.fill_(1)
        if self.conv_bias is not None:
            self.conv_bias.zero_()
        if self.norm_weight is not None:
            self.norm_weight.fill_(1)
