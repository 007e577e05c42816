"""Cuts a prefill step in two, before the first layer that reads page tables.

The layers before the cut run while the host sends new page ids and lays out attention.
"""

from __future__ import annotations

from milepost.kernels.layout.batch import Capacity, Operation
from milepost.layers.context import AttentionSpec
from milepost.layers.parts import Layer
from milepost.models.decoder import Decoder


class GraphSplit:
    """The two pieces of one model."""

    def __init__(self, model: Decoder) -> None:
        layers: list[Layer] = list(model.layers)
        own = [_attention(layer) for layer in layers]
        self.num_first = next((index for index, found in enumerate(own) if found), 0)
        """Number of layers in the first piece; 0 if there is only one piece."""
        late = {operation for found in own for operation in found}
        late.update(model.ending)
        self.first = tuple(each for each in model.operations if each not in late)
        """Operations that are laid out for the first piece."""
        self.second = tuple(each for each in model.operations if each in late)

    def cut(self, capacity: Capacity) -> bool:
        """Whether such a step is cut. Decodes are not: they are laid out while the step before them
        runs."""
        return self.num_first > 0 and not capacity.decodes


def _attention(layer: Layer) -> list[Operation | None]:
    parts = (part for block in layer.blocks for part in block.parts)
    return [part.operation for part in parts if isinstance(part.spec, AttentionSpec)]
