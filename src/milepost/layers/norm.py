"""Root mean square norms over the last dimension. Sums and scales are float32, or float64 in a
float64 model.

Legend: N normed dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from milepost.kernels import norm
from milepost.kernels.layout.emit import Activations, Emit, Inputs, values_of
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import cast, in_blocks
from milepost.layers.linear import Begun
from milepost.layers.parameters import ModuleScope, ParameterModule
from milepost.layers.weight_slots import WeightSlot, WeightSlots, cut_all
from milepost.parallel import Cut, Ranks

_ROWS = 512
"""Rows whose squares are added up at a time where bits must not depend on their number."""


class StreamNorm(Protocol):
    """Makes a block's input from the residual stream: a norm, or more. It is also a module."""

    ranks: Ranks

    def add(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        *,
        emit: Emit = Emit.VALUES,
        begun: Begun | None = None,
        order: SumOrder = SumOrder.FREE,
    ) -> tuple[Tensor, Inputs]:
        """Adds the output of the part before to the stream. Returns the stream and what the next
        part reads of it: see `RMSNorm.add`."""
        ...


class RMSNorm(ParameterModule):
    """Root mean square norm whose outputs are scaled by `offset` + w, with w from the checkpoint;
    `offset` is 1 for a zero-centred norm.

    `add` multiplies the layer's output by `multiplier` before adding it to the residual stream, and
    norms it by `of_output` before that, where each output has a norm of its own.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        scope: ModuleScope,
        *,
        offset: float = 0.0,
        multiplier: float = 1.0,
        of_output: RMSNorm | None = None,
    ) -> None:
        super().__init__(scope)
        assert of_output is None or of_output.eps == eps, "one launch norms by one eps"
        self.of_output = of_output
        self.eps: float = eps
        self.multiplier = multiplier
        place = partial(place_scale, offset=offset)
        self.scale = self.declare("weight", scope.empty_precise(size), place=place)
        self.ranks = scope.ranks

    def forward(self, hidden: Tensor) -> Tensor:
        """Norms `hidden` [..., N] and returns the result in its dtype."""
        return norm.norm(hidden, self.scale, self.eps)

    __call__ = forward  # as for a Linear

    def add(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        *,
        emit: Emit = Emit.VALUES,
        begun: Begun | None = None,
        order: SumOrder = SumOrder.FREE,
    ) -> tuple[Tensor, Inputs]:
        """Adds a layer's output to the residual stream and norms it. Returns the sum [T, N] and its
        norm, in the form that `emit` asks for; the product that was `begun` is computed in the same
        launch. Rows are added up in `order`, or in the model's own if that is stricter.

        `hidden` is [T, N]; `delta` is [T, N], partials [T, P, N], or None. Partials are summed over
        all ranks.
        """
        of_output = self.of_output if delta is not None else None
        if not self.ranks.is_alone and delta is not None and delta.dim() == 3:
            if of_output is None:
                return self.ranks.add_norm(hidden, delta, self.scale, self.eps, self.multiplier)
            delta = over_ranks(delta, self.ranks)
        how = self.scale, self.eps, self.multiplier
        if begun is not None:
            if of_output is not None and delta is not None:
                delta = of_output.norm_sum(delta)
            product = begun.weight, begun.target
            total, normed = norm.add_norm_and_multiply(hidden, delta, *how, *product)
            return total, Activations(values=normed, projected=begun.projected)
        delta_scale = None if of_output is None else of_output.scale
        order = max(order, self.scope.order)
        return norm.add_norm(hidden, delta, *how, delta_scale=delta_scale, emit=emit, order=order)

    def norm_sum(self, output: Tensor) -> Tensor:
        """Norms an output [T, N], or the sum of its partials [T, P, N], in one launch; `multiplier`
        is not applied."""
        first, rest = output, None
        if output.dim() == 3:
            first, rest = output[:, 0], output[:, 1:] if output.shape[1] > 1 else None
        order = self.scope.order
        return values_of(norm.add_norm(first, rest, self.scale, self.eps, order=order)[1])


@dataclass(frozen=True, slots=True)
class NormedPart:
    """Features whose norm spans other ranks too."""

    values: Tensor
    """[T, N]"""
    scale: Tensor
    """[N]"""
    column: int
    """Index of the part among all parts that are normed."""
    num_features: int
    """Number of features over all ranks; a feature that several ranks have counts once for each."""


class HeadNorms(ParameterModule):
    """Scales of query and key heads: `scale` [heads, head_dim].

    Each of the `groups` (name in the checkpoint -> heads of this rank) has its own tensor: one head
    long for all its heads, or as long as all heads together (`is_whole`: all of them are normed as
    one, by `norm_over_ranks`).
    """

    def __init__(
        self,
        groups: Mapping[str, Cut],
        head_dim: int,
        scope: ModuleScope,
        *,
        offset: float,
        is_whole: bool,
    ) -> None:
        super().__init__(scope)
        self.groups, self.is_whole = groups, is_whole
        sizes = [heads.size for heads in groups.values()]
        scale = scope.empty_precise(sum(sizes), head_dim)

        def slots() -> WeightSlots:
            placements, parts = {}, scale.split(sizes)
            for (name, heads), part in zip(groups.items(), parts, strict=True):
                slot = place_scale(part.view(-1) if is_whole else part, offset)
                cut = heads.times(head_dim)
                placements[f"{name}.weight"] = cut_all(slot, cut) if is_whole else slot
            return placements

        self.scale = self.declare_slots(slots, scale)


def place_scale(scale: Tensor, offset: float) -> WeightSlot:
    """Places a tensor that is all of `scale` [..., N], or each of its rows, minus `offset`."""

    def store(weight: Tensor) -> None:
        # Adds in the scale's dtype: bfloat16 cannot represent 1 + w for a small w.
        scale.copy_(weight.to(scale.dtype) + offset)

    return WeightSlot(tuple(scale.shape[-1:]), store)


def over_ranks(delta: Tensor, ranks: Ranks) -> Tensor:
    """Returns a layer's output [T, N], or partials [T, P, N] of it on one rank. Partials of several
    ranks are summed over P and all ranks."""
    is_whole = ranks.is_alone or delta.dim() == 2
    return delta if is_whole else ranks.all_reduce(delta.sum(1))


def norm_over_ranks(
    parts: Sequence[NormedPart], eps: float, num_columns: int, scope: ModuleScope
) -> list[Tensor]:
    """Returns norms [T, N] of `parts`, each over features that are split over the ranks. All ranks
    together have `num_columns` different parts."""
    wide = [cast(part.values, part.scale.dtype) for part in parts]
    # Ranks exchange rows in whole pieces of 16 bytes.
    squares = wide[0].new_zeros(len(wide[0]), num_columns + -num_columns % 4)
    for part, values in zip(parts, wide, strict=True):
        # On a GPU torch adds a row up by as many threads as the number of rows leaves for it.
        is_split = scope.order.is_fixed and values.is_cuda
        sums = in_blocks(_add_squares, values, size=_ROWS) if is_split else _add_squares(values)
        squares[:, part.column] = sums / part.num_features
    means = scope.ranks.all_reduce(squares)
    return [
        cast(values * (means[:, part.column, None] + eps).rsqrt() * part.scale, part.values.dtype)
        for part, values in zip(parts, wide, strict=True)
    ]


def _add_squares(values: Tensor) -> Tensor:
    return values.square().sum(-1)
