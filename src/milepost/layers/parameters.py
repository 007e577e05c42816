"""The context that a model's modules create their parameters in, and the base class of those
modules."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import accumulation_dtype
from milepost.layers.weight_slots import (
    WeightSlot,
    WeightSlots,
    cut_all,
    fill_matrix,
    place_whole,
)
from milepost.layers.weights import RAW, Precision
from milepost.parallel import ALONE, Cut, Ranks

VALUES = ("weight", "qweight", "weight_packed")
"""Names that the forms give to a projection's values."""


def raw_precision(_: str) -> Precision:
    """Every projection is raw."""
    return RAW


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleScope:
    """Dtype and device of a module's parameters, where the checkpoint stores them, and in which
    form."""

    dtype: torch.dtype
    device: torch.device
    path: str = ""
    """Path of the module's tensors in the checkpoint, without the last dot."""
    names: Container[str] = ()
    """Names of all tensors in the checkpoint; empty if there is no checkpoint."""
    precision_of: Callable[[str], Precision] = raw_precision
    """Maps the path of a projection to the form of its matrix."""
    ranks: Ranks = ALONE
    """The ranks that the parameters are split over, and this one's number."""
    order: SumOrder = SumOrder.FREE
    """Order of sums of every step. With FIXED, a row's results do not depend on the other rows."""

    def under(self, name: str) -> ModuleScope:
        """Returns the scope of a submodule."""
        return replace(self, path=self.full(name))

    def root(self) -> ModuleScope:
        """Returns the scope of modules outside the model's layers."""
        return replace(self, path="")

    def full(self, name: str) -> str:
        """Returns the name in the checkpoint for a name in the module."""
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return self.full(name) in self.names

    def has_projection(self, name: str) -> bool:
        """Whether the checkpoint has the projection of this name, in any form."""
        return any(self.has(f"{name}.{values}") for values in VALUES)

    def precision(self, name: str) -> Precision:
        """Returns the form of the module's projection of this name."""
        return self.precision_of(self.full(name))

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Returns an unfilled parameter, in the model's dtype by default."""
        values = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)

    def empty_precise(self, *shape: int) -> nn.Parameter:
        """Returns an unfilled small parameter in the dtype that sums are accumulated in."""
        return self.empty(*shape, dtype=accumulation_dtype(self.dtype))

    def ones(self, *shape: int, dtype: torch.dtype) -> nn.Parameter:
        """Returns scales of 1. Those of padding are never filled, so they must have a defined
        value."""
        values = torch.ones(shape, dtype=dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)


SlotMaker = Callable[[Tensor], WeightSlot]
Dummy = Callable[[Tensor, float, torch.Generator], object]
"""Fills a parameter with dummy values, given the standard deviation of matrices."""


class ParameterModule(nn.Module):
    """A module that declares its own parameters: which tensors of the checkpoint fill each, and its
    dummy values."""

    def __init__(self, scope: ModuleScope) -> None:
        super().__init__()
        self.scope = scope
        self._declared: list[tuple[Callable[[], WeightSlots], nn.Parameter, Dummy | float]] = []

    def declare(
        self,
        name: str,
        parameter: nn.Parameter,
        *,
        place: SlotMaker = place_whole,
        cut: Cut | None = None,
        dim: int = 0,
        dummy: Dummy | float = 1.0,
    ) -> nn.Parameter:
        """Declares a parameter that the tensor `name` fills, as `place` says. `cut` is the part of
        the tensor's dimension `dim` that a rank keeps."""

        def slots() -> WeightSlots:
            slot = place(parameter)
            return {name: slot if cut is None else cut_all(slot, cut, dim)}

        return self.declare_slots(slots, parameter, dummy)

    def declare_slots(
        self,
        slots: Callable[[], WeightSlots],
        parameter: nn.Parameter,
        dummy: Dummy | float = 1.0,
    ) -> nn.Parameter:
        """Declares a parameter that several tensors fill, or perhaps none."""
        self._declared.append((slots, parameter, dummy))
        return parameter

    def placements(self) -> WeightSlots:
        every = [slots() for slots, _, _ in self._declared]
        return {self.scope.full(name): slot for slots in every for name, slot in slots.items()}

    def fill(self, spread: float, generator: torch.Generator) -> None:
        for _, parameter, dummy in self._declared:
            if callable(dummy):
                dummy(parameter, spread, generator)
            else:
                parameter.fill_(dummy)


def dummy_between(least: float, largest: float) -> Dummy:
    """Returns a function that fills a parameter uniformly between two numbers."""
    return lambda values, _, generator: values.uniform_(least, largest, generator=generator)


def dummy_taps(weight: Tensor, _: float, generator: torch.Generator) -> None:
    """Fills a convolution's weight [channels, width]."""
    fill_matrix(weight, weight.shape[1] ** -0.5, generator)


T = TypeVar("T")


def module_list(modules: Iterable[T]) -> Sequence[T]:
    """Returns an `nn.ModuleList`, typed by the protocol that the modules follow: torch knows its
    items as modules only."""
    return cast("Sequence[T]", nn.ModuleList(cast("Any", modules)))
