"""Rows of a table: `take`. torch's indexing is the definition; on a GPU the kernel of `rows.triton`
overlaps with the launches around it, which torch's does not.

Legend: T rows that are taken, V rows of the table, N numbers of each.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.platform.device import runs_triton
from milepost.kernels.platform.tables import fused

__all__ = ["take", "take_from_host"]


@fused("rows.triton")
def take(table: Tensor, places: Tensor) -> Tensor:
    """Returns rows [T, N] of `table` [V, N] at `places` [T] of any integer type, none below 0."""
    return table[places]


def take_from_host(table: Tensor, places: Tensor) -> Tensor:
    """Returns rows [T, N], where `places` [T] are, of a `table` [V, N] in host memory, which is
    pinned if they are on a GPU."""
    if not runs_triton(places):
        return table[places]
    from milepost.kernels.rows import triton

    return triton.take(table, places)
