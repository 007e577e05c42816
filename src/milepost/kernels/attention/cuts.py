"""Cuts tiles of attention into items, each into as many as let a GPU's programs finish soonest.

Costs are in the time that a unit of KV takes.

Legend: T tokens, N tiles, P items.
"""

from __future__ import annotations

import numpy as np

from milepost.kernels.attention.tiles import (
    BEGIN,
    END,
    FIRST,
    ORDINAL,
    TOKENS,
    UNIT,
    ordinals_of,
)
from milepost.kernels.layout.batch import Ints

_ITEM_COST = 0.5
"""Of beginning and ending an item."""
NARROW_CUT_COST, WIDE_CUT_COST = 0.2, 1.0
"""Of writing an item's partial results and reading them again."""
_COMBINE_COST = 1.5
"""Of launching the kernel that does so."""
WAVES = 2
"""Cuts are tried that give every program so many items at most."""


def count_pieces(units: Ints, programs: int, cut_cost: float, most_waves: int = WAVES) -> Ints:
    """Into how many pieces to cut tiles of so many units of KV [N]: [N], so that `programs` at a
    time finish soonest, each after `most_waves` items; `cut_cost` is that of a partial result."""
    best = np.ones_like(units)
    if not len(units):
        return best
    total, longest = int(units.sum()), int(units.max())
    least = _cost(len(units), total, longest, int(units.min()), _ITEM_COST, programs)
    for waves in range(1, most_waves + 1):
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


def units_of(tiles: Ints, unit: int = UNIT) -> Ints:
    """Of KV, [N]."""
    return -(-(tiles[:, END] - tiles[:, BEGIN]) // unit)


def count_partials(narrow: Ints, narrow_pieces: Ints, wide: Ints, wide_pieces: Ints) -> Ints:
    """Partial results of each token [T], 0 where its result is whole: of tiles and their pieces. No
    token is in two narrow or two wide tiles; of one that is in both, those of the wide come first:
    a tile's ordinal comes to be that of its first piece."""
    if not len(wide):  # narrow ones follow each other
        counts = narrow_pieces.repeat(narrow[:, TOKENS])
    else:
        ends = [int((each[:, FIRST] + each[:, TOKENS]).max(initial=0)) for each in (narrow, wide)]
        counts = np.zeros(max(ends), np.int64)
        for tiles, pieces in ((wide, wide_pieces), (narrow, narrow_pieces)):
            tiles[:, ORDINAL] = counts[tiles[:, FIRST]]
            tokens = tiles[:, TOKENS]
            own = tiles[:, FIRST].repeat(tokens) + ordinals_of(tokens)
            counts[own] += pieces.repeat(tokens)
    counts[counts == 1] = 0
    return counts


def cut(tiles: Ints, pieces: Ints, counts: Ints, unit: int = UNIT) -> Ints:
    """Items [P, ITEM_SIZE] of `tiles` in `pieces` [N] of whole units of KV; `counts` [T] are each
    token's partial results."""
    if not len(tiles):
        return tiles
    if int(pieces.max()) > 1:
        sizes = (unit * -(-units_of(tiles, unit) // pieces)).repeat(pieces)
        items, ordinals = tiles.repeat(pieces, 0), ordinals_of(pieces)
        items[:, BEGIN] += ordinals * sizes
        items[:, END] = np.minimum(items[:, END], items[:, BEGIN] + sizes)
        items[:, ORDINAL] += ordinals
    else:
        items = tiles
    items[counts[items[:, FIRST]] == 0, ORDINAL] = -1
    return items
