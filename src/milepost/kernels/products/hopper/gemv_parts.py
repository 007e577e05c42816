"""Parts of Hopper's products of one row with FP8 weights, in Gluon.

A program has ROWS outputs, and cuts the inputs' blocks into PARTS, one for each of its warps.
Tensor cores multiply eight columns and there is one row, so each column is another part of it. Of a
tile of products [ROWS * PARTS, 8], those are added up that a part's weights make with its own
column. Every thread loads just the numbers that it multiplies, many at a time, and no weight passes
through shared memory; only the row does, and all warps round it together. FP8 is multiplied in
float16, which holds its numbers.

Legend: B blocks of a part, K inputs of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from milepost.kernels.platform.gluon import round_block, thread_barrier
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.forms.quantised import BLOCK, Fp8

PARTS = 8
"""Warps, and columns of a product."""
TILE = 16
"""Outputs that are multiplied at a time."""
_BLOCK = gl.constexpr(BLOCK)
_PARTS, _TILE = gl.constexpr(PARTS), gl.constexpr(TILE)
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [PARTS, 1], [TILE, 8]))
_ROW = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [PARTS, 1], [1, 0]))
"""A block of each part."""
_KEPT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_KEPT_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
OUTPUTS_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1], [2, 16], [PARTS, 1], [1, 0]))


class RowShape(NamedTuple):
    """A product of one row; a constant on the device. A part has `part_blocks` blocks of inputs, a
    thread `held` at a time. `scale_rows` outputs share a scale, an output has `depths` of them."""

    blocks: int
    outputs: int
    part_blocks: int
    depths: int
    scale_rows: int
    held: int = 1
    top_k: int = 1
    is_gated: bool = False
    is_active: bool = False
    limit: float = 0.0
    """See `RoutedRows.limit`."""

    @staticmethod
    def of(weight: Fp8, outputs: int, num_rows: int = 1, **how: Any) -> RowShape:
        """Returns the shape of a product whose row has `num_rows` times the weight's inputs."""
        blocks, depths = num_rows * (weight.num_inputs // BLOCK), weight.scales.shape[-1]
        return RowShape(blocks, outputs, cdiv(blocks, PARTS), depths, weight.rows, **how)


@gluon.constexpr_function
def operand_layout(operand=0):
    """Returns the layout of weights: a thread loads 16 adjacent bytes. The row's columns, operand
    1, have their inputs in the same order, whichever that is."""
    return gl.DotOperandLayout(operand, PRODUCTS.value, 16)


@gluon.jit
def rows_of(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the output within the program, and the part, of each row of loaded weights or of
    products [ROWS * PARTS]."""
    o_m = gl.arange(0, ROWS * _PARTS, gl.SliceLayout(1, LAYOUT))
    return o_m // (_TILE * _PARTS) * _TILE + o_m % _TILE, o_m // _TILE % _PARTS


@gluon.jit
def load_blocks(starts, FIRST: gl.constexpr, SHAPE: gl.constexpr):
    """Loads as many blocks as a thread holds, or as are left, from a row's FIRST block on. `starts`
    has the addresses [ROWS * PARTS] of each of B blocks."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, operand_layout())
    o_k = gl.arange(0, _BLOCK, LAYOUT)[None, :]
    LAST: gl.constexpr = min(FIRST + SHAPE.held, SHAPE.part_blocks)
    blocks = ()
    for b in gl.static_range(FIRST, LAST):
        blocks += (gl.load(starts[b][:, None] + o_k),)
    return blocks


@gluon.jit
def keep_row(p_x, SHAPE: gl.constexpr):
    """Rounds the row at `p_x` to FP8 and stores it in shared memory: the numbers, B times [PARTS,
    K], and their blocks' scales, B times [PARTS]."""
    kept, kept_scales = keep_blocks(load_row(p_x, SHAPE))
    thread_barrier()
    return kept, kept_scales


@gluon.jit
def load_row(p_x, SHAPE: gl.constexpr):
    """Loads the row's blocks [PARTS, BLOCK], B of each part."""
    B: gl.constexpr = SHAPE.part_blocks
    part = gl.arange(0, _PARTS, gl.SliceLayout(1, _ROW))[:, None]
    blocks = ()
    for b in gl.static_range(B):
        column = (part * B + b) * _BLOCK + gl.arange(0, _BLOCK, gl.SliceLayout(0, _ROW))[None, :]
        if SHAPE.blocks == B * _PARTS:
            blocks += (gl.load(p_x + column),)
        else:
            blocks += (gl.load(p_x + column, mask=column < SHAPE.blocks * _BLOCK, other=0.0),)
    return blocks


@gluon.jit
def keep_blocks(blocks):
    """Rounds and stores the blocks that `load_row` returned, as `keep_row` does. Other threads may
    read them after a barrier."""
    kept, scales = (), ()
    for b in gl.static_range(len(blocks)):
        # Separate allocations, since stores to parts of one allocation wait for each other.
        place = gl.allocate_shared_memory(gl.float16, [_PARTS, _BLOCK], _KEPT)
        p_scale = gl.allocate_shared_memory(gl.float32, [_PARTS], _KEPT_SCALES)
        rounded, scale = round_block(blocks[b].to(gl.float32), 1)
        place.store(rounded.to(gl.float16))
        p_scale.store(scale)
        kept += (place,)
        scales += (p_scale,)
    return kept, scales


@gluon.jit
def multiply_blocks(held, starts, kept, kept_scales, scales, SHAPE: gl.constexpr):
    """Returns the outputs [ROWS / TILE, TILE] of a program. `held` are the first blocks; while
    blocks are multiplied, as many are loaded. Each block has `scales` [ROWS * PARTS]."""
    SIZE: gl.constexpr = scales[0].shape[0]
    B: gl.constexpr = SHAPE.part_blocks
    HELD: gl.constexpr = SHAPE.held
    acc = gl.zeros([SIZE, 8], gl.float32, PRODUCTS)
    for i_b in gl.static_range(0, B, HELD):
        ahead = load_blocks(starts, i_b + HELD, SHAPE)
        for b in gl.static_range(i_b, min(i_b + HELD, B)):
            b_w = held[b - i_b]
            acc = add_block(acc, b_w, kept[b], kept_scales[b], scales[b])
        held = ahead
    part = gl.arange(0, SIZE, gl.SliceLayout(1, PRODUCTS)) // _TILE % _PARTS
    own = own_products(acc, part)
    return gl.sum(gl.reshape(own, [SIZE // (_TILE * _PARTS), _PARTS, _TILE]), 1)


@gluon.jit
def own_products(acc, part):
    """Returns the products of each `part` of the weights with the same part of the row."""
    column = gl.arange(0, 8, gl.SliceLayout(0, PRODUCTS))
    return gl.sum(gl.where(column[None, :] == part[:, None], acc, 0.0), 1)


@gluon.jit
def add_block(acc, b_w, b_x, kept_scale, scale):
    """Adds a block's products to `acc`; `scale` [ROWS * PARTS] is the weights'."""
    product = gl.zeros(acc.shape, gl.float32, PRODUCTS)
    b_scale = kept_scale.load(gl.SliceLayout(0, PRODUCTS))[None, :]
    wide = b_w.to(gl.float8e4nv, bitcast=True).to(gl.float16)
    product = mma_v2(wide, b_x.permute((1, 0)).load(operand_layout(1)), product)
    return acc + product * (scale[:, None] * b_scale)


@gluon.jit
def to_outputs(values):
    """Converts [ROWS / TILE, TILE] to the layout of `outputs_of`."""
    return gl.convert_layout(values, OUTPUTS_LAYOUT)


@gluon.jit
def outputs_of(ROWS: gl.constexpr):
    """Returns the places of a program's outputs, [ROWS / TILE, TILE]."""
    tile = gl.arange(0, ROWS // _TILE, gl.SliceLayout(1, OUTPUTS_LAYOUT))[:, None]
    return tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(0, OUTPUTS_LAYOUT))[None, :]
