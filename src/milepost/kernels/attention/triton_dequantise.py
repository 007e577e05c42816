"""Pages of float8 gathered as a 16-bit type, for prefills: each of their tiles reads all of the KV
before it, and would take it apart again.

Numbers are kept over their scales, so the 16-bit ones are the same numbers.

Legend: S sequences, G KV heads, E head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.attention.pages import as_bytes, rows_per_page
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import decode

_BLOCK = 8192
"""Numbers of a program."""


def dequantise(
    pool: Tensor, tables: Tensor, items: AttentionItems, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The pages of `items.dequantised` in `dtype`, one behind the other: a pool, and the tables by
    which `items.wide` name its pages."""
    _, _, page_size, num_kv_heads, head_dim = pool.shape
    num_pages = items.num_dequantised
    kept = torch.empty(num_pages, *pool.shape[1:], dtype=dtype, device=pool.device)
    kept_tables = tables.new_empty(num_pages, 1)
    numbers = 2 * page_size * num_kv_heads * head_dim
    most = min(num_pages, tables.shape[1])
    _dequantise_kernel[(triton.cdiv(numbers, _BLOCK), most, len(items.dequantised))](
        as_bytes(pool),
        tables,
        items.dequantised,
        kept,
        kept_tables,
        rows_per_page(pool),
        tables.stride(0),
        ROW=num_kv_heads * head_dim,
        NUMBERS=numbers,
        BLOCK=_BLOCK,
        NATIVE=probe(pool.device).has_fp8,
        num_warps=4,
        **OVERLAPPED,
    )
    return kept, kept_tables


@quick
@triton.jit(do_not_specialize=["page_rows", "table_stride"])
def _dequantise_kernel(
    pool,
    tables,
    sequences,
    kept,
    kept_tables,
    page_rows,
    table_stride,
    ROW: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A part of one page of one sequence."""
    launch_dependents()
    part, index = tl.program_id(0), tl.program_id(1)
    sequence = sequences + tl.program_id(2) * 4
    row = tl.load(sequence)
    count = tl.load(sequence + 1)
    place = tl.load(sequence + 2) + index
    wait_for_inputs()
    if index >= count:
        return
    page = tl.load(tables + row.to(tl.int64) * table_stride + index).to(tl.int64)
    if part == 0:
        tl.store(kept_tables + place, place)
    o_n = part * BLOCK + tl.arange(0, BLOCK)
    inside = o_n < NUMBERS
    bits = tl.load(pool + page * page_rows * ROW + o_n, mask=inside, other=0)
    numbers = decode(bits, NATIVE).to(tl.float32)
    if not NATIVE:
        numbers *= 256.0
    target = kept + place.to(tl.int64) * NUMBERS + o_n
    tl.store(target, numbers.to(kept.dtype.element_ty), mask=inside)
