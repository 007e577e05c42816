"""What the quantised forms have in common.

Legend: T tokens, I inputs, O outputs, X experts, N experts for each token, P split-K partials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from milepost.kernels import products, quantised
from milepost.kernels.emit import Inputs
from milepost.kernels.quantised import Quantised
from milepost.layers.parameters import ParameterKind
from milepost.layers.placements import Placements, cut_inputs, cut_outputs
from milepost.layers.quantised.rows import Rows
from milepost.layers.weights import ExpertNames, ExpertSizes
from milepost.parallel import Axes, Cut
from milepost.parallel.cut import join


def empty(kind: ParameterKind, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """An unfilled parameter of a quantised form."""
    values = torch.empty(shape, dtype=dtype, device=kind.device)
    return nn.Parameter(values, requires_grad=False)


def ones(kind: ParameterKind, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Scales, of which those of padding are never filled and must not be anything."""
    values = torch.ones(shape, dtype=dtype, device=kind.device)
    return nn.Parameter(values, requires_grad=False)


class Stack(Protocol):
    """Matrices of experts, or one matrix, in a quantised form: a module."""

    @property
    def axes(self) -> Mapping[str, Axes]:
        """See `Weight`."""
        ...

    @property
    def form(self) -> Quantised:
        """What the kernels read."""
        ...

    def place_projection(self, rows: Rows, at: tuple[int, ...], path: str) -> Placements:
        """The tensors of a projection with these `rows` of the matrix `at`; `path` is its own."""
        ...

    def clear(self, first: int, count: int) -> None:
        """See `Weight`."""
        ...

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """See `Weight`."""
        ...


class QuantisedMatrix(nn.Module):
    """Projections of one matrix [O, I], a `stack` without experts; a `Weight`."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    @property
    def axes(self) -> Mapping[str, Axes]:
        return self.stack.axes

    @property
    def form(self) -> Quantised:
        return self.stack.form

    def place(self, rows: Tensor, path: str) -> Placements:
        return self.stack.place_projection(Rows(rows), (), path)

    def clear(self, first: int, count: int) -> None:
        self.stack.clear(first, count)

    def fill(self, spread: float, generator: torch.Generator) -> None:
        self.stack.fill(spread, generator)

    def pack(self) -> None:
        """They are small as they are."""


class QuantisedExperts(nn.Module):
    """Each expert's gate and up projection stand in one matrix, `up`; `Experts`. Units that make
    whole blocks of an expert's own are zeros."""

    def __init__(
        self, sizes: ExpertSizes, names: ExpertNames, kind: ParameterKind, up: Stack, down: Stack
    ) -> None:
        super().__init__()
        self.sizes, self.names, self.kind, self.up, self.down = sizes, names, kind, up, down
        self.reads = products.reads(up.form)
        self._clear_padding()

    def _clear_padding(self) -> None:
        size, padded = self.sizes.size, padded_size(self.sizes)
        for first in range(size, self.up.form.num_outputs, padded):
            self.up.clear(first, padded - size)

    @property
    def forms(self) -> tuple[Quantised, Quantised]:
        return self.up.form, self.down.form

    def mix(self, rows: Inputs, shares: Tensor, experts: Tensor) -> Tensor:
        return products.mix(rows, shares, experts, *self.forms)

    def placements(self) -> Placements:
        return place_experts(self.sizes, self.names, self.kind, self.up, self.down)

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for stack in (self.up, self.down):
            stack.fill(spread, generator)
        self._clear_padding()


def padded_size(sizes: ExpertSizes) -> int:
    """Units of an expert in whole blocks, which kernels take."""
    return -(-sizes.size // quantised.BLOCK) * quantised.BLOCK


def shapes_of(
    sizes: ExpertSizes, names: ExpertNames
) -> tuple[tuple[tuple[int, ...], int], tuple[tuple[int, ...], int]]:
    """Of the matrices of gate and up projections, or of up projections alone, and of down ones;
    each with how many inputs a checkpoint's projection has."""
    count, size = sizes.num_experts + sizes.num_shared, padded_size(sizes)
    num_rows = (len(names.projections) - 1) * size
    return (
        ((count, num_rows, sizes.hidden_size), sizes.hidden_size),
        ((count, sizes.hidden_size, size), sizes.size),
    )


def unit_rows(sizes: ExpertSizes, count: int) -> list[Tensor]:
    """Rows of so many projections that stand one behind the other, without the padding."""
    return [part[: sizes.size] for part in torch.arange(count * padded_size(sizes)).chunk(count)]


def place_experts(
    sizes: ExpertSizes, names: ExpertNames, kind: ParameterKind, up: Stack, down: Stack
) -> Placements:
    """Of experts that the checkpoint has one by one."""
    placements = place_shared(sizes, names, kind, up, down)
    projections = _projections(sizes, names.projections, sizes.units, up, down)
    for expert, number in sizes.numbers:
        placements |= _place_expert(projections, kind.full(f"{names.single}.{number}"), expert)
    return placements


def place_shared(
    sizes: ExpertSizes, names: ExpertNames, kind: ParameterKind, up: Stack, down: Stack
) -> Placements:
    """Of the shared expert, if it is one of them."""
    if not sizes.num_shared:
        return {}
    units = sizes.shared_units
    projections = _projections(sizes, names.shared_projections, units, up, down)
    return _place_expert(projections, kind.full(names.shared), sizes.num_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projection:
    """One that each expert has."""

    name: str
    stack: Stack
    rows: Rows
    outputs: Cut
    """That are kept."""
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


def _place_expert(projections: Sequence[_Projection], prefix: str, expert: int) -> Placements:
    placements: Placements = {}
    for each in projections:
        path = f"{prefix}.{each.name}"
        tensors = each.stack.place_projection(each.rows, (expert,), path)
        if not each.outputs.is_whole:
            cut_outputs(tensors, each.stack.axes, each.outputs, path)
        if not each.inputs.is_whole:
            cut_inputs(tensors, each.stack.axes, each.inputs, path)
        placements |= {f"{path}.{tensor}": place for tensor, place in tensors.items()}
    return placements
