"""Where the tensors of a checkpoint go.

A layer may keep its weights in another arrangement than checkpoints do (several projections in one
matrix, heads in another order, a norm's weight as 1 + w). Every module that holds parameters of its
own says so with placements: for each tensor's full name, the shape that the checkpoint must have
and what to do with the values. Loading then needs to know no layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from milepost.parallel import Axes, Cut

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of tensors in safetensors' words."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Takes one tensor of a checkpoint, of exactly `shape` and one of these types: `store` is
    called with its values, or with what `cuts` leave of some dimensions, and then nothing else is
    read."""

    shape: tuple[int, ...]
    store: Callable[[Tensor], object]
    types: tuple[str, ...] = FLOATS
    cuts: tuple[tuple[int, Cut], ...] = ()

    def take(self, values: Sliceable) -> Tensor:
        """What is kept of the whole tensor, or of a file's slice of it."""
        kept: Sliceable = values
        for dim, cut in self.cuts:
            before = (slice(None),) * dim
            spans = (slice(first, first + count) for first, count in cut.spans)
            pieces = [kept[(*before, span)] for span in spans]
            kept = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return kept if isinstance(kept, Tensor) else kept[...]

    def take_like(self, values: Tensor) -> Tensor:
        """The same of values that are broadcast to the tensor's shape."""
        own = tuple(
            (dim, cut) for dim, cut in self.cuts if dim < values.dim() and values.shape[dim] > 1
        )
        return replace(self, cuts=own).take(values)


Placements = dict[str, Placement]


class Sliceable(Protocol):
    """A tensor, or one that is still in its file."""

    def __getitem__(self, key: Any, /) -> Tensor: ...


def cut_outputs(placements: Placements, axes: Mapping[str, Axes], cut: Cut, path: str) -> None:
    """Of a projection's placements, by the names of its tensors: the checkpoint has more outputs,
    of which these are the ones that `cut` keeps. Raises ConfigError."""
    for name, place in placements.items():
        placements[name] = cut_one(place, axes[name].outputs, cut, f"{path}.{name}")


def cut_inputs(placements: Placements, axes: Mapping[str, Axes], cut: Cut, path: str) -> None:
    """Likewise, of inputs."""
    for name, place in placements.items():
        placements[name] = cut_one(place, axes[name].inputs, cut, f"{path}.{name}")


def cut_one(place: Placement, axis: tuple[int, int] | None, cut: Cut, name: str) -> Placement:
    """A placement of what a rank keeps along an axis, where the tensor has that axis."""
    if cut.is_whole or axis is None:
        return place
    dim, unit = axis
    own = cut.within(unit, name)
    assert place.shape[dim] == own.size, f"{name}: what is placed is what is kept"
    shape = (*place.shape[:dim], own.full, *place.shape[dim + 1 :])
    return replace(place, shape=shape, cuts=(*place.cuts, (dim, own)))


def cut_all(place: Placement, cut: Cut, dim: int = 0) -> Placement:
    """Of a tensor with one entry for each of what is cut."""
    return cut_one(place, (dim, 1), cut, "")


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
        placement.store(wide * (own.to(wide.device) if isinstance(own, Tensor) else own))

    own = placement.take_like(factor) if isinstance(factor, Tensor) else factor
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
