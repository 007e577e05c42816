"""The context that a model's modules create their parameters in, and their lists."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import accumulation_dtype
from milepost.layers.weights import RAW, Precision
from milepost.parallel import ALONE, Ranks

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

    def empty(self, *shape: int) -> nn.Parameter:
        """Returns an unfilled weight in the model's dtype."""
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)

    def empty_precise(self, *shape: int) -> nn.Parameter:
        """Returns an unfilled small parameter in the dtype that sums are accumulated in."""
        dtype = accumulation_dtype(self.dtype)
        values = torch.empty(shape, dtype=dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)


T = TypeVar("T")


def module_list(modules: Iterable[T]) -> Sequence[T]:
    """Returns an `nn.ModuleList`, typed by the protocol that the modules follow: torch knows its
    items as modules only."""
    return cast("Sequence[T]", nn.ModuleList(cast("Any", modules)))
