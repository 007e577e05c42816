"""Matrices of a mixture's experts, in any form, and the checkpoint's tensors that fill them.

Legend: O outputs, I inputs, X experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from milepost.kernels import products
from milepost.kernels.products.forms import Form
from milepost.layers.weight_slots import (
    Rows,
    WeightSlot,
    WeightSlots,
    cut_all,
    cut_inputs,
    cut_one,
    cut_outputs,
)
from milepost.parallel import Cut
from milepost.parallel.ranks import join

if TYPE_CHECKING:
    from milepost.layers.parameters import ModuleScope
    from milepost.layers.weights import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a mixture's tensors in a checkpoint, if they differ from family to family.

    Experts with two projections (up and down) use squared ReLU; those with three are SwiGLU. The
    gate and up projections may share a name: then one tensor holds both, in this order.
    """

    router: str = "gate"
    bias: str = "gate.e_score_correction_bias"
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Projections of routed experts, if each expert has its own tensors."""
    single: str = "experts"
    """Path of these experts; each has its own path below it, named by its number."""
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    """Stacked tensors of all routed experts, if there are any: all projections but the last, and
    the last."""
    shared: str = "shared_expert"
    shared_projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")


USUAL_NAMES = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """Sizes of a mixture's experts, as they are stored in memory."""

    hidden_size: int
    size: int
    """Number of hidden units of an expert."""
    num_experts: int
    num_shared: int
    """Number of experts after the routed ones; together they are the checkpoint's shared expert."""
    experts: Cut
    """The part of the checkpoint's experts that is stored here."""
    units: Cut
    """The units that are kept of each expert."""
    shared_units: Cut
    """The units that are kept of the shared expert."""

    @property
    def num_weights(self) -> int:
        """Number of weights of one expert: gate, up and down projections."""
        return 3 * self.hidden_size * self.size

    @property
    def numbers(self) -> Iterator[tuple[int, int]]:
        """Pairs of each expert's index here and its number in the checkpoint."""
        ((first, count),) = self.experts.spans
        return zip(range(count), range(first, first + count), strict=True)


def shapes_of(
    sizes: ExpertSizes, names: ExpertNames, block: int
) -> tuple[tuple[tuple[int, ...], int], tuple[tuple[int, ...], int]]:
    """Returns the shapes of the experts' two matrices, each with the number of inputs of a
    projection in the checkpoint: first gate and up projections, or up projections alone; then down
    projections. Units are padded to whole blocks."""
    count, size = sizes.num_experts + sizes.num_shared, -(-sizes.size // block) * block
    num_rows = (len(names.projections) - 1) * size
    return (
        ((count, num_rows, sizes.hidden_size), sizes.hidden_size),
        ((count, sizes.hidden_size, size), sizes.size),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A projection of every expert, or several in one tensor."""

    name: str
    weight: Weight
    rows: Rows
    outputs: Cut
    """The outputs that are kept."""
    inputs: Cut
    num_parts: int
    """Number of projections with units for outputs; 0 if the units are inputs."""

    def place(self, expert: int, path: str) -> WeightSlots:
        return self.weight.place_projection(self.rows, (expert,), path)


class Experts(nn.Module):
    """Experts of a mixture. The gate and up projections of an expert, or its up projection alone,
    share one matrix, `up`. Units that pad an expert to whole blocks are zeros."""

    can_be_stacked: ClassVar[bool] = False
    """Whether a checkpoint may have one tensor for all experts."""

    def __init__(
        self, sizes: ExpertSizes, names: ExpertNames, scope: ModuleScope, up: Weight, down: Weight
    ) -> None:
        super().__init__()
        self.sizes, self.names, self.scope, self.up, self.down = sizes, names, scope, up, down
        self.reads = products.reads(up.form)
        """The form of rows that the experts read."""
        self._clear_padding()

    @property
    def forms(self) -> tuple[Form, Form]:
        """The forms of the matrices [X, O, I] before and after the activation."""
        return self.up.form, self.down.form

    def placements(self) -> WeightSlots:
        """Returns placements keyed by full names: of tensors with all experts, where the checkpoint
        stacks them, or of each expert's own; and those of the shared expert."""
        placements = self._place_shared()
        names, units = self.names.projections, self.sizes.units
        up, down = self.names.stacked
        stacked_up, stacked_down = self._projections((*(up,) * (len(names) - 1), down), units)
        *ups, last = self._projections(names, units)
        for stacked, single in ((stacked_up, ups), (stacked_down, [last])):
            if self.can_be_stacked and self.scope.has(stacked.name):
                placements |= self._place_stacked(stacked)
            else:
                placements |= self._place_singly(single)
        return placements

    def _place_singly(self, projections: list[Projection]) -> WeightSlots:
        """Places projections that have one tensor per expert."""
        placements: WeightSlots = {}
        for expert, number in self.sizes.numbers:
            for each in projections:
                path = self.scope.full(f"{self.names.single}.{number}.{each.name}")
                placements |= _cut(each, path, each.place(expert, path))
        return placements

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for weight in (self.up, self.down):
            weight.fill(spread, generator)
        self._clear_padding()

    def _clear_padding(self) -> None:
        size, padded = self.sizes.size, self._padded_size
        if padded > size:
            for first in range(size, self.up.form.num_outputs, padded):
                self.up.clear(first, padded - size)

    @property
    def _padded_size(self) -> int:
        return self.up.form.num_outputs // (len(self.names.projections) - 1)

    def _projections(self, names: tuple[str, ...], units: Cut) -> list[Projection]:
        """Returns the projections of an expert whose `units` are kept; the last is the down
        projection. Those of one name share a tensor."""
        sizes, (*firsts, last) = self.sizes, names
        padded = torch.arange(len(firsts) * self._padded_size).chunk(len(firsts))
        every = [(name, rows[: sizes.size]) for name, rows in zip(firsts, padded, strict=True)]
        whole = Cut.all_of(sizes.hidden_size)
        projections = []
        for name in dict.fromkeys(firsts):
            parts = [rows for part_name, rows in every if part_name == name]
            projections.append(
                Projection(
                    name=name,
                    weight=self.up,
                    rows=Rows(torch.cat(parts)),
                    outputs=join(*[units] * len(parts)),
                    inputs=whole,
                    num_parts=len(parts),
                )
            )
        out = Rows(torch.arange(sizes.hidden_size))
        down = Projection(
            name=last, weight=self.down, rows=out, outputs=whole, inputs=units, num_parts=0
        )
        return [*projections, down]

    def _place_shared(self) -> WeightSlots:
        """Places the shared expert, if it is stored among the others, evenly split over the experts
        that it is stored as."""
        placements: WeightSlots = {}
        first, count = self.sizes.num_experts, self.sizes.num_shared
        if not count:
            return placements
        for each in self._projections(self.names.shared_projections, self.sizes.shared_units):
            path = self.scope.full(f"{self.names.shared}.{each.name}")
            slots = [each.place(expert, path) for expert in range(first, first + count)]
            tensors = slots[0]
            if count > 1:
                tensors = {
                    name: _spread([tensors_of[name] for tensors_of in slots], each)
                    for name in tensors
                }
            placements |= _cut(each, path, tensors)
        return placements

    def _place_stacked(self, each: Projection) -> WeightSlots:
        """Places the tensors, values and perhaps scales, with a projection of all experts."""
        placements = {}
        for tensor, slot in self._stack(each).items():
            path = self.scope.full(f"{each.name}{tensor.removeprefix('weight')}")
            axes = each.weight.axes[tensor].stacked(1)
            placed = cut_one(slot, axes.outputs, each.outputs, path)
            placed = cut_one(placed, axes.inputs, each.inputs, path)
            placements[path] = cut_all(placed, self.sizes.experts)
        return placements

    def _stack(self, each: Projection) -> WeightSlots:
        """Returns places for such tensors by their names within a projection; experts are stored
        one by one."""
        count = self.sizes.num_experts
        slots = [each.place(expert, each.name) for expert in range(count)]

        def store(tensor: str, values: Tensor) -> None:
            for expert_slots, value in zip(slots, values, strict=True):
                expert_slots[tensor].store(value)

        return {
            tensor: WeightSlot((count, *slot.shape), partial(store, tensor), types=slot.types)
            for tensor, slot in slots[0].items()
        }


def _cut(each: Projection, path: str, tensors: WeightSlots) -> WeightSlots:
    """Restricts the placements of a projection's tensors to what is kept; returns them keyed by
    full names."""
    cut_outputs(tensors, each.weight.axes, each.outputs, path)
    cut_inputs(tensors, each.weight.axes, each.inputs, path)
    return {f"{path}.{tensor}": slot for tensor, slot in tensors.items()}


def _spread(slots: list[WeightSlot], each: Projection) -> WeightSlot:
    """Places a raw tensor whose units are split evenly over experts with these slots."""
    dim, num_parts = (0, each.num_parts) if each.num_parts else (1, 1)
    shape = list(slots[0].shape)
    shape[dim] *= len(slots)

    def store(values: Tensor) -> None:
        by_expert = values.unflatten(dim, (num_parts, len(slots), -1))
        for number, slot in enumerate(slots):
            slot.store(by_expert.select(dim + 1, number).flatten(dim, dim + 1))

    return WeightSlot(tuple(shape), store)
