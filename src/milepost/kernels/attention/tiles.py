"""Tiles of a step's attention: neighbouring tokens that read one page table's KV together, of one
sequence or of several that share their first pages. Tiles are cut into items.

Legend: S sequences, T tokens, N tiles, P items.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from milepost.kernels.layout.batch import Ints, ordinals_of

FIRST, TOKENS, ROW, POSITION, BEGIN, END, ORDINAL = range(7)
"""Columns of an item: first token, number of tokens (0: padding), row of the page tables, position
of the first token, range of the KV, and which of its tokens' partial results it leaves (-1: all of
the result). A tile is an item that is not cut yet: its ordinal is that of its first piece."""
ITEM_SIZE = 8
UNIT = 128
"""KV ranges begin at multiples of this many positions."""
MOST_PIECES, MOST_WIDE_PIECES = 32, 8
"""Largest number of pieces of a tile's KV if they depend on its length alone, for decodes and for
prefills."""
_LEAST_UNITS, _LEAST_WIDE_UNITS = 2, 24
"""Fewest units of such a piece: a long prompt then writes and combines few partial results. The few
tokens after a hit read as much KV in turn."""
GRID = 64
"""Tiles of prefills begin at multiples of this many positions in a FIXED order, so that bits do not
depend on where prompts are cut."""
_MIN_SHARED = 512
"""Fewest tokens that neighbours must share for an item of its own."""
MIN_SHARING = 4
"""Fewest sequences that must share tokens for an item of its own."""


WAVES = 2
"""Largest number of items per program in the numbers of pieces that are tried."""
NARROW_ROWS, WIDE_ROWS = 16, 128


class ItemShapes(NamedTuple):
    """Sizes of items."""

    narrow_rows: int = NARROW_ROWS
    narrow_unit: int = UNIT
    """The KV of a narrow item is a multiple of this many positions."""
    narrow_waves: int = WAVES
    """Largest number of narrow items that one program's place runs in turn."""
    num_beside: int = 1
    """Number of narrow items that run in the place of one program."""
    wide_rows: int = WIDE_ROWS


def tile_all(
    starts: Ints,
    lengths: Ints,
    rows: Ints,
    narrow_tokens: int,
    wide_tokens: int,
    page_size: int,
    tables: NDArray[Any] | None,
) -> tuple[Ints, Ints]:
    """Returns narrow and wide tiles [N, ITEM_SIZE] int64 of S sequences (see `items.lay_out`), of
    up to `narrow_tokens` and `wide_tokens` tokens each."""
    sequences = _as_tiles(starts, lengths, rows)
    is_narrow = sequences[:, TOKENS] <= narrow_tokens
    num_narrow = int(is_narrow.sum())
    runs = []
    positions, own_rows = sequences[:, POSITION], sequences[:, ROW]
    if num_narrow >= MIN_SHARING and may_share(positions, own_rows, page_size, tables):
        assert tables is not None
        runs = list(_find_runs(sequences, is_narrow, tables, page_size))
    if num_narrow == len(sequences) and not runs:
        return sequences, sequences[:0]
    wide = _tile(sequences[~is_narrow], wide_tokens)
    if runs:
        wide = np.concatenate((wide, _share(sequences, runs, wide_tokens)))
    return sequences[is_narrow], wide


def tile_by_phase(
    starts: Ints, lengths: Ints, rows: Ints, num_decodes: int, wide_tokens: int
) -> tuple[Ints, Ints]:
    """Returns narrow tiles of one token each for the first `num_decodes` sequences, and wide tiles
    that cross no multiple of GRID for the others. Neither depends on the rest of the step."""
    sequences = _as_tiles(starts, lengths, rows)
    num = int((lengths[:num_decodes] > 0).sum())
    size = 1 << min(wide_tokens, GRID).bit_length() - 1
    narrow = _tile(sequences[:num], 1)
    return narrow[np.argsort(narrow[:, FIRST])], _tile(sequences[num:], size)


def limit_to_window(tiles: Ints, window: int | None, grid: int = 1) -> None:
    """Lets the KV of `tiles` begin at most a unit before some token's window, in place. It begins
    at the same position for all tokens between two multiples of `grid`."""
    if window is not None:
        first = tiles[:, POSITION] // grid * grid + 1 - window
        tiles[:, BEGIN] = np.maximum(first, 0) // UNIT * UNIT


def count_pieces_by_position(narrow: Ints, wide: Ints) -> tuple[Ints, Ints]:
    """Returns the numbers of pieces of narrow and of wide tiles, which depend on the lengths of
    their KV alone. They are the same for all tokens between two multiples of GRID."""
    few, many = units_of(narrow), units_of(wide)
    return (
        _even(few, np.minimum(-(-few // _LEAST_UNITS), MOST_PIECES)),
        _even(many, np.clip(many // _LEAST_WIDE_UNITS, 1, MOST_WIDE_PIECES)),
    )


def _even(units: Ints, pieces: Ints) -> Ints:
    """Returns the number of pieces if all are as long as the longest, which may be fewer: 9 units
    in 6 pieces make 5 pieces of 2."""
    return -(-units // -(-units // pieces))


def may_share(starts: Ints, rows: Ints, page_size: int, tables: NDArray[Any] | None) -> bool:
    """Whether some of the sequences may share enough with their neighbour."""
    if tables is None or len(rows) < MIN_SHARING:
        return False
    are_long = starts >= _MIN_SHARED
    if not are_long.any():
        return False
    # Sequences that share enough share this page.
    pages = tables[rows, max(_MIN_SHARED // page_size - 1, 0)]
    return bool(((pages[1:] == pages[:-1]) & are_long[1:] & are_long[:-1]).any())


def _as_tiles(starts: Ints, lengths: Ints, rows: Ints) -> Ints:
    """Returns a tile for each sequence that has tokens, [S, ITEM_SIZE]."""
    tiles = np.zeros((len(lengths), ITEM_SIZE), np.int64)
    tiles[:, TOKENS] = lengths
    tiles[:, FIRST] = tiles[:, TOKENS].cumsum() - tiles[:, TOKENS]
    tiles[:, ROW] = rows
    tiles[:, POSITION] = starts
    tiles[:, END] = tiles[:, POSITION] + tiles[:, TOKENS]
    return tiles if tiles[:, TOKENS].all() else tiles[tiles[:, TOKENS] > 0]


def _tile(sequences: Ints, size: int) -> Ints:
    """Cuts sequences into tiles of `size` tokens; those that attend to the most KV come first."""
    counts = -(-sequences[:, TOKENS] // size)
    tiles = sequences.repeat(counts, 0)
    done = size * ordinals_of(counts)
    tiles[:, FIRST] += done
    tiles[:, POSITION] += done
    tiles[:, TOKENS] = np.minimum(tiles[:, TOKENS] - done, size)
    tiles[:, END] = tiles[:, POSITION] + tiles[:, TOKENS]
    return tiles[np.argsort(-tiles[:, END], kind="stable")]


def _find_runs(
    sequences: Ints, is_narrow: NDArray[np.bool_], tables: NDArray[Any], page_size: int
) -> Iterator[tuple[int, int, int]]:
    """Yields runs of neighbours that share pages: the first sequence, the end of the run, and the
    number of tokens that they share."""
    longest = int(sequences[is_narrow, POSITION].max()) // page_size
    pages = tables[sequences[:, ROW], :longest]
    differs = np.ones((len(pages) - 1, longest + 1), np.bool_)
    np.not_equal(pages[1:], pages[:-1], out=differs[:, :-1])
    both = np.minimum(sequences[1:, POSITION], sequences[:-1, POSITION])
    shared = np.minimum(differs.argmax(1) * page_size, both) // UNIT * UNIT
    linked = (shared >= _MIN_SHARED) & is_narrow[1:] & is_narrow[:-1]
    edges = np.flatnonzero(np.diff(linked, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2).tolist():
        if end - begin + 1 >= MIN_SHARING:
            yield begin, end + 1, int(shared[begin:end].min())


def _share(sequences: Ints, runs: list[tuple[int, int, int]], size: int) -> Ints:
    """Returns tiles for the KV that runs share, and lets the KV of their sequences begin after it,
    in place."""
    whole = np.zeros((len(runs), ITEM_SIZE), np.int64)
    for tile, (begin, end, shared) in zip(whole, runs, strict=True):
        sequences[begin:end, BEGIN] = shared
        tile[FIRST] = sequences[begin, FIRST]
        tile[TOKENS] = sequences[begin:end, TOKENS].sum()
        tile[ROW] = sequences[begin, ROW]
    tiles = _tile(whole, size)
    # Every token comes after all of the range.
    tiles[:, END] = sequences[
        np.searchsorted(sequences[:, FIRST], tiles[:, FIRST], "right") - 1, BEGIN
    ]
    tiles[:, POSITION] = tiles[:, END]
    return tiles


def choose_dequantised(wide: Ints, page_size: int, most: int) -> NDArray[np.int32]:
    """Returns `AttentionItems.dequantised` [S, 4] int32 for these tiles, empty if they read more
    pages than `most`. Replaces the tiles' rows by the numbers that name the copies."""
    if not len(wide) or not most:
        return np.zeros((0, 4), np.int32)
    rows, owners = np.unique(wide[:, ROW], return_inverse=True)
    ends = np.zeros(len(rows), np.int64)
    np.maximum.at(ends, owners, wide[:, END])
    counts = -(-ends // page_size)
    if counts.sum() > most:
        return np.zeros((0, 4), np.int32)
    before = counts.cumsum() - counts
    wide[:, ROW] = before[owners]
    return np.stack((rows, counts, before, np.zeros_like(rows)), 1).astype(np.int32)


# --- items; costs are in the time that a unit of KV takes -----------------------------------------

_ITEM_COST = 0.5
"""Cost of beginning and ending an item, in the time that a unit of KV takes."""
NARROW_CUT_COST, WIDE_CUT_COST = 0.2, 1.0
"""Costs of writing and reading an item's partial results, in the same unit."""
LIKE_MANY_COST = 8.0
"""Greatest cost of leaving wide tiles whole, as tiles of many tokens are, in the same unit."""
_COMBINE_COST = 1.5
"""Cost of launching the kernel that combines partial results, in the same unit."""


def count_pieces(
    units: Ints, programs: int, cut_cost: float, most_waves: int = WAVES, least_gain: float = 0.0
) -> Ints:
    """Returns the number of pieces [N] of tiles with these units of KV [N] for which `programs` at
    a time finish soonest, each after at most `most_waves` items. `cut_cost` is the cost of a
    partial result; tiles are cut only for a gain of more than `least_gain`."""
    best = np.ones_like(units)
    if not len(units):
        return best
    total, longest = int(units.sum()), int(units.max())
    least = _cost(len(units), total, longest, int(units.min()), _ITEM_COST, programs)
    least -= least_gain
    for waves in range(1, most_waves + 1):
        size = -(-total // (programs * waves))
        if size >= longest:
            continue
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
    """Returns the time at which the last of `count` items ends, if the longest begin first, each in
    the first free program."""
    in_rounds = -(-count // programs) * (longest + item_cost)
    on_average = (total + count * item_cost) / programs
    return max(longest + item_cost, min(in_rounds, on_average + shortest + item_cost))


def units_of(tiles: Ints, unit: int = UNIT) -> Ints:
    """Returns the units of KV of each tile, [N]."""
    return -(-(tiles[:, END] - tiles[:, BEGIN]) // unit)


def count_partials(narrow: Ints, narrow_pieces: Ints, wide: Ints, wide_pieces: Ints) -> Ints:
    """Returns the number of each token's partial results [T], 0 where its result is whole. No token
    is in two narrow or two wide tiles. If it is in both, those of the wide tile come first, and a
    tile's ordinal becomes that of its first piece."""
    if not len(wide):  # narrow tiles cover all tokens in order
        counts = narrow_pieces.repeat(narrow[:, TOKENS])
    else:
        ends = [int((each[:, FIRST] + each[:, TOKENS]).max(initial=0)) for each in (narrow, wide)]
        counts = np.zeros(max(ends), np.int64)
        for tiles, pieces in ((wide, wide_pieces), (narrow, narrow_pieces)):
            tiles[:, ORDINAL] = counts[tiles[:, FIRST]]
            tokens = tiles[:, TOKENS]
            token_numbers = tiles[:, FIRST].repeat(tokens) + ordinals_of(tokens)
            counts[token_numbers] += pieces.repeat(tokens)
    counts[counts == 1] = 0
    return counts


def cut(tiles: Ints, pieces: Ints, counts: Ints, unit: int = UNIT) -> Ints:
    """Returns items [P, ITEM_SIZE] of `tiles` in `pieces` [N] of whole units of KV; `counts` [T]
    are each token's partial results."""
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
