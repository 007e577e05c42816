"""Code that the quantised forms share.

Legend: T tokens, I inputs, O outputs, X experts, N experts per token, P split-K partials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from milepost.kernels import products
from milepost.kernels.products.forms.quantised import BLOCK, Quantised
from milepost.layers.parameters import ModuleScope
from milepost.layers.weight_slots import WeightSlots, cut_inputs, cut_outputs
from milepost.layers.weights import ExpertNames, ExpertSizes
from milepost.parallel import Axes, Cut
from milepost.parallel.ranks import join


def empty(scope: ModuleScope, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Returns an unfilled parameter of a quantised form."""
    values = torch.empty(shape, dtype=dtype, device=scope.device)
    return nn.Parameter(values, requires_grad=False)


def ones(scope: ModuleScope, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Returns scales of 1. Those of padding are never filled, so they must have a defined value."""
    values = torch.ones(shape, dtype=dtype, device=scope.device)
    return nn.Parameter(values, requires_grad=False)


class Stack(Protocol):
    """Matrices of experts, or one matrix, in a quantised form. It is also a module."""

    @property
    def axes(self) -> Mapping[str, Axes]:
        """See `Weight`."""
        ...

    @property
    def form(self) -> Quantised:
        """The form that the kernels read."""
        ...

    def place_projection(self, rows: Rows, at: tuple[int, ...], path: str) -> WeightSlots:
        """Returns placements for the tensors of a projection with these `rows` of the matrix `at`;
        `path` is the projection's."""
        ...

    def clear(self, first: int, count: int) -> None:
        """See `Weight`."""
        ...

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """See `Weight`."""
        ...


class QuantisedMatrix(nn.Module):
    """A `Weight` whose projections share one matrix [O, I]: a `stack` without experts."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    @property
    def axes(self) -> Mapping[str, Axes]:
        return self.stack.axes

    @property
    def form(self) -> Quantised:
        return self.stack.form

    def place(self, rows: Tensor, path: str) -> WeightSlots:
        return self.stack.place_projection(Rows(rows), (), path)

    def clear(self, first: int, count: int) -> None:
        self.stack.clear(first, count)

    def fill(self, spread: float, generator: torch.Generator) -> None:
        self.stack.fill(spread, generator)

    def pack(self) -> None:
        """Does nothing: quantised weights are small already."""


class QuantisedExperts(nn.Module):
    """Quantised `Experts`. The gate and up projections of an expert share one matrix, `up`. Units
    that pad an expert to whole blocks are zeros."""

    def __init__(
        self, sizes: ExpertSizes, names: ExpertNames, scope: ModuleScope, up: Stack, down: Stack
    ) -> None:
        super().__init__()
        self.sizes, self.names, self.scope, self.up, self.down = sizes, names, scope, up, down
        self.reads = products.reads(up.form)
        self._clear_padding()

    def _clear_padding(self) -> None:
        size, padded = self.sizes.size, padded_size(self.sizes)
        for first in range(size, self.up.form.num_outputs, padded):
            self.up.clear(first, padded - size)

    @property
    def forms(self) -> tuple[Quantised, Quantised]:
        return self.up.form, self.down.form

    def placements(self) -> WeightSlots:
        return place_experts(self.sizes, self.names, self.scope, self.up, self.down)

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for stack in (self.up, self.down):
            stack.fill(spread, generator)
        self._clear_padding()


def padded_size(sizes: ExpertSizes) -> int:
    """Returns an expert's units, rounded up to the whole blocks that kernels need."""
    return -(-sizes.size // BLOCK) * BLOCK


def shapes_of(
    sizes: ExpertSizes, names: ExpertNames
) -> tuple[tuple[tuple[int, ...], int], tuple[tuple[int, ...], int]]:
    """Returns the shapes of two stacks, each with the number of inputs of a projection in the
    checkpoint: first gate and up projections, or up projections alone; then down projections."""
    count, size = sizes.num_experts + sizes.num_shared, padded_size(sizes)
    num_rows = (len(names.projections) - 1) * size
    return (
        ((count, num_rows, sizes.hidden_size), sizes.hidden_size),
        ((count, sizes.hidden_size, size), sizes.size),
    )


def unit_rows(sizes: ExpertSizes, count: int) -> list[Tensor]:
    """Returns the rows of `count` adjacent projections, without their padding."""
    return [part[: sizes.size] for part in torch.arange(count * padded_size(sizes)).chunk(count)]


def place_experts(
    sizes: ExpertSizes, names: ExpertNames, scope: ModuleScope, up: Stack, down: Stack
) -> WeightSlots:
    """Places experts that the checkpoint stores one by one, and the shared one."""
    placements = place_shared(sizes, names, scope, up, down)
    projections = _projections(sizes, names.projections, sizes.units, up, down)
    for expert, number in sizes.numbers:
        placements |= _place_expert(projections, scope.full(f"{names.single}.{number}"), expert)
    return placements


def place_shared(
    sizes: ExpertSizes, names: ExpertNames, scope: ModuleScope, up: Stack, down: Stack
) -> WeightSlots:
    """Places the shared expert, if it is stored among the others."""
    if not sizes.num_shared:
        return {}
    units = sizes.shared_units
    projections = _projections(sizes, names.shared_projections, units, up, down)
    return _place_expert(projections, scope.full(names.shared), sizes.num_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projection:
    """A projection that each expert has."""

    name: str
    stack: Stack
    rows: Rows
    outputs: Cut
    """The outputs that are kept."""
    inputs: Cut


def _projections(
    sizes: ExpertSizes, names: tuple[str, ...], units: Cut, up: Stack, down: Stack
) -> list[_Projection]:
    *firsts, last = names
    rows: dict[str, Tensor] = {}
    for name, part in zip(firsts, unit_rows(sizes, len(firsts)), strict=True):
        rows[name] = torch.cat((rows[name], part)) if name in rows else part
    whole = Cut.all_of(sizes.hidden_size)
    projections = []
    for name, part in rows.items():
        outputs = join(*[units] * (len(part) // sizes.size))
        projections.append(
            _Projection(name=name, stack=up, rows=Rows(part), outputs=outputs, inputs=whole)
        )
    out = Rows(torch.arange(sizes.hidden_size))
    return [
        *projections,
        _Projection(name=last, stack=down, rows=out, outputs=whole, inputs=units),
    ]


def _place_expert(projections: Sequence[_Projection], prefix: str, expert: int) -> WeightSlots:
    placements: WeightSlots = {}
    for each in projections:
        path = f"{prefix}.{each.name}"
        tensors = each.stack.place_projection(each.rows, (expert,), path)
        if not each.outputs.is_whole:
            cut_outputs(tensors, each.stack.axes, each.outputs, path)
        if not each.inputs.is_whole:
            cut_inputs(tensors, each.stack.axes, each.inputs, path)
        placements |= {f"{path}.{tensor}": place for tensor, place in tensors.items()}
    return placements


class Rows:
    """Row numbers of a projection: output i is row `index[i]` of its matrix.

    A mixture has thousands of projections with the same rows, one per expert, so properties of the
    rows are computed once and shared.
    """

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self.count = len(index)

    @cached_property
    def _span(self) -> slice | None:
        """The rows as a slice, or None if they are not adjacent."""
        first = int(self.index[0]) if self.count else 0
        is_span = torch.equal(self.index, torch.arange(first, first + self.count))
        return slice(first, first + self.count) if is_span else None

    @cached_property
    def blocks(self) -> Rows:
        """The matrix's blocks that the projection's blocks are, if they are whole."""
        return Rows(self.index[::BLOCK] // BLOCK)

    def are_blocks_of(self, num_outputs: int) -> bool:
        """Whether the projection's blocks are whole blocks of a matrix of `num_outputs` rows."""
        ends_whole = self.count % BLOCK == 0 or int(self.index[-1]) == num_outputs - 1
        return ends_whole and self._keep_blocks

    @cached_property
    def _keep_blocks(self) -> bool:
        firsts = self.index[::BLOCK]
        each = firsts.repeat_interleave(BLOCK)[: self.count]
        expected = each + torch.arange(self.count) % BLOCK
        return bool((firsts % BLOCK == 0).all()) and torch.equal(self.index, expected)

    def put(self, matrix: Tensor, values: Tensor) -> None:
        """Writes the projection's `values` into the matrix, row by row."""
        if self._span is not None:
            matrix[self._span].copy_(values)
        else:
            matrix[self.index.to(matrix.device)] = values.to(matrix.device, matrix.dtype)
