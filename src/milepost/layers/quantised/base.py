"""Code that the quantised forms share.

Legend: T tokens, I inputs, O outputs, X experts, N experts per token, P split-K partials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NoReturn

import torch
from torch import Tensor, nn

from milepost.errors import ConfigError, UnsupportedModelError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedPrecision:
    """A `Precision` whose weights are `QuantisedMatrix`."""

    max_shared: ClassVar[int] = 1

    @property
    def axes(self) -> Mapping[str, Axes]:
        """The dimensions of outputs and inputs in each of a projection's tensors."""
        raise NotImplementedError

    def stack(self, shape: tuple[int, ...], num_placed: int, scope: ModuleScope) -> QuantisedMatrix:
        """Returns unfilled matrices [..., O, I] of this `shape`: see `QuantisedMatrix`."""
        raise NotImplementedError

    def matrix(self, num_outputs: int, num_inputs: int, scope: ModuleScope) -> QuantisedMatrix:
        return self.stack((num_outputs, num_inputs), num_inputs, scope)

    def experts(
        self, sizes: ExpertSizes, names: ExpertNames, scope: ModuleScope
    ) -> QuantisedExperts:
        up, down = (self.stack(*shape, scope) for shape in shapes_of(sizes, names))
        return QuantisedExperts(sizes, names, scope, up, down)


class QuantisedMatrix(nn.Module):
    """A quantised matrix [O, I], which is a `Weight`, or the matrices [X, O, I] of experts. They
    are filled projection by projection; a projection has `num_placed` inputs in the checkpoint."""

    def __init__(self, precision: QuantisedPrecision, num_placed: int, scope: ModuleScope) -> None:
        super().__init__()
        self.axes, self.num_placed, self.scope = precision.axes, num_placed, scope

    @property
    def form(self) -> Quantised:
        """The form that the kernels read."""
        raise NotImplementedError

    def place(self, rows: Tensor, path: str) -> WeightSlots:
        return self.place_projection(Rows(rows), (), path)

    def place_projection(self, rows: Rows, at: tuple[int, ...], path: str) -> WeightSlots:
        """Returns placements for the tensors of the projection at `path`, whose outputs are these
        `rows` of the matrix `at`."""
        raise NotImplementedError

    def clear(self, first: int, count: int) -> None:
        raise NotImplementedError

    def fill(self, spread: float, generator: torch.Generator) -> None:
        raise NotImplementedError

    def pack(self) -> None:
        """Does nothing: quantised weights are small already."""


class QuantisedExperts(nn.Module):
    """Quantised `Experts`. The gate and up projections of an expert share one matrix, `up`. Units
    that pad an expert to whole blocks are zeros."""

    def __init__(
        self,
        sizes: ExpertSizes,
        names: ExpertNames,
        scope: ModuleScope,
        up: QuantisedMatrix,
        down: QuantisedMatrix,
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
        """Places experts that the checkpoint stores one by one, and the shared one."""
        placements = self._place_shared()
        projections = self._projections(self.names.projections, self.sizes.units)
        for expert, number in self.sizes.numbers:
            prefix = self.scope.full(f"{self.names.single}.{number}")
            placements |= _place_expert(projections, prefix, expert)
        return placements

    def _place_shared(self) -> WeightSlots:
        """Places the shared expert, if it is stored among the others."""
        if not self.sizes.num_shared:
            return {}
        projections = self._projections(self.names.shared_projections, self.sizes.shared_units)
        prefix = self.scope.full(self.names.shared)
        return _place_expert(projections, prefix, self.sizes.num_experts)

    def _projections(self, names: tuple[str, ...], units: Cut) -> list[_Projection]:
        """Returns the projections of an expert whose `units` are kept."""
        sizes, (*firsts, last) = self.sizes, names
        rows: dict[str, Tensor] = {}
        for name, part in zip(firsts, unit_rows(sizes, len(firsts)), strict=True):
            rows[name] = torch.cat((rows[name], part)) if name in rows else part
        whole, out = Cut.all_of(sizes.hidden_size), Rows(torch.arange(sizes.hidden_size))
        projections = []
        for name, part in rows.items():
            outputs = join(*[units] * (len(part) // sizes.size))
            projections.append(
                _Projection(
                    name=name, matrix=self.up, rows=Rows(part), outputs=outputs, inputs=whole
                )
            )
        down = _Projection(name=last, matrix=self.down, rows=out, outputs=whole, inputs=units)
        return [*projections, down]

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for matrix in (self.up, self.down):
            matrix.fill(spread, generator)
        self._clear_padding()


def refuse_inputs(num_placed: int, why: str, scope: ModuleScope) -> NoReturn:
    """Raises UnsupportedModelError, or ConfigError if only a rank's part of the inputs is kept."""
    what = f"{scope.path}: {num_placed} inputs"
    if scope.ranks.is_alone:
        raise UnsupportedModelError(f"{what} {why}")
    raise ConfigError(f"{what} of a rank {why}; use a smaller tensor_parallel_size")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projection:
    """A projection that each expert has."""

    name: str
    matrix: QuantisedMatrix
    rows: Rows
    outputs: Cut
    """The outputs that are kept."""
    inputs: Cut


def _place_expert(projections: Sequence[_Projection], prefix: str, expert: int) -> WeightSlots:
    placements: WeightSlots = {}
    for each in projections:
        path = f"{prefix}.{each.name}"
        tensors = each.matrix.place_projection(each.rows, (expert,), path)
        if not each.outputs.is_whole:
            cut_outputs(tensors, each.matrix.axes, each.outputs, path)
        if not each.inputs.is_whole:
            cut_inputs(tensors, each.matrix.axes, each.inputs, path)
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
