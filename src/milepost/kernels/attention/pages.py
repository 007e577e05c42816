"""Where the KV of a batch's sequences lies in the pages; the same for every attention layer of a
step.

A layer's pool is [pages, 2, page_size, G, E]: a page's keys, then its values. From one page to the
next it is further where a page holds other layers too, or is padded. So KV has its place in *rows*
of the memory, each a key or a value of one token: the key of a token is in row
page * page_rows + offset, its value page_size rows behind.

What lies in a row that no token was written to is unknown, it may be NaN. So reads never touch one:
places past the end of a sequence name its first token's row, and are masked.

Legend: D decoding sequences, P pages in the longest page table, L tokens of the longest sequence, G
KV heads, E head_dim, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ROWS = 2**31
"""The copy engine counts them in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePages:
    """KV of D sequences, padded to the longest."""

    kv_rows: Tensor
    """[D * L] int64, rows of the keys."""
    mask: Tensor
    """[D, 1, 1, L] bool, true where a token is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPages:
    """KV of one sequence, and where its new tokens stand in the batch."""

    kv_rows: Tensor
    """[start + length] int64, rows of the keys."""
    first: int
    """Index among the prefill tokens of the sequence's first new token."""
    start: int
    """Position of that token."""
    length: int
    """New tokens."""


def rows_per_page(pool: Tensor) -> int:
    """How many rows it is from one page to the next."""
    return pool.stride(0) // pool.stride(2)


def as_rows(pool: Tensor) -> Tensor:
    """The memory from a pool's first key to its last value, [R, G, E], whatever else lies there."""
    num_pages, _, page_size, *row = pool.shape
    num_rows = (num_pages - 1) * rows_per_page(pool) + 2 * page_size
    return pool.as_strided((num_rows, *row), pool.stride()[2:])


def lay_out_decodes(
    page_table: Tensor, kv_lengths: Tensor, longest: int, pool: Tensor
) -> DecodePages:
    """Lay out D sequences: `page_table` [D, P], `kv_lengths` [D], of which `longest` is the
    greatest. `pool` is that of any attention layer."""
    page_size, page_rows = pool.shape[2], rows_per_page(pool)
    places = torch.arange(longest, device=page_table.device)
    mask = places < kv_lengths[:, None]
    pages = page_table.index_select(1, places // page_size)
    kv_rows = pages * page_rows + places % page_size
    kv_rows = torch.where(mask, kv_rows, page_table[:, :1] * page_rows)
    return DecodePages(kv_rows=kv_rows.flatten(), mask=mask[:, None, None])


def lay_out_prefills(
    page_table: Tensor, starts: Sequence[int], lengths: Sequence[int], pool: Tensor
) -> tuple[PrefillPages, ...]:
    """Lay out sequences of `lengths` new tokens after `starts` earlier ones: `page_table`
    [sequences, P]. `pool` is that of any attention layer."""
    page_size, page_rows = pool.shape[2], rows_per_page(pool)
    laid_out, first = [], 0
    for pages, start, length in zip(page_table, starts, lengths, strict=True):
        places = torch.arange(start + length, device=page_table.device)
        kv_rows = pages.index_select(0, places // page_size) * page_rows + places % page_size
        laid_out.append(PrefillPages(kv_rows=kv_rows, first=first, start=start, length=length))
        first += length
    return tuple(laid_out)
