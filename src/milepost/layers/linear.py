"""A linear projection, which may stack several of a checkpoint's projections.

Legend: T tokens, I inputs, O outputs, P split-K partials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from milepost.kernels import products
from milepost.kernels.layout.emit import Activations, Emit, Inputs, Projected, as_activations
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products import Epilogue, Form, Raw
from milepost.layers.parameters import ModuleScope, module_list
from milepost.layers.weight_slots import (
    WeightSlot,
    WeightSlots,
    cut_all,
    cut_inputs,
    cut_outputs,
    place_scattered,
)
from milepost.layers.weights import Precision, RawWeight, Weight
from milepost.parallel import Cut

Sections = Sequence[tuple[str | None, int]]
"""Sections of outputs, in order: the checkpoint's projection that each belongs to, and its number
of outputs. A projection may have several sections; a section without a name is padding."""


@dataclass(frozen=True, slots=True)
class _Section:
    name: str | None
    group: int
    first: int
    """First row in the group's matrix."""
    start: int
    """First index among all outputs."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Begun:
    """A product that is computed in the launch of the preceding norm."""

    weight: Tensor
    """[O, I]"""
    target: Tensor
    """[1, O], its place among the projection's outputs."""
    projected: Projected
    """The output buffer that is handed on with the row."""


class Linear(nn.Module):
    """A linear map from rows [T, I] to [T, O], with an optional bias.

    Projections of equal precision share one matrix, section after section. `orders` describe
    projections whose outputs the checkpoint stores in another order: the checkpoint's output i is
    output order[i] of the sections. `weight` may be a matrix that another module fills (tied).

    With several ranks, sections hold this rank's outputs, and `cuts` say which part of each
    projection it keeps. If it keeps only some `inputs`, the sum over all ranks is the output.
    """

    def __init__(
        self,
        num_inputs: int,
        sections: Sections,
        scope: ModuleScope,
        *,
        bias: bool = False,
        orders: Mapping[str, Tensor] | None = None,
        weight: Weight | None = None,
        cuts: Mapping[str, Cut] | None = None,
        inputs: Cut | None = None,
    ) -> None:
        super().__init__()
        self.scope = scope
        self.num_weights = num_inputs * sum(count for _, count in sections)
        """Number of weights that each token is multiplied by."""
        self.is_tied = weight is not None
        self._orders = orders or {}
        self._cuts, self._inputs = cuts or {}, inputs
        precisions: list[Precision] = []
        sizes: list[int] = []
        start = 0
        self._sections: list[_Section] = []
        for name, count in sections:
            precision = scope.precision(name) if name is not None else precisions[-1]
            if precision not in precisions:
                precisions.append(precision)
                sizes.append(0)
            group = precisions.index(precision)
            self._sections.append(_Section(name, group, sizes[group], start, count))
            sizes[group] += count
            start += count
        self._num_outputs = start
        made: list[Weight] = [
            precision.matrix(size, num_inputs, scope) if weight is None else weight
            for precision, size in zip(precisions, sizes, strict=True)
        ]
        self.weights = module_list(made)
        self._has_bias = bias
        # An output that is summed over all ranks gets its bias from one rank only.
        bias = bias and (scope.ranks.rank == 0 or inputs is None or inputs.is_whole)
        self.biases = nn.ParameterList(scope.empty(size) for size in sizes) if bias else None
        self._weight = made[0]
        self._bias = None if self.biases is None else self.biases[0]
        self._is_fused = len(made) == 1
        self.reads = Emit.joined(products.reads(each.form) for each in made)
        """The form of rows that its products read."""
        self.is_raw = all(isinstance(each, RawWeight) for each in made)
        """Whether all of its weights are in the model's dtype."""
        for section in self._sections:
            if section.name is None:
                made[section.group].clear(section.first, section.count)

    @property
    def weight_forms(self) -> list[Form]:
        """The form of each of its weights."""
        return [weight.form for weight in self.weights]

    def multiply(
        self,
        rows: Inputs,
        *,
        epilogue: Epilogue = Epilogue.NONE,
        launch_dependents: bool = True,
        order: SumOrder = SumOrder.FREE,
    ) -> Tensor:
        """Multiplies `rows` [T, I] by the projection and applies the epilogue: see
        `products.multiply`. A projection with several matrices returns whole outputs, not
        partials."""
        form = self.form
        how: dict[str, Any] = {"launch_dependents": launch_dependents, "order": order}
        if form is not None and self._made_of(rows) is None:
            return products.multiply(rows, form, self._bias, epilogue=epilogue, **how)
        return self._multiply_apart(rows, **how)

    __call__ = multiply
    """Bypasses `nn.Module.__call__`: there are no hooks to run, and it costs as much as a small
    operation."""

    def multiply_gated(
        self, rows: Inputs, *, emit: Emit = Emit.VALUES, order: SumOrder = SumOrder.FREE
    ) -> Inputs:
        """Multiplies `rows` [T, I] by the projection of gates and ups: see
        `products.multiply_gated`."""
        form = self.form
        if form is not None and self._made_of(rows) is None:
            return products.multiply_gated(rows, form, self._bias, emit=emit, order=order)
        return products.gate(self._multiply_apart(rows, order=order), emit, order=self.scope.order)

    def _multiply_apart(self, rows: Inputs, **how: Any) -> Tensor:
        """Multiplies by one matrix after another, skipping the product that came with the rows."""
        output, groups = self._made_of(rows), list(range(len(self.weights)))
        if output is not None:
            groups.pop()
        else:
            made = as_activations(rows)
            output = made.new_empty(*made.shape[:-1], self._num_outputs)
        biases = self.biases or [None] * len(self.weights)
        beside = self._beside if len(groups) > 1 else None
        if beside is not None:
            products.multiply_beside(rows, self._weight.form, beside, output, **how)
            return output
        for group in groups:
            form, bias = self.weights[group].form, biases[group]
            place = self._place_of(group)
            if place is not None:
                products.multiply(rows, form, bias, into=output.narrow(-1, *place), **how)
                continue
            product = products.multiply(rows, form, bias, **how)
            for section in self._sections:
                if section.group == group:
                    piece = product.narrow(-1, section.first, section.count)
                    output.narrow(-1, section.start, section.count).copy_(piece)
        return output

    def _made_of(self, rows: Inputs) -> Tensor | None:
        """Returns the outputs that came with the rows, where the last matrix's product is already
        in place; None if there are none."""
        projected = rows.projected if isinstance(rows, Activations) else None
        return projected.output if projected is not None and projected.owner is self else None

    def begin(self, row: Tensor) -> Begun | None:
        """Returns the product that the norm of one row like `row` should compute too: that of the
        last matrix, if it is small and raw and its outputs are adjacent. Next to a large FP8
        matrix, that would cost more than a launch after the large product, whose end it
        overlaps."""
        place, form = self._place_of(len(self.weights) - 1), self.weights[-1].form
        if place is None or not isinstance(form, Raw) or self._has_bias:
            return None
        if self.reads is not Emit.VALUES or not products.norms_too(row, form):
            return None
        output = row.new_empty(*row.shape[:-1], self._num_outputs)
        projected = Projected(owner=self, output=output)
        return Begun(weight=form.values, target=output.narrow(-1, *place), projected=projected)

    @property
    def form(self) -> Form | None:
        """The form of the matrix, or None if there are several."""
        return self._weight.form if self._is_fused else None

    @property
    def _beside(self) -> Raw | None:
        """The form of the second of exactly two matrices if it is raw and has the last outputs;
        otherwise None."""
        form, place = self.weights[-1].form, self._place_of(1)
        is_last = place is not None and sum(place) == self._num_outputs
        is_plain = len(self.weights) == 2 and not self._has_bias
        return form if is_plain and is_last and isinstance(form, Raw) else None

    def _place_of(self, group: int) -> tuple[int, int] | None:
        """Returns the first of a matrix's outputs among all, and their number, or None if they are
        not adjacent."""
        members = [section for section in self._sections if section.group == group]
        start, count = members[0].start, sum(section.count for section in members)
        return (start, count) if members[-1].start + members[-1].count == start + count else None

    def pack(self) -> None:
        """See `Weight.pack`."""
        for weight in self.weights:
            weight.pack()

    def placements(self) -> WeightSlots:
        """Places each projection's weight tensors and bias."""
        placements: WeightSlots = {}
        names = dict.fromkeys(section.name for section in self._sections)
        for name in () if self.is_tied else names:
            if name is None:
                continue
            members = [section for section in self._sections if section.name == name]
            rows = torch.cat([torch.arange(s.first, s.first + s.count) for s in members])
            rows = rows[self._orders[name]] if name in self._orders else rows
            group, prefix = members[0].group, self.scope.full(name)
            tensors = self._place(name, group, rows, prefix)
            placements |= {f"{prefix}.{tensor}": place for tensor, place in tensors.items()}
        return placements

    def _place(self, name: str, group: int, rows: Tensor, path: str) -> WeightSlots:
        """Returns places for the projection's tensors, keyed by their names within it."""
        weight, cut = self.weights[group], self._cuts.get(name)
        tensors = weight.place(rows, path)
        if cut is not None and not cut.is_whole:
            cut_outputs(tensors, weight.axes, cut, path)
        if self._inputs is not None and not self._inputs.is_whole:
            cut_inputs(tensors, weight.axes, self._inputs, path)
        if self.biases is not None:
            place = place_scattered(self.biases[group], rows)
            tensors["bias"] = place if cut is None else cut_all(place, cut)
        elif self._has_bias:
            tensors["bias"] = WeightSlot((len(rows),), len)
        return tensors

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for weight in () if self.is_tied else self.weights:
            weight.fill(spread, generator)
        for bias in self.biases or ():
            bias.zero_()
