"""Parameters, and where the tensors of a checkpoint go in them.

A layer may keep its weights in another arrangement than checkpoints do (several projections in one
matrix, heads in another order, a norm's weight as 1 + w). It says so with placements: for each
tensor's name, relative to the layer, the shape that the checkpoint must have and what to do with
the values. Loading then needs to know no layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from milepost.kernels.precision import accumulation_dtype


@dataclass(frozen=True, slots=True)
class Placement:
    """Takes one tensor of a checkpoint: `store` is called with values of exactly `shape`, in any
    float type."""

    shape: tuple[int, ...]
    store: Callable[[Tensor], object]


Placements = dict[str, Placement]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterKind:
    """Type and device of a model's parameters."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> nn.Parameter:
        """An unfilled weight in the model's type."""
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)

    def empty_precise(self, *shape: int) -> nn.Parameter:
        """An unfilled small parameter in the type that sums are kept in."""
        dtype = accumulation_dtype(self.dtype)
        values = torch.empty(shape, dtype=dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)


def place_whole(parameter: Tensor) -> Placement:
    """The tensor is the parameter."""
    return Placement(tuple(parameter.shape), parameter.copy_)


def place_rows(parameter: Tensor, first: int, count: int) -> Placement:
    """The tensor is `count` rows of the parameter."""
    return place_whole(parameter[first : first + count])


def under(prefix: str, placements: Mapping[str, Placement]) -> Placements:
    """The same placements with `prefix` and a dot before each name."""
    return {f"{prefix}.{name}": placement for name, placement in placements.items()}


def fill_matrix(weight: Tensor, spread: float, generator: torch.Generator) -> None:
    """Fill a dummy weight uniformly with standard deviation `spread`."""
    bound = spread * math.sqrt(3.0)
    weight.uniform_(-bound, bound, generator=generator)
