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
    """`grouping.Groups` as kernel arguments. If routed tokens are not grouped, `order` is None and
    `blocks` are the routed tokens' experts: each is a block, whose rows `find_rows` searches
    for."""

    order: Any
    blocks: Any
    num_blocks: Any = None


class RowBase(NamedTuple):
    """Rows as a kernel argument, and their scales [D, rows] or None."""

    base: Any
    scales: Any


@triton.jit
def find_block(groups, capacity, block):
    """Returns a block's expert (negative for padding), its first row and the end of the expert's
    rows."""
    expert = tl.load(groups.blocks + block).to(tl.int64)
    first_row = tl.load(groups.blocks + capacity + block)
    end = tl.load(groups.blocks + 2 * capacity + block)
    return expert, first_row, end


@triton.jit
def find_rows(groups, capacity, block, SHAPE: tl.constexpr):
    """Returns a block's expert (negative for padding), its first row, its rows [M] and their
    mask."""
    if groups.order is None:
        return _search(groups.blocks, capacity, block, SHAPE)
    else:
        expert, first_row, end = find_block(groups, capacity, block)
        o_m = first_row + tl.arange(0, SHAPE.block_m)
        is_row = o_m < end
        return expert, first_row, o_m, is_row


@triton.jit
def _search(experts, num_routed, routed, SHAPE: tl.constexpr):
    """Searches the routing of at most M tokens for the rows of a routed token's expert. The
    expert's first routed token has them all; the blocks of its others are padding."""
    o_m, o_n = tl.arange(0, SHAPE.block_m), tl.arange(0, triton.next_power_of_2(SHAPE.top_k))
    o_p = o_m[:, None] * SHAPE.top_k + o_n[None, :]
    is_routed = (o_p < num_routed) & (o_n < SHAPE.top_k)[None, :]
    expert = tl.load(experts + routed)
    has_expert = tl.load(experts + o_p, mask=is_routed, other=-1) == expert
    row = tl.max(tl.where(has_expert, o_p, -1), 1)
    is_row = row >= 0
    first_row = tl.min(tl.where(is_row, row, routed), 0)
    return tl.where(first_row < routed, -1, expert).to(tl.int64), routed, row, is_row


@triton.jit
def load_routed(order, row, is_row):
    """Returns the rows' routed tokens, 0 for masked rows."""
    if order is None:
        return tl.where(is_row, row, 0)
    else:
        return tl.load(order + row, mask=is_row, other=0)
