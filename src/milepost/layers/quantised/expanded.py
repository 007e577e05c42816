"""Projections that are quantised in the checkpoint but kept in the model's dtype, because a layer
computes other matrices from them.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from milepost.layers.parameters import ModuleScope
from milepost.layers.quantised.base import QuantisedMatrix
from milepost.layers.weight_slots import WeightSlot, WeightSlots, cut_all, cut_outputs
from milepost.layers.weights import RawPrecision
from milepost.parallel import Cut


def place_expanded(
    name: str,
    shape: tuple[int, int],
    scope: ModuleScope,
    cut: Cut,
    store: Callable[[Tensor], object],
) -> WeightSlots:
    """Returns placements for the tensors of a projection, keyed by their names within it. `store`
    gets its weight [O, I] once all of them are there; O are the outputs that `cut` keeps."""
    precision = scope.precision(name)
    if isinstance(precision, RawPrecision):
        return {"weight": cut_all(WeightSlot(shape, store), cut)}
    path = scope.full(name)
    matrix = precision.matrix(*shape, scope)
    assert isinstance(matrix, QuantisedMatrix), f"{path} is raw or quantised"
    tensors = matrix.place(torch.arange(shape[0]), path)
    cut_outputs(tensors, matrix.axes, cut, path)
    missing = set(tensors)

    def note(part: str, place: WeightSlot, values: Tensor) -> None:
        place.store(values)
        missing.discard(part)
        if not missing:
            store(matrix.form.dequantise(scope.dtype))

    return {
        part: replace(place, store=partial(note, part, place)) for part, place in tensors.items()
    }
