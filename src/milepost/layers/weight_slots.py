"""Maps a checkpoint's tensors to parameters.

A layer may arrange its weights differently from checkpoints (several projections in one matrix,
heads in another order, a norm's weight as 1 + w). Each module that holds parameters says so with
placements: for each tensor's full name, the shape that the checkpoint must have and how to store
the values. So loading needs to know nothing about layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from milepost.kernels.platform.tensors import BLOCK
from milepost.parallel import Axes, Cut
from milepost.parallel.ranks import join

FLOATS = ("F64", "F32", "F16", "BF16")
"""Floating-point dtypes, as safetensors names them."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The destination of one checkpoint tensor of exactly `shape` and one of `types`. `store` is
    called with its values, or with the parts that `cuts` keep along some dimensions; then only
    these parts are read."""

    shape: tuple[int, ...]
    store: Callable[[Tensor], object]
    types: tuple[str, ...] = FLOATS
    cuts: tuple[tuple[int, Cut], ...] = ()

    def take(self, values: Sliceable) -> Tensor:
        """Returns the kept part of the whole tensor, or of its slice in a file."""
        kept: Sliceable = values
        for dim, cut in self.cuts:
            before = (slice(None),) * dim
            spans = (slice(first, first + count) for first, count in cut.spans)
            pieces = [kept[(*before, span)] for span in spans]
            kept = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return kept if isinstance(kept, Tensor) else kept[...]

    def take_like(self, values: Tensor) -> Tensor:
        """Returns the kept part of values that broadcast to the tensor's shape."""
        cuts = tuple(
            (dim, cut) for dim, cut in self.cuts if dim < values.dim() and values.shape[dim] > 1
        )
        return replace(self, cuts=cuts).take(values)


WeightSlots = dict[str, WeightSlot]


class Sliceable(Protocol):
    """A tensor, in memory or still in its file."""

    def __getitem__(self, key: Any, /) -> Tensor: ...


def cut_outputs(placements: WeightSlots, axes: Mapping[str, Axes], cut: Cut, path: str) -> None:
    """Restricts a projection's placements, keyed by tensor name, to the outputs that `cut` keeps of
    the checkpoint's. Raises ConfigError."""
    for name, place in placements.items():
        placements[name] = cut_one(place, axes[name].outputs, cut, f"{path}.{name}")


def cut_inputs(placements: WeightSlots, axes: Mapping[str, Axes], cut: Cut, path: str) -> None:
    """Restricts a projection's placements to the inputs that `cut` keeps. Raises ConfigError."""
    for name, place in placements.items():
        placements[name] = cut_one(place, axes[name].inputs, cut, f"{path}.{name}")


def cut_one(place: WeightSlot, axis: tuple[int, int] | None, cut: Cut, name: str) -> WeightSlot:
    """Restricts a placement to a rank's part along an axis, if the tensor has that axis."""
    if cut.is_whole or axis is None:
        return place
    dim, unit = axis
    kept = cut.within(unit, name)
    assert place.shape[dim] == kept.size, f"{name}: what is placed is what is kept"
    shape = (*place.shape[:dim], kept.full, *place.shape[dim + 1 :])
    return replace(place, shape=shape, cuts=(*place.cuts, (dim, kept)))


def cut_all(place: WeightSlot, cut: Cut, dim: int = 0) -> WeightSlot:
    """Restricts a placement to a rank's part of a tensor with one entry per item that is split."""
    return cut_one(place, (dim, 1), cut, "")


@runtime_checkable
class Holder(Protocol):
    """A module that holds parameters itself."""

    def placements(self) -> WeightSlots:
        """Returns placements keyed by the full names of a checkpoint's tensors, for the module's
        own parameters only."""
        ...

    def fill(self, spread: float, generator: torch.Generator) -> None:
        """Fills the module's own parameters with dummy values; matrices get a standard deviation of
        `spread`."""
        ...


def merge(parts: Iterable[WeightSlots]) -> WeightSlots:
    """Merges placements; no tensor may have two."""
    merged: WeightSlots = {}
    for placements in parts:
        twice = merged.keys() & placements.keys()
        assert not twice, f"one module fills {sorted(twice)[0]!r}, not two"
        merged |= placements
    return merged


def place_whole(parameter: Tensor) -> WeightSlot:
    """Places a tensor that is the parameter as it is."""
    return WeightSlot(tuple(parameter.shape), parameter.copy_)


def place_rates(parameter: Tensor) -> WeightSlot:
    """Places `A_log`. The parameter is -exp(`A_log`), the decay rate that multiplies time steps."""

    def store(values: Tensor) -> None:
        parameter.copy_(values.to(parameter.dtype).exp().neg())

    return WeightSlot(tuple(parameter.shape), store)


def scale(placement: WeightSlot, factor: Tensor | float) -> WeightSlot:
    """Returns a placement that stores the tensor times `factor`, rounded once."""

    def store(values: Tensor) -> None:
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        placement.store(wide * (kept.to(wide.device) if isinstance(kept, Tensor) else kept))

    kept = placement.take_like(factor) if isinstance(factor, Tensor) else factor
    return replace(placement, store=store)


def place_rows(parameter: Tensor, first: int, count: int) -> WeightSlot:
    """Places a tensor that is `count` rows of the parameter."""
    return place_whole(parameter[first : first + count])


def place_convolutions(weight: Tensor, cuts: Iterable[Cut], *, is_one: bool) -> WeightSlots:
    """Places the short convolution [channels, width] of queries, keys and values, whose `cuts` a
    rank keeps: one tensor for all channels, or one each."""
    whole, cuts = weight.unsqueeze(1), list(cuts)
    if is_one:
        return {"conv1d.weight": cut_all(place_whole(whole), join(*cuts))}
    placements, first = {}, 0
    for letter, cut in zip("qkv", cuts, strict=True):
        place = place_rows(whole, first, cut.size)
        placements[f"{letter}_conv1d.weight"] = cut_all(place, cut)
        first += cut.size
    return placements


def place_scattered(parameter: Tensor, rows: Tensor) -> WeightSlot:
    """Places a tensor whose row i is row `rows[i]` of the parameter."""
    return WeightSlot((len(rows), *parameter.shape[1:]), partial(Rows(rows).put, parameter))


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


def fill_matrix(weight: Tensor, spread: float, generator: torch.Generator) -> None:
    """Fills a dummy weight uniformly with standard deviation `spread`."""
    bound = spread * math.sqrt(3.0)
    weight.uniform_(-bound, bound, generator=generator)
