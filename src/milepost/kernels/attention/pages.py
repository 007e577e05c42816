"""The layout of KV in pages.

A layer's pool is [pages, 2, page_size, G, E]: a page's keys, then its values. Pages are further
apart if they hold other layers too, or are padded. So KV is addressed by *rows* of the memory, each
a key or a value of one token: a token's key is in row page * page_rows + offset, its value
page_size rows later. Latent attention keeps one row per token, from which keys and values are made:
its pools are [pages, 1, page_size, 1, E]. An attention layer with an indexer has a third row per
token, [pages, 3, page_size, G, E], whose first entries are its index key.

Rows may be float8_e4m3fn: numbers divided by a scale that is set once for a head's keys or values,
so what is written for a token depends on nothing else.

A row that no token was written to holds anything, perhaps NaN, and is never read.

Legend: G KV heads, E head_dim, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from milepost.kernels.platform.tensors import FP8, round_fp8

_TMA_ROWS = 2**31
"""Rows that TMA can count."""


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
    """Returns the memory from a pool's first row to its last as [R, G, E], including what lies
    between the pool's own rows."""
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
    found = as_bytes(rows).index_select(0, places)
    if rows.dtype != FP8:
        return found
    assert scale is not None, "float8 has scales"
    return (found.view(FP8).to(scale.dtype) * scale[:, None]).to(dtype)
