"""What the experts' grouped GEMMs have in common: blocks of rows that share an expert.

`blocks` [3, capacity] are `Groups.blocks`, `order` [P] is `Groups.order`.

Legend: P routed tokens, M rows of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(blocks, TILES: tl.constexpr):
    """The program's expert, negative where there is nothing to do, its block and its tile of
    outputs, of which there are so many."""
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert = tl.load(blocks + block)
    return expert, block, tile


@triton.jit
def find_rows(blocks, capacity, block):
    """First and end of a block's rows."""
    first_row = tl.load(blocks + capacity + block)
    end = tl.load(blocks + 2 * capacity + block)
    return first_row, end


@triton.jit
def spread_rows(blocks, capacity, block, BLOCK_M: tl.constexpr):
    """The first of a block's rows, all BLOCK_M of them, and which are the expert's."""
    first_row = tl.load(blocks + capacity + block)
    o_m = first_row + tl.arange(0, BLOCK_M)
    is_row = o_m < tl.load(blocks + 2 * capacity + block)
    return first_row, o_m, is_row


@triton.jit
def load_routed(order, weights, o_m, is_row):
    """The rows' routed tokens and their weights, float32."""
    routed = tl.load(order + o_m, mask=is_row, other=0)
    weight = tl.load(weights + routed, mask=is_row, other=0.0).to(tl.float32)
    return routed, weight
