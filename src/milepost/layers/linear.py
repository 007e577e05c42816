"""A linear projection, which may be several of a checkpoint's projections below one another.

Legend: T tokens, I inputs, O outputs, P split-K partials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from milepost.kernels import linear, norm
from milepost.layers.begun import Begun, find
from milepost.layers.parameters import ParameterKind
from milepost.layers.placements import (
    Placement,
    Placements,
    cut_all,
    cut_inputs,
    cut_outputs,
    place_scattered,
)
from milepost.layers.weights import RawWeight, Weight
from milepost.parallel import Cut

Sections = Sequence[tuple[str | None, int]]
"""Outputs in their order: the checkpoint's projection that they belong to, and how many. A
projection may have several sections; what has no name is padding."""


@dataclass(frozen=True, slots=True)
class _Section:
    name: str | None
    group: int
    first: int
    """Row in the group's matrix."""
    start: int
    """Place among all outputs."""
    count: int


class Linear(nn.Module):
    """`hidden` [T, I] to [T, O], with an optional bias.

    Projections of equal precision stand in one matrix, section after section. `orders` are for
    projections that the checkpoint has in another order: its output i is the order[i]-th of its
    sections' outputs. A `weight` may be given that is filled elsewhere (tied).

    Of several ranks, sections have this one's outputs: what it keeps of each projection is in
    `cuts`. If it keeps some `inputs` only, what all ranks return adds up to the outputs.
    """

    def __init__(
        self,
        num_inputs: int,
        sections: Sections,
        kind: ParameterKind,
        *,
        bias: bool = False,
        orders: Mapping[str, Tensor] | None = None,
        weight: Weight | None = None,
        cuts: Mapping[str, Cut] | None = None,
        inputs: Cut | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.num_weights = num_inputs * sum(count for _, count in sections)
        """That a token is multiplied by."""
        self.is_tied = weight is not None
        self._orders = orders or {}
        self._cuts, self._inputs = cuts or {}, inputs
        precisions, sizes, start = [], [], 0
        self._sections = []
        for name, count in sections:
            precision = kind.precision(name) if name is not None else precisions[-1]
            if precision not in precisions:
                precisions.append(precision)
                sizes.append(0)
            group = precisions.index(precision)
            self._sections.append(_Section(name, group, sizes[group], start, count))
            sizes[group] += count
            start += count
        made = [
            precision.matrix(size, num_inputs, kind) if weight is None else weight
            for precision, size in zip(precisions, sizes, strict=True)
        ]
        self.weights = nn.ModuleList(made)
        self._has_bias = bias
        # What is added up over all ranks has its bias once.
        bias = bias and (kind.ranks.rank == 0 or inputs is None or inputs.is_whole)
        self.biases = nn.ParameterList(kind.empty(size) for size in sizes) if bias else None
        self._weight, self._bias = made[0], self.biases[0] if bias else None
        self._is_fused = len(made) == 1
        for section in self._sections:
            if section.name is None:
                made[section.group].clear(section.first, section.count)

    def forward(self, hidden: Tensor, *, lets_next_start: bool = True) -> Tensor:
        """See `linear.multiply`."""
        begun = find(hidden, self)
        if begun is not None and self._is_fused:
            return begun.output
        if self._is_fused:
            return self._weight.multiply(hidden, self._bias, lets_next_start=lets_next_start)
        output = self._new_output(hidden) if begun is None else begun.output
        if begun is None and self._multiply_beside(output, hidden):
            return output
        biases = self.biases or [None] * len(self.weights)
        for group, (weight, bias) in enumerate(zip(self.weights, biases, strict=True)):
            if begun is not None and group == len(self.weights) - 1:
                continue
            own, start, count = self._place_of(group)
            if own[-1].start + own[-1].count == start + count:
                target = output.narrow(-1, start, count)
                weight.multiply_into(target, hidden, bias, lets_next_start=lets_next_start)
                continue
            product = weight.multiply(hidden, bias, lets_next_start=lets_next_start)
            for section in own:
                piece = product.narrow(-1, section.first, section.count)
                output.narrow(-1, section.start, section.count).copy_(piece)
        return output

    def _multiply_beside(self, output: Tensor, hidden: Tensor) -> bool:
        """Whether one launch multiplied both of two matrices, the second of which is raw and has
        the last outputs. Of three the second has not."""
        last = self.weights[-1]
        values = last.values if isinstance(last, RawWeight) else None
        if values is None or self._has_bias:
            return False
        _, start, count = self._place_of(1)
        if start + count != output.shape[-1]:
            return False
        return self._weight.multiply_beside(output, hidden, values)

    def _new_output(self, hidden: Tensor) -> Tensor:
        return hidden.new_empty(*hidden.shape[:-1], self._num_outputs)

    @property
    def _num_outputs(self) -> int:
        return self._sections[-1].start + self._sections[-1].count

    def _place_of(self, group: int) -> tuple[list[_Section], int, int]:
        """Sections of a matrix, where the first begins, and how many outputs they have."""
        own = [section for section in self._sections if section.group == group]
        return own, own[0].start, sum(section.count for section in own)

    def begin(self, hidden: Tensor) -> Begun | None:
        """What the norm that makes one row like `hidden` multiplies on the way: the last matrix,
        if it is small and raw and its outputs stand side by side. Before a large one of FP8 that
        would cost more than behind it, where it runs while that one ends."""
        if self._has_bias or self.rounds_rows:
            return None
        group = len(self.weights) - 1
        own, start, count = self._place_of(group)
        if own[-1].start + own[-1].count != start + count:
            return None
        last = self.weights[group]
        values = last.values if isinstance(last, RawWeight) else None
        if values is None or not norm.multiplies_too(hidden, values):
            return None
        output = self._new_output(hidden)
        target = output.narrow(-1, start, count)
        return Begun(owner=self, weight=values, target=target, output=output)

    def partials(self, hidden: Tensor) -> Tensor:
        """The same, or partials [T, P, O] of it, for whoever reads it to add up."""
        if self._is_fused and find(hidden, self) is None:
            return self._weight.partials(hidden, self._bias)
        return self.forward(hidden)

    def precise(self, hidden: Tensor) -> Tensor:
        """The same without a bias, unrounded, or partials of it."""
        if self._is_fused:
            return self._weight.multiply_precise(hidden)
        return self.forward(hidden)

    def gated(self, hidden: Tensor) -> Tensor:
        """SiLU of the first half of the outputs times the other half: [T, O / 2]."""
        if not self._is_fused or self._bias is not None:
            return norm.silu_mul(self.forward(hidden))
        return self._weight.multiply_gated(hidden)

    def takes_gated(self, num_tokens: int) -> bool:
        """Whether `partials_of_gated` costs less than `gated` before it."""
        is_plain = self._is_fused and self._bias is None
        return is_plain and self._weight.takes_gated(num_tokens)

    @property
    def rounds_rows(self) -> bool:
        """Whether its products round their rows to float8 in blocks."""
        return any(getattr(weight, "rounds_rows", False) for weight in self.weights)

    @property
    def is_raw(self) -> bool:
        """Whether all of its weights are in the model's type."""
        return all(isinstance(weight, RawWeight) for weight in self.weights)

    @property
    def only_rounds(self) -> bool:
        """Whether all of them do, so that rounded rows are enough."""
        return all(getattr(weight, "rounds_rows", False) for weight in self.weights)

    def partials_of_gated(self, gate_up: Tensor) -> Tensor:
        """`partials` of SiLU of the first half of `gate_up` [T, 2 * I] times the other half."""
        return self._weight.partials_of_gated(gate_up)

    __call__ = forward
    """There are no hooks to run, and a module's own call costs as much as a small operation."""

    def both(
        self, hidden: Tensor, other: Linear, other_hidden: Tensor, *, lets_next_start: bool
    ) -> tuple[Tensor, Tensor]:
        """What this and another Linear make of inputs of their own, in one launch where there is
        one."""
        values, others = self._values, other._values
        if values is not None and others is not None:
            both = linear.multiply_both((hidden, other_hidden), (values, others))
            if both is not None:
                return both
        return self(hidden), other(other_hidden, lets_next_start=lets_next_start)

    @property
    def _values(self) -> Tensor | None:
        """Of the one matrix, if it is no more than these."""
        weight, has_bias = self._weight, self._bias is not None
        is_plain = self._is_fused and not has_bias and isinstance(weight, RawWeight)
        return weight.values if is_plain else None

    def pack(self) -> None:
        """See `Weight.pack`."""
        for weight in self.weights:
            weight.pack()

    def placements(self) -> Placements:
        """Of each projection: its weight's tensors, and its bias."""
        placements: Placements = {}
        names = dict.fromkeys(section.name for section in self._sections)
        for name in () if self.is_tied else names:
            if name is None:
                continue
            own = [section for section in self._sections if section.name == name]
            rows = torch.cat([torch.arange(s.first, s.first + s.count) for s in own])
            rows = rows[self._orders[name]] if name in self._orders else rows
            group, prefix = own[0].group, self.kind.full(name)
            tensors = self._place(name, group, rows, prefix)
            placements |= {f"{prefix}.{tensor}": place for tensor, place in tensors.items()}
        return placements

    def _place(self, name: str, group: int, rows: Tensor, path: str) -> Placements:
        """The projection's tensors, by their names in it."""
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
            tensors["bias"] = Placement((len(rows),), len)
        return tensors

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for weight in () if self.is_tied else self.weights:
            weight.fill(spread, generator)
        for bias in self.biases or ():
            bias.zero_()
