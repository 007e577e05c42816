"""Scales of float8 KV, as checkpoints store them: one for a layer's keys and one for its values.

Legend: G KV heads.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from milepost.errors import WeightsError
from milepost.layers.parameters import ModuleScope, ParameterModule
from milepost.layers.weight_slots import WeightSlot, WeightSlots

_NAMES = {
    0: ("k_scale", "k_proj.k_scale", "k_proj.output_scale"),
    1: ("v_scale", "v_proj.v_scale", "v_proj.output_scale"),
}
"""Names that checkpoints give the scales, next to an attention layer's projections."""


class KVScales(ParameterModule):
    """`values` [2, G]: the scales of keys and of values; 1 if the checkpoint has none."""

    def __init__(self, num_kv_heads: int, scope: ModuleScope) -> None:
        super().__init__(scope)
        # Dummy keys and values are small enough for float8 unscaled.
        self.values = self.declare_slots(self._slots, scope.empty_precise(2, num_kv_heads))
        self.values.data.fill_(1)

    def _slots(self) -> WeightSlots:
        places: WeightSlots = {}
        for row, names in _NAMES.items():
            name = next(filter(self.scope.has, names), None)
            if name is not None:
                store = partial(_store, self.scope.full(name), self.values.data[row])
                places[name] = WeightSlot((1,), store)
        return places


def _store(name: str, row: Tensor, scale: Tensor) -> None:
    if not (scale.isfinite().all() and (scale > 0).all()):
        raise WeightsError(f"tensor {name!r} is {scale.item()}; a scale is a number above 0")
    row.copy_(scale.to(row.device, row.dtype).expand_as(row))
