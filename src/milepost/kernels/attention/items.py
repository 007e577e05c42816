"""Cuts a step's attention into items of work for the GPU's programs: on the host, from what the
host knows.

An item is a tile of neighbouring tokens and a range of one page table's KV that they attend to. The
query heads of one KV head stand beside each other in a tile's rows, so 128 rows hold 16 tokens
where 8 query heads share a KV head. Tokens whose KV is cut into several ranges get as many partial
results, which are combined afterwards; here four decodes that share their first pages:

    token 0   [ shared: partial 0, one item for all four ][ own: partial 1 ][ own: partial 2 ]
    token 1   [                                          ][ own: partial 1 ]
    token 2   [                                          ][ own: partial 1 ]
    token 3   [                                          ][ own: partial 1 ]

There are narrow items for decodes, which wait for memory, and wide ones for prefills, which wait
for arithmetic, and for shared pages, whose KV is then read once for many tokens.

What the arrays hold depends on a step's contents. Their sizes depend on capacities alone where
capacities are given, so a captured graph can be replayed with any step that fits.

Legend: T tokens, S sequences, N narrow items, W wide items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milepost.kernels.batch import Capacity, Ints

FIRST, TOKENS, ROW, POSITION, BEGIN, END, ORDINAL = range(7)
"""Columns of an item: first token, number of tokens (0: padding), row of the page tables, position
of the first token, range of the KV, and which of its tokens' partial results it leaves (-1: all of
the result). A tile is an item that is not cut yet: its ordinal is that of its first piece."""
ITEM_SIZE = 8

NARROW_ROWS = 16
MAX_NARROW_ROWS = 64
_WIDE_ROWS = 128
UNIT = 128
"""KV ranges begin at multiples of this."""

_MIN_SHARED = 512
"""Tokens that neighbours must share to be worth an item of their own."""
_MIN_SHARING = 4
"""Sequences, likewise."""
_ITEM_COST = 0.5
"""What it costs to begin and end an item, in the time that a unit of KV takes."""
_NARROW_CUT_COST, _WIDE_CUT_COST = 0.2, 1.0
"""What it costs to write an item's partial results and read them again, likewise."""
_COMBINE_COST = 1.5
"""What it costs to launch the kernel that does so."""
_WAVES = (1, 2)
"""Cuts are tried that give every program one or two items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionItems:
    """The work of a step: int32 arrays, in numpy from `lay_out`, on the device for `attend`."""

    narrow: Any
    """[N, ITEM_SIZE]."""
    wide: Any
    """[W, ITEM_SIZE]."""
    bases: Any
    """[T + 1], where each token's partial results begin; results that are whole have none."""
    narrow_rows: int
    tokens_each: int
    """Of most narrow items."""
    wide_rows: int
    num_partials: int
    """Partial results of all tokens, at most."""
    num_combined: int
    """Tokens from here on have no partial results."""
    dequantised: Any
    """[S, 4], sequences whose float8 pages wide items read in a 16-bit type: the row of the page
    tables, how many pages, and how many pages those before it have; wide items name that number
    in place of the row."""
    num_dequantised: int
    """Pages of all of them, at most; 0: items read pages as they are."""


def choose_narrow_rows(heads_per_kv: int, tokens_each: int) -> int:
    """Rows of narrow items where most sequences have so many tokens, which then read their KV
    together."""
    rows = 1 << (heads_per_kv * tokens_each - 1).bit_length()
    return max(rows, NARROW_ROWS) if rows <= MAX_NARROW_ROWS else NARROW_ROWS


def choose_wide_rows(head_dim: int, shared_bytes: int) -> int:
    """Rows of wide items on a chip: queries take up to half of a program's shared memory."""
    fit = shared_bytes // 2 >= _WIDE_ROWS * head_dim * 2
    return _WIDE_ROWS if fit else _WIDE_ROWS // 2


def lay_out(
    starts: Sequence[int],
    lengths: Sequence[int],
    rows: Sequence[int],
    *,
    heads_per_kv: int,
    num_kv_heads: int,
    page_size: int,
    num_programs: int,
    tables: NDArray[Any] | None = None,
    capacity: Capacity | None = None,
    narrow_rows: int = NARROW_ROWS,
    tokens_each: int = 1,
    wide_rows: int = _WIDE_ROWS,
    num_beside: int = 1,
    max_dequantised: int = 0,
) -> AttentionItems:
    """Lay out S sequences of `lengths` new tokens after `starts` earlier ones, whose pages stand in
    `rows` of the page tables.

    `tables` [rows, pages] is the host's copy of the page tables: with it, pages that neighbouring
    decodes share are read once for all of them. `num_programs` run on the device at a time, of
    narrow items `num_beside` times as many. If wide items read no more than `max_dequantised`
    pages, these are dequantised first.
    """
    if heads_per_kv > wide_rows:
        raise ValueError(f"heads_per_kv={heads_per_kv} is more than wide_rows={wide_rows}")
    narrow_tokens, wide_tokens = narrow_rows // heads_per_kv, wide_rows // heads_per_kv
    programs = max(1, num_programs // num_kv_heads)
    narrow_programs = max(1, num_programs * num_beside // num_kv_heads)
    narrow, wide = _tile_all(starts, lengths, rows, narrow_tokens, wide_tokens, page_size, tables)
    dequantised = _gather(wide, page_size, max_dequantised)
    counts = np.zeros(sum(lengths), np.int64)
    wide_pieces = _count_pieces(wide, programs, _WIDE_CUT_COST)
    _add(counts, wide, wide_pieces)
    narrow[:, ORDINAL] = counts[narrow[:, FIRST]]
    narrow_pieces = _count_pieces(narrow, narrow_programs, _NARROW_CUT_COST)
    _add(counts, narrow, narrow_pieces)
    counts[counts == 1] = 0
    bases = np.zeros(len(counts) + 1, np.int32)
    counts.cumsum(out=bases[1:])
    items = AttentionItems(
        narrow=_cut(narrow, narrow_pieces, counts),
        wide=_cut(wide, wide_pieces, counts),
        bases=bases,
        narrow_rows=narrow_rows,
        tokens_each=tokens_each,
        wide_rows=wide_rows,
        num_partials=int(bases[-1]),
        num_combined=int(counts.nonzero()[0][-1]) + 1 if bases[-1] else 0,
        dequantised=dequantised,
        num_dequantised=int(dequantised[:, 1].sum()),
    )
    if capacity is None:
        return items
    assert not max_dequantised or len(dequantised) or not len(wide), "there is room for all pages"
    items = replace(items, num_dequantised=max_dequantised)
    return _pad(items, capacity, narrow_tokens, wide_tokens, (narrow_programs, programs))


def _tile_all(
    starts: Sequence[int],
    lengths: Sequence[int],
    rows: Sequence[int],
    narrow_tokens: int,
    wide_tokens: int,
    page_size: int,
    tables: NDArray[Any] | None,
) -> tuple[Ints, Ints]:
    """Narrow and wide tiles."""
    sequences = _as_tiles(starts, lengths, rows)
    is_narrow = sequences[:, TOKENS] <= narrow_tokens
    num_narrow = int(is_narrow.sum())
    runs = []
    if tables is not None and num_narrow >= _MIN_SHARING:
        runs = list(_find_runs(sequences, is_narrow, tables, page_size))
    if num_narrow == len(sequences) and not runs:
        return sequences, sequences[:0]
    wide = _tile(sequences[~is_narrow], wide_tokens)
    if runs:
        wide = np.concatenate((wide, _share(sequences, runs, wide_tokens)))
    return sequences[is_narrow], wide


def _as_tiles(starts: Sequence[int], lengths: Sequence[int], rows: Sequence[int]) -> Ints:
    """A tile for each sequence that has tokens, [S, ITEM_SIZE]."""
    tiles = np.zeros((len(lengths), ITEM_SIZE), np.int64)
    tiles[:, TOKENS] = lengths
    tiles[:, FIRST] = tiles[:, TOKENS].cumsum() - tiles[:, TOKENS]
    tiles[:, ROW] = rows
    tiles[:, POSITION] = starts
    tiles[:, END] = tiles[:, POSITION] + tiles[:, TOKENS]
    return tiles if tiles[:, TOKENS].all() else tiles[tiles[:, TOKENS] > 0]


def _tile(sequences: Ints, size: int) -> Ints:
    """Cut sequences into tiles of `size` tokens; those that attend to the most KV come first."""
    counts = -(-sequences[:, TOKENS] // size)
    tiles = sequences.repeat(counts, 0)
    done = size * _ordinals(counts)
    tiles[:, FIRST] += done
    tiles[:, POSITION] += done
    tiles[:, TOKENS] = np.minimum(tiles[:, TOKENS] - done, size)
    tiles[:, END] = tiles[:, POSITION] + tiles[:, TOKENS]
    return tiles[np.argsort(-tiles[:, END], kind="stable")]


def _find_runs(
    sequences: Ints, is_narrow: NDArray[np.bool_], tables: NDArray[Any], page_size: int
) -> Iterator[tuple[int, int, int]]:
    """Neighbours that share pages: first and last + 1 sequence, and how many tokens."""
    longest = int(sequences[is_narrow, POSITION].max()) // page_size
    pages = tables[sequences[:, ROW], :longest]
    differs = np.ones((len(pages) - 1, longest + 1), np.bool_)
    np.not_equal(pages[1:], pages[:-1], out=differs[:, :-1])
    both = np.minimum(sequences[1:, POSITION], sequences[:-1, POSITION])
    shared = np.minimum(differs.argmax(1) * page_size, both) // UNIT * UNIT
    linked = (shared >= _MIN_SHARED) & is_narrow[1:] & is_narrow[:-1]
    edges = np.flatnonzero(np.diff(linked, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2).tolist():
        if end - begin + 1 >= _MIN_SHARING:
            yield begin, end + 1, int(shared[begin:end].min())


def _share(sequences: Ints, runs: list[tuple[int, int, int]], size: int) -> Ints:
    """Tiles for what runs share; the sequences' own KV begins after it from here on."""
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


def _gather(wide: Ints, page_size: int, most: int) -> NDArray[np.int32]:
    """`AttentionItems.dequantised` of these tiles, none if they read more pages than `most`; tiles
    come to name what they are to name."""
    rows, owners = np.unique(wide[:, ROW], return_inverse=True)
    ends = np.zeros(len(rows), np.int64)
    np.maximum.at(ends, owners, wide[:, END])
    counts = -(-ends // page_size)
    if counts.sum() > most:
        return np.zeros((0, 4), np.int32)
    before = counts.cumsum() - counts
    wide[:, ROW] = before[owners]
    return np.stack((rows, counts, before, np.zeros_like(rows)), 1).astype(np.int32)


def _count_pieces(tiles: Ints, programs: int, cut_cost: float) -> Ints:
    """How many pieces to cut each tile into, so that `programs` at a time finish soonest.

    Costs are in units of KV; `cut_cost` is that of a partial result.
    """
    units = _units(tiles)
    best = np.ones_like(units)
    if not len(units):
        return best
    total, longest = int(units.sum()), int(units.max())
    least = _cost(len(units), total, longest, int(units.min()), _ITEM_COST, programs)
    for waves in _WAVES:
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


def _add(counts: Ints, tiles: Ints, pieces: Ints) -> None:
    """Count the pieces that each token takes part in; no token is in two of the tiles."""
    tokens = tiles[:, TOKENS]
    if len(tiles) == len(counts):
        counts[tiles[:, FIRST]] += pieces
        return
    counts[tiles[:, FIRST].repeat(tokens) + _ordinals(tokens)] += pieces.repeat(tokens)


def _cut(tiles: Ints, pieces: Ints, counts: Ints) -> NDArray[np.int32]:
    """Items from tiles; `counts` holds each token's partial results."""
    if not len(tiles):
        return tiles.astype(np.int32)
    sizes = UNIT * -(-_units(tiles) // pieces)
    items, size, ordinals = tiles.repeat(pieces, 0), sizes.repeat(pieces), _ordinals(pieces)
    items[:, BEGIN] += ordinals * size
    items[:, END] = np.minimum(items[:, END], items[:, BEGIN] + size)
    items[:, ORDINAL] += ordinals
    items[counts[items[:, FIRST]] == 0, ORDINAL] = -1
    return items.astype(np.int32)


def _ordinals(counts: Ints) -> Ints:
    """0, 1 ... count - 1 for each of `counts`."""
    return np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)


def _pad(
    items: AttentionItems,
    capacity: Capacity,
    narrow_tokens: int,
    wide_tokens: int,
    programs: tuple[int, int],
) -> AttentionItems:
    """The same with arrays as long as any step's that fits; `programs` of narrow and of wide
    items."""
    num_tokens, num_sequences = capacity.num_tokens, capacity.num_sequences
    narrow_cuts, cuts = (number * max(_WAVES) for number in programs)
    narrow = num_sequences + narrow_cuts if narrow_tokens else 0
    # A sequence's last tile, and a run's, may hold few tokens.
    wide = num_tokens // wide_tokens + min(num_sequences, num_tokens // (narrow_tokens + 1))
    if num_sequences >= _MIN_SHARING:
        wide += num_sequences // 2
    wide = wide + cuts if wide else 0
    return AttentionItems(
        narrow=_lengthen(items.narrow, narrow, 0),
        wide=_lengthen(items.wide, wide, 0),
        bases=_lengthen(items.bases, num_tokens + 1, items.bases[-1]),
        narrow_rows=items.narrow_rows,
        tokens_each=items.tokens_each,
        wide_rows=items.wide_rows,
        num_partials=narrow * narrow_tokens + wide * wide_tokens,
        num_combined=num_tokens,
        dequantised=_lengthen(items.dequantised, num_sequences, 0),
        num_dequantised=items.num_dequantised,
    )


def _lengthen(array: NDArray[np.int32], length: int, value: int) -> NDArray[np.int32]:
    assert len(array) <= length, f"a step's {len(array)} rows do not fit a capacity of {length}"
    padded = np.full((length, *array.shape[1:]), value, np.int32)
    padded[: len(array)] = array
    return padded
