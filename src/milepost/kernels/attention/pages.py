"""Where KV lies in the pages.

A layer's pool is [pages, 2, page_size, G, E]: a page's keys, then its values. From one page to the
next it is further where a page holds other layers too, or is padded. So KV has its place in *rows*
of the memory, each a key or a value of one token: the key of a token is in row
page * page_rows + offset, its value page_size rows behind. Latent attention keeps one row of a
token, of which keys and values are made: its pools are [pages, 1, page_size, 1, E].

Rows may be float8_e4m3fn: numbers over a scale that is set once for a head's keys or values. So
what is written of a token depends on nothing else.

What lies in a row that no token was written to is unknown, it may be NaN. So reads never touch one.

Legend: G KV heads, E head_dim, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.platform.tensors import FP8, round_fp8

MAX_ROWS = 2**31
"""TMA counts them in 32 bits."""


def rows_per_page(pool: Tensor) -> int:
    """How many rows it is from one page to the next."""
    return pool.stride(0) // pool.stride(2)


def as_rows(pool: Tensor) -> Tensor:
    """The memory from a pool's first row to its last, [R, G, E], whatever else lies there."""
    num_pages, rows_each, page_size, *row = pool.shape
    num_rows = (num_pages - 1) * rows_per_page(pool) + rows_each * page_size
    return pool.as_strided((num_rows, *row), pool.stride()[2:])


def as_bytes(pool: Tensor) -> Tensor:
    """The pool as fused kernels take it: float8 as its bits, of which torch can copy rows, too."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def write_rows(rows: Tensor, places: Tensor, numbers: Tensor, scale: Tensor | None) -> None:
    """Write `numbers` [W, G, E] to the `places` [W] of `rows` [R, G, E]; `scale` [G] is of float8,
    the largest of which takes what is larger."""
    if rows.dtype == FP8:
        assert scale is not None, "float8 has scales"
        numbers = round_fp8(numbers / scale[:, None])
    as_bytes(rows).index_copy_(0, places, as_bytes(numbers))


def read_rows(rows: Tensor, places: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """What `write_rows` wrote: [W, G, E]; float8 in `dtype`, which holds all of its numbers."""
    found = as_bytes(rows).index_select(0, places)
    if rows.dtype != FP8:
        return found
    assert scale is not None, "float8 has scales"
    return (found.view(FP8).to(scale.dtype) * scale[:, None]).to(dtype)
