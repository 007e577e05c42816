"""Triton: structures and addresses that kernels of routed experts share.

An expert's `up` is [2 * I, H], the gates' rows before the ups', or [I, H] if it squares a ReLU;
`down` is [H, I]. One kernel makes both projections: the up projection reads tokens' rows and
activates, the down projection reads what that made and has routing weights.

Legend: P routed tokens, I an expert's size, H hidden size, M rows of a block, N outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class RowGroups(NamedTuple):
    """`grouping.Groups` as kernels take them; `order` is None if routed tokens are not grouped, and
    `blocks` are their experts then."""

    order: Any
    blocks: Any
    num_blocks: Any = None


class RowBase(NamedTuple):
    """Rows as kernels take them, and their scales [D, rows], or None."""

    base: Any
    scales: Any


@triton.jit
def find_block(groups, capacity, block):
    """Returns a block's expert (negative for padding), its first row and the end of the expert's
    rows; a routed token that is not grouped is a block."""
    expert = tl.load(groups.blocks + block).to(tl.int64)
    if groups.order is None:
        return expert, block, block + 1
    else:
        first_row = tl.load(groups.blocks + capacity + block)
        end = tl.load(groups.blocks + 2 * capacity + block)
        return expert, first_row, end


@triton.jit
def load_routed(order, o_m, is_row):
    """Loads the rows' routed tokens, 0 beyond the last."""
    if order is None:
        return tl.where(is_row, o_m, 0)
    else:
        return tl.load(order + o_m, mask=is_row, other=0)
