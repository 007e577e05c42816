"""Cuts tiles of attention into items, each into as many as let a GPU's programs finish soonest.

Costs are in the time that a unit of KV takes.

Legend: T tokens, N tiles, P items.
"""

from __future__ import annotations

from functools import lru_cache

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
from milepost.kernels.batch import Ints

_ITEM_COST = 0.5
"""Of beginning and ending an item."""
NARROW_CUT_COST, WIDE_CUT_COST = 0.2, 1.0
"""Of writing an item's partial results and reading them again."""
_COMBINE_COST = 1.5
"""Of launching the kernel that does so."""
WAVES = (1, 2)
"""Cuts are tried that give every program one or two items."""
_NUM_REMEMBERED = 64
"""Layouts, by how much KV each tile has."""


def count_pieces(tiles: Ints, programs: int, cut_cost: float) -> Ints:
    """Into how many pieces to cut each of `tiles` [N, ITEM_SIZE]: [N], so that `programs` at a time
    finish soonest; `cut_cost` is that of a partial result. Not to be written to."""
    if not len(tiles):
        return tiles[:, TOKENS]
    return _count_pieces(_units(tiles).tobytes(), programs, cut_cost)


@lru_cache(maxsize=_NUM_REMEMBERED)
def _count_pieces(packed: bytes, programs: int, cut_cost: float) -> Ints:
    """By the units of each tile, which are the same in most steps of few sequences."""
    units = np.frombuffer(packed, np.int64)
    best = np.ones_like(units)
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


def count_partials(*cuts: tuple[Ints, Ints]) -> Ints:
    """Partial results of each token [T], 0 where its result is whole: of tiles and their pieces,
    kind by kind. No token is in two tiles of a kind; a tile's ordinal comes to be that of its first
    piece."""
    kinds = [(tiles, pieces) for tiles, pieces in cuts if len(tiles)]
    if len(kinds) == 1 and _are_in_order(kinds[0][0]):
        tiles, pieces = kinds[0]
        counts = pieces.repeat(tiles[:, TOKENS])
    else:
        counts = np.zeros(max((_num_tokens(tiles) for tiles, _ in kinds), default=0), np.int64)
        for tiles, pieces in kinds:
            tiles[:, ORDINAL] = counts[tiles[:, FIRST]]
            tokens = tiles[:, TOKENS]
            own = tiles[:, FIRST].repeat(tokens) + ordinals_of(tokens)
            counts[own] += pieces.repeat(tokens)
    counts[counts == 1] = 0
    return counts


def _are_in_order(tiles: Ints) -> bool:
    """Whether each tile begins where the one before ends."""
    ends = tiles[:, FIRST] + tiles[:, TOKENS]
    return not tiles[0, FIRST] and bool((tiles[1:, FIRST] == ends[:-1]).all())


def _num_tokens(tiles: Ints) -> int:
    return int((tiles[:, FIRST] + tiles[:, TOKENS]).max())


def cut(tiles: Ints, pieces: Ints, counts: Ints) -> Ints:
    """Items [P, ITEM_SIZE] of `tiles` in `pieces` [N]; `counts` [T] are each token's partial
    results."""
    if not len(tiles):
        return tiles
    if int(pieces.max()) > 1:
        sizes = (UNIT * -(-_units(tiles) // pieces)).repeat(pieces)
        items, ordinals = tiles.repeat(pieces, 0), ordinals_of(pieces)
        items[:, BEGIN] += ordinals * sizes
        items[:, END] = np.minimum(items[:, END], items[:, BEGIN] + sizes)
        items[:, ORDINAL] += ordinals
    else:
        items = tiles
    items[counts[items[:, FIRST]] == 0, ORDINAL] = -1
    return items
