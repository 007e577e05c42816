"""Modules that hold a matrix in some form: raw values here; other modules hold quantised values, or
a rank's part.

A `Precision` makes weights of one form. A weight has a place for every tensor that its form has in
a checkpoint (values, scales ...), under the projection's name. Layers ask for weights and let
`products` multiply by their form, without knowing which form it is. Projections of equal precision
share a matrix.

Legend: T tokens, I inputs, O outputs, X experts, N experts per token, P split-K partials.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor, nn

from milepost.kernels import products
from milepost.kernels.layout.emit import Emit
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.products.forms import Form, Packed, RawForm, pack
from milepost.layers.weight_slots import (
    WeightSlot,
    WeightSlots,
    cut_all,
    fill_matrix,
    place_rows,
    place_scattered,
    place_whole,
)
from milepost.parallel import Axes, Cut
from milepost.parallel.ranks import join

if TYPE_CHECKING:
    from milepost.layers.parameters import ModuleScope


class Weight(Protocol):
    """A matrix of O rows and I columns. It is also a module."""

    @property
    def axes(self) -> Mapping[str, Axes]:
        """The dimensions of outputs and inputs in each of a projection's tensors."""
        ...

    @property
    def form(self) -> Form:
        """The form that products read."""
        ...

    def place(self, rows: Tensor, path: str) -> WeightSlots:
        """Returns placements for the tensors of the projection at `path`, keyed by their names
        within it. The projection's output i is row `rows[i]`."""
        ...

    def clear(self, first: int, count: int) -> None:
        """Sets rows that belong to no projection to zero."""
        ...

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fills the weight with dummy values."""
        ...

    def pack(self) -> None:
        """Rearranges the filled weight for small batches on a CPU, if that pays off. No placement
        can be made afterwards."""
        ...


class Experts(Protocol):
    """Matrices of X experts. They are also a module."""

    sizes: ExpertSizes

    @property
    def reads(self) -> Emit:
        """The form of rows that the experts read."""
        ...

    @property
    def forms(self) -> tuple[Form, Form]:
        """The forms of the matrices [X, ...] before and after the activation."""
        ...

    def placements(self) -> WeightSlots:
        """Returns placements keyed by full names."""
        ...

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fills the experts with dummy values."""
        ...


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


class Precision(Protocol):
    """A form of weights; hashable."""

    max_shared: ClassVar[int]
    """Largest number of experts that a shared one may be stored as: each is one more that every
    token chooses."""

    def matrix(self, num_outputs: int, num_inputs: int, scope: ModuleScope) -> Weight:
        """Returns an unfilled matrix for one or several projections."""
        ...

    def experts(self, sizes: ExpertSizes, names: ExpertNames, scope: ModuleScope) -> Experts:
        """Returns unfilled matrices for a mixture's experts."""
        ...


@dataclass(frozen=True, slots=True)
class RawPrecision:
    """Weights in the model's dtype."""

    max_shared: ClassVar[int] = 4

    def matrix(self, num_outputs: int, num_inputs: int, scope: ModuleScope) -> Weight:
        return RawWeight(scope.empty(num_outputs, num_inputs), scope.order)

    def experts(self, sizes: ExpertSizes, names: ExpertNames, scope: ModuleScope) -> Experts:
        return RawExperts(sizes, names, scope)


RAW = RawPrecision()


class RawWeight(nn.Module):
    """A weight that holds raw `values` [O, I], which may be shared with an embedding."""

    axes: ClassVar[Mapping[str, Axes]] = {"weight": Axes()}

    def __init__(self, values: nn.Parameter, order: SumOrder = SumOrder.FREE) -> None:
        super().__init__()
        self.values: nn.Parameter | None = values
        self._order = order
        self._packed: Packed | None = None

    @property
    def form(self) -> RawForm:
        return self._packed or products.Raw(values=self._unpacked(), order=self._order)

    def place(self, rows: Tensor, path: str) -> WeightSlots:  # noqa: ARG002
        return {"weight": place_scattered(self._unpacked(), rows)}

    def clear(self, first: int, count: int) -> None:
        self._unpacked()[first : first + count].zero_()

    def fill(self, spread: float, generator: torch.Generator) -> None:
        fill_matrix(self._unpacked(), spread, generator)

    def pack(self) -> None:
        if self.values is not None:
            self._packed = pack(products.Raw(values=self.values, order=self._order))
        if self._packed is not None:
            self.values = None

    def _unpacked(self) -> Tensor:
        assert self.values is not None, "what is packed is not changed any more"
        return self.values


class RawExperts(nn.Module):
    """Raw experts. The gate and up projections of an expert, or its up projection alone, share one
    matrix."""

    def __init__(self, sizes: ExpertSizes, names: ExpertNames, scope: ModuleScope) -> None:
        super().__init__()
        self.sizes, self.names, self.scope = sizes, names, scope
        count = sizes.num_experts + sizes.num_shared
        num_rows = (len(names.projections) - 1) * sizes.size
        self.up = scope.empty(count, num_rows, sizes.hidden_size)
        self.down = scope.empty(count, sizes.hidden_size, sizes.size)

    @property
    def reads(self) -> Emit:
        return Emit.VALUES

    @property
    def forms(self) -> tuple[Form, Form]:
        up, down = (
            products.Raw(values=each, order=self.scope.order) for each in (self.up, self.down)
        )
        return up, down

    def placements(self) -> WeightSlots:
        names, sizes, full = self.names, self.sizes, self.scope.full
        placements = self._shared() if sizes.num_shared else {}
        *up, down = names.projections
        stacked = [self.scope.has(name) for name in names.stacked]
        cuts = join(*[sizes.units] * len(up)), sizes.units
        for dim, values in enumerate((self.up, self.down)):
            if stacked[dim]:
                place = place_rows(values, 0, sizes.num_experts)
                place = cut_all(cut_all(place, cuts[dim], dim + 1), sizes.experts)
                placements[full(names.stacked[dim])] = place
        for expert, number in sizes.numbers:
            prefix = full(f"{names.single}.{number}")
            parts = () if stacked[0] else zip(up, self.up[expert].chunk(len(up)), strict=True)
            for name, part in parts:
                placements[f"{prefix}.{name}.weight"] = cut_all(place_whole(part), sizes.units)
            if not stacked[1]:
                whole = place_whole(self.down[expert])
                placements[f"{prefix}.{down}.weight"] = cut_all(whole, sizes.units, 1)
        return placements

    def _shared(self) -> WeightSlots:
        """Places the shared expert's units, split evenly over the experts that it is stored as."""
        count, (hidden_size, size) = self.sizes.num_shared, self.down.shape[1:]
        inner, out = (each[-count:] for each in (self.up, self.down))
        *up, down = self.names.shared_projections
        prefix = self.scope.full(self.names.shared)
        groups: dict[str, list[Tensor]] = {}
        for name, rows in zip(up, inner.chunk(len(up), 1), strict=True):
            groups.setdefault(name, []).append(rows)

        def store(parts: list[Tensor], values: Tensor) -> None:
            for part, rows in zip(parts, values.chunk(len(parts)), strict=True):
                part.copy_(rows.view(part.shape))

        def store_down(values: Tensor) -> None:
            out.copy_(values.unflatten(1, (count, size)).transpose(0, 1))

        units = self.sizes.shared_units
        placements = {}
        for name, parts in groups.items():
            place = WeightSlot((len(parts) * count * size, hidden_size), partial(store, parts))
            placements[f"{prefix}.{name}.weight"] = cut_all(place, join(*[units] * len(parts)))
        place = WeightSlot((hidden_size, count * size), store_down)
        return placements | {f"{prefix}.{down}.weight": cut_all(place, units, 1)}

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for weight in (self.up, self.down):
            fill_matrix(weight, spread, generator)
        if len(self.names.projections) == 2:
            # Squares have a nonzero mean: random rows would map all tokens to nearly one vector.
            self.down.sub_(self.down.mean(-1, keepdim=True))
