"""The layout of KV in pages; and the rows that a step writes and reads, for the reference.

A layer's pool is [pages, 2, page_size, G, E]: a page's keys, then its values. Pages are further
apart if they hold other layers too, or are padded. So KV is addressed by *rows* of the memory, each
a key or a value of one token: a token's key is in row page * page_rows + offset, its value
page_size rows later. Latent attention keeps one row per token, from which keys and values are made:
its pools are [pages, 1, page_size, 1, E]. An attention layer with an indexer has a third row per
token, [pages, 3, page_size, G, E], whose first entries are its index key.

Rows may be float8_e4m3fn: numbers divided by a scale that is set once for a head's keys or values,
so what is written for a token depends on nothing else.

A row that no token was written to holds anything, perhaps NaN, and is never read.

Legend: G KV heads, E head_dim, R rows, W tokens whose KV is written, D tokens of decoding sequences
(the first D of the batch: one each unless a step verifies), L tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from milepost.kernels.layout.batch import Batch, Ints, ordinals_of
from milepost.kernels.platform.tables import SumOrder
from milepost.kernels.platform.tensors import FP8, round_fp8

_TMA_ROWS = 2**31
"""Rows that TMA can count."""
PIECE = 64
"""Queries of a prefill that are computed together if bits must not depend on where prompts are
cut."""


class PagedKV(NamedTuple):
    """A layer's KV on the device."""

    pool: Tensor
    """[pages, 2, page_size, G, E]"""
    tables: Tensor | None = None
    """[rows, pages] int32, each sequence's pages in order. The reference does not read it."""
    scales: Tensor | None = None
    """[2, G] float32 of keys' and values' heads, by which numbers in FP8 were divided; of latents
    [1]."""

    @property
    def is_fp8(self) -> bool:
        return self.pool.dtype == FP8

    @property
    def fp8_scales(self) -> Tensor | None:
        """The scales if the pages are FP8, else None."""
        return self.scales if self.is_fp8 else None


def rows_per_page(pool: Tensor) -> int:
    """Returns the number of rows from one page to the next."""
    return pool.stride(0) // pool.stride(2)


def fits_tma(pool: Tensor) -> bool:
    """Whether TMA can count the pool's rows."""
    return _num_rows(pool) < _TMA_ROWS


def _num_rows(pool: Tensor) -> int:
    num_pages, rows_each, page_size, *_ = pool.shape
    return (num_pages - 1) * rows_per_page(pool) + rows_each * page_size


def as_rows(pool: Tensor) -> Tensor:
    """Returns a pool's memory, from its first row to its last, as [R, G, E]. Rows of other layers
    between them are included."""
    return pool.as_strided((_num_rows(pool), *pool.shape[3:]), pool.stride()[2:])


def as_bytes(pool: Tensor) -> Tensor:
    """Returns the pool with FP8 as its bits, as kernels take it and torch can copy it."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def write_rows(rows: Tensor, places: Tensor, numbers: Tensor, scale: Tensor | None) -> None:
    """Writes `numbers` [W, G, E] to the `places` [W] of `rows` [R, G, E]; FP8 is divided by `scale`
    [G] first, and clamped to its range."""
    if rows.dtype == FP8:
        assert scale is not None, "float8 has scales"
        numbers = round_fp8(numbers / scale[:, None])
    as_bytes(rows).index_copy_(0, places, as_bytes(numbers))


def read_rows(rows: Tensor, places: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Returns the rows [W, G, E] that `write_rows` wrote to `places` [W]. FP8 becomes `dtype`,
    times `scale` [G]."""
    stored = as_bytes(rows).index_select(0, places)
    if rows.dtype != FP8:
        return stored
    assert scale is not None, "float8 has scales"
    return (stored.view(FP8).to(scale.dtype) * scale[:, None]).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decodes:
    """The KV that D tokens of decoding sequences attend to, up to each token or in its window,
    padded to the longest."""

    kv_rows: Tensor
    """[D * L] int64, rows of the keys."""
    mask: Tensor
    """[D, 1, 1, L] bool, true where a token is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """The KV of one sequence, and the place of its new tokens in the batch."""

    kv_rows: Tensor
    """[start + length - begin] int64, rows of the keys."""
    begin: int
    """Position of the first key, the first in some token's window."""
    window: int | None
    first: int
    """Index among the prefill tokens of the sequence's first new token."""
    start: int
    """Position of that token."""
    length: int
    """New tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRows:
    """The work of a step: rows of the memory that are written and read."""

    tokens: Tensor
    """[W] int64, the batch's tokens whose KV is written."""
    kv_rows: Tensor
    """[W] int64, row to which each of their keys is written."""
    decodes: tuple[Decodes, ...]
    """Groups of decodes that are computed together, in order."""
    prefills: tuple[Prefill, ...]


def lay_out(
    batch: Batch, first_row: int = 0, window: int | None = None, *, order: SumOrder = SumOrder.FREE
) -> AttentionRows:
    """Lays out a step. Decodes may leave out KV before `first_row`, which precedes their tokens.
    Tokens attend to the last `window` tokens if there is one.
    In a FIXED order every decode is computed by itself, and so is each piece of a prefill between
    two multiples of PIECE: what is summed how depends on positions alone."""
    assert not first_row or batch.num_decodes == len(batch.starts), "rows are left out of decodes"
    tokens = np.flatnonzero(batch.kv_rows >= 0)
    return AttentionRows(
        tokens=torch.from_numpy(tokens).to(batch.device),
        kv_rows=torch.from_numpy(batch.kv_rows[tokens]).to(batch.device),
        decodes=tuple(_lay_out_decodes(batch, first_row, window, order.is_fixed)),
        prefills=tuple(_lay_out_prefills(batch, window, PIECE if order.is_fixed else None)),
    )


def _lay_out_decodes(
    batch: Batch, first_row: int, window: int | None, is_apart: bool
) -> Iterator[Decodes]:
    lengths = batch.lengths[: batch.num_decodes]
    owners = np.arange(batch.num_decodes).repeat(lengths)
    ends = batch.starts[owners] + ordinals_of(lengths) + 1
    size = 1 if is_apart else max(1, len(ends))
    for first in range(0, len(ends), size):
        group = slice(first, first + size)
        begins = 0 * ends[group] if window is None else np.maximum(ends[group] - window, 0)
        yield _lay_out_together(batch, first_row, owners[group], begins, ends[group])


def _lay_out_together(
    batch: Batch, first_row: int, owners: Ints, begins: Ints, ends: Ints
) -> Decodes:
    longest = int((ends - begins).max(initial=0))
    places = begins[:, None] + np.arange(longest)
    mask = places < ends[:, None]
    kv_rows = _rows_of(batch, batch.rows[owners][:, None], np.where(mask, places, begins[:, None]))
    mask &= places >= first_row
    return Decodes(
        kv_rows=torch.from_numpy(kv_rows.reshape(-1)).to(batch.device),
        mask=torch.from_numpy(mask).to(batch.device)[:, None, None],
    )


def _lay_out_prefills(batch: Batch, window: int | None, piece: int | None) -> Iterator[Prefill]:
    first = 0
    for sequence in range(batch.num_decodes, len(batch.starts)):
        start, length = int(batch.starts[sequence]), int(batch.lengths[sequence])
        end = start + length
        back = 0 if window is None else max(start + 1 - window, 0)
        every_row = _rows_of(batch, batch.rows[sequence], np.arange(back, end))
        kv_rows = torch.from_numpy(every_row).to(batch.device)
        cuts = () if piece is None else range((start // piece + 1) * piece, end, piece)
        for begin, stop in pairwise((start, *cuts, end)):
            least = 0 if window is None else max(begin + 1 - window, 0)
            yield Prefill(
                kv_rows=kv_rows[least - back : stop - back],
                begin=least,
                window=window,
                first=first,
                start=begin,
                length=stop - begin,
            )
            first += stop - begin


def _rows_of(batch: Batch, tables: Any, places: Ints) -> Ints:
    """Returns the rows of the keys of tokens at these positions of the tables."""
    ordinals, offsets = np.divmod(places, batch.page_size)
    pages: Ints = batch.tables[tables, ordinals].astype(np.int64)
    return pages * batch.page_rows + offsets
