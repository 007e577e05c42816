"""Cuts tiles of attention into items, each into as many as let a GPU's programs finish soonest.

Costs are in the time that a unit of KV takes.

Legend: T tokens, N tiles, P items.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from milepost.kernels.attention.tiles import (
    BEGIN,
    END,
    FIRST,
    ORDINAL,
    TOKENS,
    UNIT,
    ordinals_of,
)
from milepost.kernels.batch import Ints

_ITEM_COST = 0.5
"""Of beginning and ending an item."""
NARROW_CUT_COST, WIDE_CUT_COST = 0.2, 1.0
"""Of writing an item's partial results and reading them again."""
_COMBINE_COST = 1.5
"""Of launching the kernel that does so."""
WAVES = (1, 2)
"""Cuts are tried that give every program one or two items."""


def count_pieces(tiles: Ints, programs: int, cut_cost: float) -> Ints:
    """Into how many pieces to cut each of `tiles` [N, ITEM_SIZE]: [N], so that `programs` at a time
    finish soonest; `cut_cost` is that of a partial result."""
    units = _units(tiles)
    best = np.ones_like(units)
    if not len(units):
        return best
    total, longest = int(units.sum()), int(units.max())
    least = _cost(len(units), total, longest, int(units.min()), _ITEM_COST, programs)
    for waves in WAVES:
        size = -(-total // (programs * waves))
        if size >= longest:
            continue
        # Pieces of equal size may be fewer: 9 units in 6 pieces are 5 of 2.
        sizes = -(-units // -(-units // size))
        pieces = -(-units // sizes)
        extents = total, int(sizes.max()), int(sizes.min())
        cost = _cost(int(pieces.sum()), *extents, _ITEM_COST + cut_cost, programs) + _COMBINE_COST
        if cost < least:
            best, least = pieces, cost
    return best


def _cost(
    count: int, total: int, longest: int, shortest: int, item_cost: float, programs: int
) -> float:
    """When the last of `count` items is done, the longest first and each by the first program that
    is free."""
    in_rounds = -(-count // programs) * (longest + item_cost)
    on_average = (total + count * item_cost) / programs
    return max(longest + item_cost, min(in_rounds, on_average + shortest + item_cost))


def _units(tiles: Ints) -> Ints:
    return -(-(tiles[:, END] - tiles[:, BEGIN]) // UNIT)


def add_pieces(counts: Ints, tiles: Ints, pieces: Ints) -> None:
    """Count the pieces that each token takes part in; no token is in two of the tiles."""
    tokens = tiles[:, TOKENS]
    if len(tiles) == len(counts):
        counts[tiles[:, FIRST]] += pieces
        return
    counts[tiles[:, FIRST].repeat(tokens) + ordinals_of(tokens)] += pieces.repeat(tokens)


def cut(tiles: Ints, pieces: Ints, counts: Ints) -> NDArray[np.int32]:
    """Items [P, ITEM_SIZE] int32 of `tiles` in `pieces` [N]; `counts` [T] are each token's partial
    results."""
    if not len(tiles):
        return tiles.astype(np.int32)
    sizes = UNIT * -(-_units(tiles) // pieces)
    items, size, ordinals = tiles.repeat(pieces, 0), sizes.repeat(pieces), ordinals_of(pieces)
    items[:, BEGIN] += ordinals * size
    items[:, END] = np.minimum(items[:, END], items[:, BEGIN] + size)
    items[:, ORDINAL] += ordinals
    items[counts[items[:, FIRST]] == 0, ORDINAL] = -1
    return items.astype(np.int32)
