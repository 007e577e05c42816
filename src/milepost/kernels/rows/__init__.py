"""Rows of a table: `take`. Torch's indexing is the definition; on a GPU its launches do not overlap
with those around them.

Legend: T rows that are taken, V rows of the table, N numbers of each.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.platform.tables import fused

__all__ = ["take"]


@fused("rows.triton")
def take(table: Tensor, places: Tensor) -> Tensor:
    """Rows [T, N] of `table` [V, N] at `places` [T] of any integer type, none below 0."""
    return table[places]
