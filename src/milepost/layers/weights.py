"""Matrices in some form: raw values here, quantised ones in the folder `quantised`.

A `Precision` makes weights of one form. A weight has a place for every tensor that its form has in
a checkpoint (values, scales ...), under the projection's name. Layers ask for weights and let
`products` multiply by their form, without knowing which form it is. Projections of equal precision
share a matrix.

Legend: O outputs, I inputs, X experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from milepost.errors import ConfigError, UnsupportedModelError
from milepost.kernels import products
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import BLOCK
from milepost.kernels.products.forms import Form, Packed, RawForm, pack
from milepost.layers.experts import ExpertNames, Experts, ExpertSizes, Projection, shapes_of
from milepost.layers.weight_slots import Rows, WeightSlot, WeightSlots, fill_matrix
from milepost.parallel import Axes

if TYPE_CHECKING:
    from milepost.layers.parameters import ModuleScope


class Weight(nn.Module):
    """A matrix of O rows and I columns, or the matrices [X, O, I] of experts. They are filled
    projection by projection."""

    axes: Mapping[str, Axes]
    """The dimensions of outputs and inputs in each of a projection's tensors."""

    @property
    def form(self) -> Form:
        """The form that products read."""
        raise NotImplementedError

    def place(self, rows: Tensor, path: str) -> WeightSlots:
        """Returns placements for the tensors of the projection at `path`, keyed by their names
        within it. The projection's output i is row `rows[i]`."""
        return self.place_projection(Rows(rows), (), path)

    def place_projection(self, rows: Rows, at: tuple[int, ...], path: str) -> WeightSlots:
        """Does the same for a projection whose outputs are these `rows` of the matrix `at`."""
        raise NotImplementedError

    def clear(self, first: int, count: int) -> None:
        """Sets rows that belong to no projection to zero."""
        raise NotImplementedError

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fills the weight with dummy values."""
        raise NotImplementedError

    def pack(self) -> None:
        """Rearranges the filled weight for small batches on a CPU, if that pays off. No placement
        can be made afterwards."""


class Precision:
    """A form of weights; hashable."""

    max_shared: ClassVar[int] = 1
    """Largest number of experts that a shared one may be stored as: each is one more that every
    token chooses."""
    unit_block: ClassVar[int] = BLOCK
    """An expert's units are padded to a multiple of it."""
    experts_type: ClassVar[type[Experts]] = Experts

    def stack(self, shape: tuple[int, ...], num_placed: int, scope: ModuleScope) -> Weight:
        """Returns unfilled matrices [..., O, I] of this `shape`, whose projections have
        `num_placed` inputs in the checkpoint."""
        raise NotImplementedError

    def matrix(self, num_outputs: int, num_inputs: int, scope: ModuleScope) -> Weight:
        """Returns an unfilled matrix for one or several projections."""
        return self.stack((num_outputs, num_inputs), num_inputs, scope)

    def experts(self, sizes: ExpertSizes, names: ExpertNames, scope: ModuleScope) -> Experts:
        """Returns unfilled matrices for a mixture's experts."""
        shapes = shapes_of(sizes, names, self.unit_block)
        up, down = (self.stack(*shape, scope) for shape in shapes)
        return self.experts_type(sizes, names, scope, up, down)


class RawExperts(Experts):
    """Raw experts."""

    can_be_stacked = True

    def _stack(self, each: Projection) -> WeightSlots:
        """Stores all experts in one copy."""
        assert isinstance(each.weight, RawWeight), "matrices of raw experts"
        every = (slice(self.sizes.num_experts),)
        return each.weight.place_projection(each.rows, every, each.name)

    def fill(self, spread: float, generator: torch.Generator) -> None:
        super().fill(spread, generator)
        if len(self.names.projections) == 2:
            # Squares have a nonzero mean: random rows would map all tokens to nearly one vector.
            for down in self.down.parameters():
                down.sub_(down.mean(-1, keepdim=True))


def refuse_inputs(num_placed: int, why: str, scope: ModuleScope) -> NoReturn:
    """Raises UnsupportedModelError, or ConfigError if only a rank's part of the inputs is kept."""
    what = f"{scope.path}: {num_placed} inputs"
    if scope.ranks.is_alone:
        raise UnsupportedModelError(f"{what} {why}")
    raise ConfigError(f"{what} of a rank {why}; use a smaller tensor_parallel_size")


@dataclass(frozen=True, slots=True)
class RawPrecision(Precision):
    """Weights in the model's dtype."""

    max_shared: ClassVar[int] = 4
    unit_block: ClassVar[int] = 1
    experts_type: ClassVar[type[Experts]] = RawExperts

    def stack(self, shape: tuple[int, ...], num_placed: int, scope: ModuleScope) -> Weight:  # noqa: ARG002
        return RawWeight(scope.empty(*shape), scope.order)


RAW = RawPrecision()


class RawWeight(Weight):
    """A weight that holds raw `values` [..., O, I], which may be shared with an embedding."""

    def __init__(self, values: nn.Parameter, order: SumOrder = SumOrder.FREE) -> None:
        super().__init__()
        self.axes = {"weight": Axes()}
        self.values: nn.Parameter | None = values
        self._order = order
        self._packed: Packed | None = None

    @property
    def form(self) -> RawForm:
        return self._packed or products.Raw(values=self._unpacked(), order=self._order)

    def place_projection(
        self,
        rows: Rows,
        at: tuple[int | slice, ...],
        path: str,  # noqa: ARG002
    ) -> WeightSlots:
        values = self._unpacked()[at]
        rows_first = values.movedim(-2, 0)

        def store(given: Tensor) -> None:
            rows.put(rows_first, given.movedim(-2, 0))

        shape = (*values.shape[:-2], rows.count, values.shape[-1])
        return {"weight": WeightSlot(shape, store)}

    def clear(self, first: int, count: int) -> None:
        self._unpacked()[..., first : first + count, :].zero_()

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
