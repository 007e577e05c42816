"""Where the tensors of a checkpoint go.

A layer may keep its weights in another arrangement than checkpoints do (several projections in one
matrix, heads in another order, a norm's weight as 1 + w). Every module that holds parameters of its
own says so with placements: for each tensor's full name, the shape that the checkpoint must have
and what to do with the values. Loading then needs to know no layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of tensors in safetensors' words."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Takes one tensor of a checkpoint: `store` is called with values of exactly `shape` and one of
    these types; or with a part of them, and then nothing else is read."""

    shape: tuple[int, ...]
    store: Callable[[Tensor], object]
    part: tuple[slice, ...] = ()
    types: tuple[str, ...] = FLOATS


Placements = dict[str, Placement]


@runtime_checkable
class Holder(Protocol):
    """A module with parameters of its own."""

    def placements(self) -> Placements:
        """By the full names of a checkpoint's tensors; for the module's own parameters only."""
        ...

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fill its own parameters with dummy values, matrices with a standard deviation of
        `spread`."""
        ...


def merge(parts: Iterable[Placements]) -> Placements:
    """All of them; a tensor has one place."""
    merged: Placements = {}
    for placements in parts:
        twice = merged.keys() & placements.keys()
        assert not twice, f"one module fills {sorted(twice)[0]!r}, not two"
        merged |= placements
    return merged


def place_whole(parameter: Tensor) -> Placement:
    """The tensor is the parameter."""
    return Placement(tuple(parameter.shape), parameter.copy_)


def place_rates(parameter: Tensor) -> Placement:
    """The parameter is -exp(`A_log`), what time steps are multiplied by to decay."""

    def store(values: Tensor) -> None:
        parameter.copy_(values.to(parameter.dtype).exp().neg())

    return Placement(tuple(parameter.shape), store)


def scale(placement: Placement, factor: Tensor | float) -> Placement:
    """The same of the tensor times `factor`, which is rounded once."""

    def store(values: Tensor) -> None:
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        placement.store(wide * factor)

    assert not placement.part, "a factor belongs to the whole"
    return replace(placement, store=store)


def place_rows(parameter: Tensor, first: int, count: int) -> Placement:
    """The tensor is `count` rows of the parameter."""
    return place_whole(parameter[first : first + count])


def place_scattered(parameter: Tensor, rows: Tensor) -> Placement:
    """Row i of the tensor is row `rows[i]` of the parameter."""
    count, first = len(rows), int(rows[0]) if len(rows) else 0
    if torch.equal(rows, torch.arange(first, first + count)):
        return place_rows(parameter, first, count)

    def store(tensor: Tensor) -> None:
        parameter[rows.to(parameter.device)] = tensor.to(parameter.device, parameter.dtype)

    return Placement((count, *parameter.shape[1:]), store)


def fill_matrix(weight: Tensor, spread: float, generator: torch.Generator) -> None:
    """Fill a dummy weight uniformly with standard deviation `spread`."""
    bound = spread * math.sqrt(3.0)
    weight.uniform_(-bound, bound, generator=generator)
