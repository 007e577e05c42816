"""Cuts a step's attention into items of work for the GPU's programs, on the host. `tiles` says
which tokens work together, and into how many items each tile is cut.

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

The contents of the arrays depend on the step. Their sizes depend only on the capacity, if there is
one, so a captured graph can be replayed with any step that fits.

Legend: T tokens, S sequences, N narrow items, W wide items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from milepost.kernels.attention.room import Room, lengthen, room_of
from milepost.kernels.attention.tiles import (
    END,
    FIRST,
    GRID,
    LIKE_MANY_COST,
    NARROW_CUT_COST,
    POSITION,
    TOKENS,
    WIDE_CUT_COST,
    ItemShapes,
    choose_dequantised,
    count_partials,
    count_pieces,
    count_pieces_by_position,
    cut,
    limit_to_window,
    may_share,
    tile_all,
    tile_by_phase,
    units_of,
)
from milepost.kernels.layout.batch import Batch, Capacity, Ints
from milepost.kernels.platform.device import Chip
from milepost.kernels.platform.tables import SumOrder

_NUM_REMEMBERED = 64
"""Number of layouts kept, for steps of few sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionItems:
    """The work of a step: int32 arrays, in numpy from `lay_out`, on the device for `attend`."""

    narrow: Any
    """[N, ITEM_SIZE]."""
    wide: Any
    """[W, ITEM_SIZE]."""
    bases: Any
    """[T + 1], first partial result of each token; results that are whole have none."""
    dequantised: Any
    """[S, 4], sequences whose FP8 pages wide items read as a 16-bit copy: row of the page tables,
    number of pages, and number of pages of the sequences before it, by which wide items name the
    sequence instead of the row."""
    tiling: Tiling
    """Sizes that the work was cut by."""
    room: Room
    """Lengths of the arrays, and the most that kernels may find in them."""


class Tiling(NamedTuple):
    """Sizes that work is cut by, for a model's heads on a chip. A layout depends on these and the
    step alone."""

    heads_per_kv: int
    num_kv_heads: int
    page_size: int
    num_programs: int
    """Number of programs that run on the device at a time."""
    shapes: ItemShapes = ItemShapes()
    tokens_each: int = 1
    """Tokens of most narrow items."""
    max_dequantised: int = 0
    """Largest number of FP8 pages that wide items read as a 16-bit copy."""
    window: int | None = None
    """Number of tokens that a token attends to; None for all. Earlier KV is neither read nor
    shared."""
    capacity: Capacity | None = None
    """Capacity that the arrays have room for; None for the step's own."""
    order: SumOrder = SumOrder.FREE
    """LIKE_MANY leaves wide tiles whole where that costs little, as those of many tokens are. With
    FIXED, items depend on a sequence alone: none are shared, decodes' are narrow, a token each,
    those of prefills are wide, all are cut by their positions, and partial results are combined in
    an order that does not depend on their number."""

    @property
    def narrow_tokens(self) -> int:
        return self.shapes.narrow_rows // self.heads_per_kv

    @property
    def wide_tokens(self) -> int:
        return self.shapes.wide_rows // self.heads_per_kv

    @property
    def programs(self) -> int:
        """Number of wide items that run at a time for each KV head."""
        return max(1, self.num_programs // self.num_kv_heads)

    @property
    def narrow_programs(self) -> int:
        """Number of narrow items that run at a time for each KV head."""
        return max(1, self.num_programs * self.shapes.num_beside // self.num_kv_heads)


def tile(
    batch: Batch, chip: Chip, shapes: ItemShapes, heads_per_kv: int, num_kv_heads: int
) -> Tiling:
    """Returns how the batch's work is cut for these heads on a chip."""
    return Tiling(
        heads_per_kv=heads_per_kv,
        num_kv_heads=num_kv_heads,
        page_size=batch.page_size,
        num_programs=chip.num_sms,
        shapes=shapes,
        capacity=None if batch.capacity.is_exact else batch.capacity,
        order=batch.order,
    )


def lay_out(
    starts: Sequence[int] | Ints,
    lengths: Sequence[int] | Ints,
    rows: Sequence[int] | Ints,
    tiling: Tiling,
    tables: NDArray[Any] | None = None,
    num_decodes: int = 0,
) -> AttentionItems:
    """Lays out S sequences of `lengths` new tokens after `starts` earlier ones, whose pages stand
    in `rows` of the page tables.

    `tables` [rows, pages] is the host's copy of the page tables: with it, pages that neighbouring
    decodes share are read once for all of them. `num_decodes` is the number of leading sequences
    that decode; it matters only if the tiling's order is FIXED.
    """
    heads, wide_rows = tiling.heads_per_kv, tiling.shapes.wide_rows
    if heads > wide_rows:
        raise ValueError(f"heads_per_kv={heads} is more than wide_rows={wide_rows}")
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    rows = np.asarray(rows, np.int64)
    if tiling.order.is_fixed:
        narrow, wide = tile_by_phase(starts, lengths, rows, num_decodes, tiling.wide_tokens)
        limit_to_window(narrow, tiling.window)
        limit_to_window(wide, tiling.window, GRID)
        return _assemble(narrow, wide, *count_pieces_by_position(narrow, wide), tiling)
    are_narrow = len(lengths) > 0 and lengths.min() > 0 and lengths.max() <= tiling.narrow_tokens
    is_own = tiling.capacity is None or not are_narrow or tiling.window is not None
    if is_own or may_share(starts, rows, tiling.page_size, tables):
        return _lay_out(starts, lengths, rows, tables, tiling)
    ends = starts + lengths
    units = -(-ends // tiling.shapes.narrow_unit)
    cuts = _cut_alone(units.tobytes(), tiling.narrow_programs, tiling.shapes.narrow_waves)
    return _lay_out_like(lengths.tobytes(), *cuts, rows.tobytes(), tiling).up_to(starts, ends)


class _Known(NamedTuple):
    """The layout of a step whose items are all narrow and share nothing. Sequences may end anywhere
    in their last unit of KV."""

    items: AttentionItems
    owners: Ints
    """[P], sequence of each item, without padding."""
    limits: Ints
    """[P], greatest end of each item."""

    def up_to(self, starts: Ints, ends: Ints) -> AttentionItems:
        """Returns the layout of sequences with these ends."""
        narrow, real = self.items.narrow.copy(), slice(len(self.owners))
        narrow[real, POSITION] = starts[self.owners]
        narrow[real, END] = np.minimum(ends[self.owners], self.limits)
        return replace(self.items, narrow=narrow)


@lru_cache(maxsize=_NUM_REMEMBERED)
def _cut_alone(units: bytes, programs: int, most_waves: int) -> tuple[bytes, bytes]:
    """Returns the number of pieces of each sequence with these units of KV, and the units of a
    piece, or 0 if there is one piece; both are packed int64. Cached, because few sequences mostly
    have the units of the step before."""
    num_units = np.frombuffer(units, np.int64)
    pieces = count_pieces(num_units, programs, NARROW_CUT_COST, most_waves)
    return pieces.tobytes(), np.where(pieces > 1, -(-num_units // pieces), 0).tobytes()


@lru_cache(maxsize=_NUM_REMEMBERED)
def _lay_out_like(
    lengths: bytes, pieces: bytes, units_each: bytes, rows: bytes, tiling: Tiling
) -> _Known:
    """Lays out any step of narrow items with these lengths, rows of the page tables, and pieces of
    KV."""
    num_tokens, cuts, each, table_rows = (
        np.frombuffer(packed, np.int64) for packed in (lengths, pieces, units_each, rows)
    )
    ends = tiling.shapes.narrow_unit * np.maximum(cuts * each, 1)
    items = _lay_out(ends - num_tokens, num_tokens, table_rows, None, tiling, cuts)
    narrow = items.narrow[items.narrow[:, TOKENS] > 0].astype(np.int64)
    owners = (num_tokens.cumsum() - num_tokens).searchsorted(narrow[:, FIRST])
    is_last = narrow[:, END] == ends[owners]
    return _Known(items, owners, np.where(is_last, np.iinfo(np.int64).max, narrow[:, END]))


def _lay_out(
    starts: Ints,
    lengths: Ints,
    rows: Ints,
    tables: NDArray[Any] | None,
    tiling: Tiling,
    narrow_pieces: Ints | None = None,
) -> AttentionItems:
    """Lays out a step; `narrow_pieces` [N] are the pieces of its narrow tiles if they are known."""
    shapes = tiling.shapes
    tables = tables if tiling.window is None else None
    narrow, wide = tile_all(
        starts, lengths, rows, tiling.narrow_tokens, tiling.wide_tokens, tiling.page_size, tables
    )
    limit_to_window(narrow, tiling.window)
    limit_to_window(wide, tiling.window)
    if narrow_pieces is None:
        given = tiling.narrow_programs, NARROW_CUT_COST, shapes.narrow_waves
        narrow_pieces = count_pieces(units_of(narrow, shapes.narrow_unit), *given)
    gain = LIKE_MANY_COST if tiling.order is SumOrder.LIKE_MANY else 0.0
    wide_pieces = count_pieces(units_of(wide), tiling.programs, WIDE_CUT_COST, least_gain=gain)
    return _assemble(narrow, wide, narrow_pieces, wide_pieces, tiling)


def _assemble(
    narrow: Ints, wide: Ints, narrow_pieces: Ints, wide_pieces: Ints, tiling: Tiling
) -> AttentionItems:
    """Cuts tiles into these numbers of pieces and returns the items."""
    shapes = tiling.shapes
    dequantised = choose_dequantised(wide, tiling.page_size, tiling.max_dequantised)
    counts = count_partials(narrow, narrow_pieces, wide, wide_pieces)
    ends = counts.cumsum()
    num_partials = int(ends[-1]) if len(ends) else 0
    if tiling.capacity is None:
        combined = counts.nonzero()[0]
        room = Room(
            num_narrow=int(narrow_pieces.sum()),
            num_wide=int(wide_pieces.sum()),
            num_tokens=len(counts),
            num_sequences=len(dequantised),
            num_partials=num_partials,
            num_combined=int(combined[-1]) + 1 if num_partials else 0,
            first_combined=int(combined[0]) if num_partials else 0,
            num_dequantised=int(dequantised[:, 1].sum()),
        )
    else:
        is_short = tiling.max_dequantised and not len(dequantised)
        assert not is_short or not len(wide), "there is room for all pages"
        room = room_of(tiling.capacity, tiling)
    bases = np.empty(room.num_tokens + 1, np.int32)
    bases[:1], bases[1 : len(ends) + 1], bases[len(ends) + 1 :] = 0, ends, num_partials
    return AttentionItems(
        narrow=lengthen(cut(narrow, narrow_pieces, counts, shapes.narrow_unit), room.num_narrow),
        wide=lengthen(cut(wide, wide_pieces, counts), room.num_wide),
        bases=bases,
        dequantised=lengthen(dequantised, room.num_sequences),
        tiling=tiling,
        room=room,
    )
