"""Which quantised weights our kernels take, and with which tiles."""

from __future__ import annotations

from milepost.kernels.layout.emit import Activations
from milepost.kernels.products.forms.quantised import BLOCK, Quantised
from milepost.kernels.products.tiles import FEW, MANY, choose

__all__ = ["FEW", "MANY", "choose", "suits"]


def suits(rows: Activations, *weights: Quantised) -> bool:
    """16-bit activations with contiguous rows, and whole blocks of inputs."""
    is_whole = all(weight.num_inputs % BLOCK == 0 for weight in weights)
    are_contiguous = rows.values is None or rows.values.stride(-1) == 1
    return rows.dtype.itemsize == 2 and are_contiguous and is_whole
