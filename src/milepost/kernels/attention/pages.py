"""Where KV lies in the pages.

A layer's pool is [pages, 2, page_size, G, E]: a page's keys, then its values. From one page to the
next it is further where a page holds other layers too, or is padded. So KV has its place in *rows*
of the memory, each a key or a value of one token: the key of a token is in row
page * page_rows + offset, its value page_size rows behind. Latent attention keeps one row of a
token, of which keys and values are made: its pools are [pages, 1, page_size, 1, E].

What lies in a row that no token was written to is unknown, it may be NaN. So reads never touch one.

Legend: G KV heads, E head_dim, R rows.
"""

from __future__ import annotations

from torch import Tensor

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
