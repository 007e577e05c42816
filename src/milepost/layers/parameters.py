"""What a model's modules need to know to make their parameters."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

import torch
from torch import nn

from milepost.kernels.precision import accumulation_dtype
from milepost.layers.weights import RAW, Precision
from milepost.parallel import ALONE, Ranks

VALUES = ("weight", "qweight", "weight_packed")
"""What forms call a projection's values."""


def _raw(_: str) -> Precision:
    return RAW


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterKind:
    """Type and device of a model's parameters; where in the checkpoint those of a module stand, and
    in which form."""

    dtype: torch.dtype
    device: torch.device
    path: str = ""
    """Of the module's tensors, without the last dot."""
    names: Container[str] = ()
    """Of all tensors in the checkpoint; none where there is no checkpoint."""
    precision_of: Callable[[str], Precision] = _raw
    """Path of a projection -> the form of its matrix."""
    ranks: Ranks = ALONE
    """Among which the parameters are split, and which of them this is."""

    def under(self, name: str) -> ParameterKind:
        """Of a module inside this one."""
        return replace(self, path=self.full(name))

    def root(self) -> ParameterKind:
        """Of what stands beside the model's layers."""
        return replace(self, path="")

    def full(self, name: str) -> str:
        """Name in the checkpoint of what has this name in the module."""
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a tensor."""
        return self.full(name) in self.names

    def has_projection(self, name: str) -> bool:
        """Whether the checkpoint has the projection of this name, in whichever form."""
        return any(self.has(f"{name}.{values}") for values in VALUES)

    def precision(self, name: str) -> Precision:
        """Of the module's projection of this name."""
        return self.precision_of(self.full(name))

    def empty(self, *shape: int) -> nn.Parameter:
        """An unfilled weight in the model's type."""
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)

    def empty_precise(self, *shape: int) -> nn.Parameter:
        """An unfilled small parameter in the type that sums are kept in."""
        dtype = accumulation_dtype(self.dtype)
        values = torch.empty(shape, dtype=dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)
