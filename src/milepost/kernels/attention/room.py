"""Lengths of the arrays of a step's items that have room for any step of a capacity.

Legend: T tokens, S sequences, N narrow items, W wide items.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from milepost.kernels.attention.tiles import MIN_SHARING, MOST_PIECES, MOST_WIDE_PIECES, WAVES
from milepost.kernels.layout.batch import Capacity, Ints

if TYPE_CHECKING:
    from milepost.kernels.attention.items import Tiling


class Room(NamedTuple):
    """Lengths of a layout's arrays, and the most that kernels may find in them."""

    num_narrow: int
    num_wide: int
    num_tokens: int
    num_sequences: int
    num_partials: int
    """Largest number of partial results of all tokens together."""
    num_combined: int
    """End of the tokens with partial results."""
    num_dequantised: int
    """Largest number of FP8 pages that are copied together; 0 if items read pages as they are."""
    first_combined: int = 0
    """First token with partial results."""


@cache
def room_of(capacity: Capacity, tiling: Tiling) -> Room:
    """Returns the room that any step within the capacity needs."""
    num_tokens, num_sequences = capacity.num_tokens, capacity.num_sequences
    if tiling.order.is_fixed:
        num_narrow = capacity.num_sampled * MOST_PIECES
        num_wide = (2 * num_tokens // tiling.wide_tokens + num_sequences) * MOST_WIDE_PIECES
        return Room(
            num_narrow=num_narrow,
            num_wide=0 if capacity.decodes else num_wide,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_partials=num_narrow + (0 if capacity.decodes else num_tokens * MOST_WIDE_PIECES),
            num_combined=num_tokens,
            num_dequantised=0,
        )
    num_narrow = num_sequences + tiling.narrow_programs * tiling.shapes.narrow_waves
    if num_sequences == 1 and num_tokens <= tiling.narrow_tokens:
        # One tile is cut into no more than run at a time.
        num_narrow = tiling.narrow_programs
    num_narrow = num_narrow if tiling.narrow_tokens else 0
    # A sequence's last tile, and a run's, may hold few tokens.
    few = num_tokens // (tiling.narrow_tokens + 1)
    num_wide = num_tokens // tiling.wide_tokens + min(num_sequences, few)
    if num_sequences >= MIN_SHARING:
        num_wide += num_sequences // 2
    num_wide += tiling.programs * WAVES if num_wide else 0
    return Room(
        num_narrow=num_narrow,
        num_wide=num_wide,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_partials=num_narrow * tiling.narrow_tokens + num_wide * tiling.wide_tokens,
        num_combined=num_tokens,
        num_dequantised=tiling.max_dequantised,
    )


def lengthen(array: Ints | NDArray[np.int32], length: int) -> NDArray[np.int32]:
    """Returns the array in int32, padded with zeros."""
    assert len(array) <= length, f"a step's {len(array)} rows do not fit a capacity of {length}"
    padded = np.zeros((length, array.shape[1]), np.int32)
    padded[: len(array)] = array
    return padded
