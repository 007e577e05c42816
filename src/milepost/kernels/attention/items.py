"""Cuts a step's attention into items of work for the GPU's programs: on the host, from what the
host knows. `tiles` says which tokens work together, `cuts` into how many items.

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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milepost.kernels.attention.cuts import (
    NARROW_CUT_COST,
    WAVES,
    WIDE_CUT_COST,
    count_partials,
    count_pieces,
    cut,
)
from milepost.kernels.attention.tiles import MIN_SHARING, choose_dequantised, tile_all
from milepost.kernels.batch import Capacity, Ints

NARROW_ROWS = 16
MAX_NARROW_ROWS = 64
_WIDE_ROWS = 128
_SMALL_HEAD = 128


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


def choose_wide_rows(head_dim: int, shared_bytes: int, *, takes_apart: bool = False) -> int:
    """Rows of wide items on a chip: queries take up to half of a program's shared memory. Float8
    that no instruction takes apart is in the way of large heads: a thread of as many rows spills
    1,720 bytes on sm_80, of half as many none."""
    fit = shared_bytes // 2 >= _WIDE_ROWS * head_dim * 2
    crowded = takes_apart and head_dim > _SMALL_HEAD
    return _WIDE_ROWS if fit and not crowded else _WIDE_ROWS // 2


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
    narrow, wide = tile_all(starts, lengths, rows, narrow_tokens, wide_tokens, page_size, tables)
    dequantised = choose_dequantised(wide, page_size, max_dequantised)
    narrow_pieces = count_pieces(narrow, narrow_programs, NARROW_CUT_COST)
    wide_pieces = count_pieces(wide, programs, WIDE_CUT_COST)
    counts = count_partials((wide, wide_pieces), (narrow, narrow_pieces))
    ends = counts.cumsum()
    num_partials = int(ends[-1]) if len(ends) else 0
    if capacity is None:
        room = _Room(
            num_narrow=int(narrow_pieces.sum()),
            num_wide=int(wide_pieces.sum()),
            num_tokens=len(counts),
            num_sequences=len(dequantised),
            num_partials=num_partials,
            num_combined=int(counts.nonzero()[0][-1]) + 1 if num_partials else 0,
            num_dequantised=int(dequantised[:, 1].sum()),
        )
    else:
        assert not max_dequantised or len(dequantised) or not len(wide), "there is room for all"
        both = (narrow_tokens, narrow_programs), (wide_tokens, programs)
        room = _room(capacity, *both, max_dequantised)
    bases = np.empty(room.num_tokens + 1, np.int32)
    bases[:1], bases[1 : len(ends) + 1], bases[len(ends) + 1 :] = 0, ends, num_partials
    return AttentionItems(
        narrow=_lengthen(cut(narrow, narrow_pieces, counts), room.num_narrow),
        wide=_lengthen(cut(wide, wide_pieces, counts), room.num_wide),
        bases=bases,
        narrow_rows=narrow_rows,
        tokens_each=tokens_each,
        wide_rows=wide_rows,
        num_partials=room.num_partials,
        num_combined=room.num_combined,
        dequantised=_lengthen(dequantised, room.num_sequences),
        num_dequantised=room.num_dequantised,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """How long a layout's arrays are, and the most that kernels may find in them."""

    num_narrow: int
    num_wide: int
    num_tokens: int
    num_sequences: int
    num_partials: int
    num_combined: int
    num_dequantised: int


@cache
def _room(
    capacity: Capacity, narrow: tuple[int, int], wide: tuple[int, int], max_dequantised: int
) -> _Room:
    """For any step that fits; of narrow and of wide items the tokens of one, and how many programs
    run at a time."""
    (narrow_tokens, narrow_programs), (wide_tokens, programs) = narrow, wide
    num_tokens, num_sequences = capacity.num_tokens, capacity.num_sequences
    num_narrow = num_sequences + narrow_programs * max(WAVES) if narrow_tokens else 0
    # A sequence's last tile, and a run's, may hold few tokens.
    num_wide = num_tokens // wide_tokens + min(num_sequences, num_tokens // (narrow_tokens + 1))
    if num_sequences >= MIN_SHARING:
        num_wide += num_sequences // 2
    num_wide += programs * max(WAVES) if num_wide else 0
    return _Room(
        num_narrow=num_narrow,
        num_wide=num_wide,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_partials=num_narrow * narrow_tokens + num_wide * wide_tokens,
        num_combined=num_tokens,
        num_dequantised=max_dequantised,
    )


def _lengthen(array: Ints, length: int) -> NDArray[np.int32]:
    """In int32, with zeros behind."""
    assert len(array) <= length, f"a step's {len(array)} rows do not fit a capacity of {length}"
    padded = np.zeros((length, array.shape[1]), np.int32)
    padded[: len(array)] = array
    return padded
