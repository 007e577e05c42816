"""Parts of Hopper's products of one row with four-bit weights, in Gluon.

Each warp has a part of the inputs. Tensor cores multiply eight columns and there is one row, so a
column holds the inputs of one group and zeros elsewhere: the products of eight groups come out side
by side, and each is scaled once. Every thread loads just the bytes that it multiplies, 16 adjacent
ones, and unpacks them in registers. A number stands in the bits beside a power of two; the surplus
is subtracted with the zero point, times the sum of a group's inputs, which a product with ones
makes.

Legend: P parts, R rows of a tile, K half of a block's inputs, C columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.forms.quantised import BLOCK, Int4, lane_of
from milepost.kernels.products.hopper.int4_numbers import unpack
from milepost.kernels.products.hopper.tiles import Int4RowTiles

TILE, _COLUMNS = 16, 8
"""Rows and columns of a product of tensor cores."""
_R, _C = gl.constexpr(TILE), gl.constexpr(_COLUMNS)
_BLOCK, _K = gl.constexpr(BLOCK), gl.constexpr(BLOCK // 2)


class Int4RowShape(NamedTuple):
    """A product of one row; a constant on the device. A row has `blocks`, a part `part_blocks`, and
    a thread holds `held` of them at a time; an output has `depths` scales. A program has `tiles`,
    one or two: gates and ups if `is_gated`."""

    outputs: int
    blocks: int
    part_blocks: int
    held: int
    group: int
    lane: int
    depths: int
    tiles: int
    is_gated: bool
    top_k: int = 1
    is_squared: bool = False
    """Whether outputs are squares of ReLUs if they have no gates."""
    limit: float = 0.0
    """See `RoutedRows.limit`."""

    @staticmethod
    def of(weight: Int4, tiles: Int4RowTiles, *, is_gated: bool, **how: Any) -> Int4RowShape:
        blocks = weight.num_inputs // BLOCK
        part_blocks = cdiv(blocks, tiles.parts)
        num_outputs, held = weight.num_outputs // (1 + is_gated), min(tiles.held, part_blocks)
        form = weight.group, lane_of(weight.group), weight.scales.shape[-1], tiles.tiles
        return Int4RowShape(num_outputs, blocks, part_blocks, held, *form, is_gated, **how)

    @property
    def width(self) -> int:  # outputs of a program
        return TILE if self.is_gated else TILE * self.tiles

    @property
    def unit(self) -> int:  # inputs of a column
        return min(self.group, BLOCK)

    @property
    def each(self) -> int:  # columns of a block
        return BLOCK // self.unit

    @property
    def round(self) -> int:  # blocks that have columns of their own at the same time
        return _COLUMNS // self.each


@gluon.constexpr_function
def _products_layout(num_parts):
    """Returns the layout of products [P, R, C]: each warp has a part."""
    return gl.NVMMADistributedLayout([2, 0], [num_parts, 1, 1], [1, TILE, _COLUMNS])


@gluon.constexpr_function
def _operand_layout(num_parts, operand):
    """Returns the layout of weights [P, R, K], or of columns [P, K, C]: a thread has 16 adjacent
    inputs."""
    return gl.DotOperandLayout(operand, _products_layout(num_parts), 16)


@gluon.jit
def _along(SIZE: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns numbers from 0 on along a dimension of LAYOUT, which has three."""
    if DIM == 0:
        return gl.arange(0, SIZE, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    elif DIM == 1:
        return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    else:
        return gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]


@gluon.jit
def _rows_of(first_row, first, i, LAYOUT: gl.constexpr, SHAPE: gl.constexpr):
    """Returns the rows [1, R, 1] of a program's tile i; those past the last output repeat it, and
    are not stored."""
    at = first if SHAPE.is_gated else first + i * _R
    inside = gl.minimum(at + _along(_R, 1, LAYOUT), SHAPE.outputs - 1)
    return first_row + (inside + i * SHAPE.outputs if SHAPE.is_gated else inside)


@gluon.jit
def _first_block(LAYOUT: gl.constexpr, SHAPE: gl.constexpr):
    """Returns the first block [P, 1, 1] of each part: the last ones begin early enough to be as
    long as others, and see zeros where another part has multiplied."""
    part = _along(gl.num_warps(), 0, LAYOUT)
    return gl.minimum(part * SHAPE.part_blocks, SHAPE.blocks - SHAPE.part_blocks)


@gluon.jit
def find_blocks(numbers, first_row, first, SHAPE: gl.constexpr):
    """Returns where the parts [P, R, K] of each tile begin."""
    LAYOUT: gl.constexpr = _operand_layout(gl.num_warps(), 0)
    TILES: gl.constexpr = SHAPE.tiles
    inside = _first_block(LAYOUT, SHAPE) * _K + _along(_K, 2, LAYOUT)
    starts = ()
    for i in gl.static_range(TILES):
        row = _rows_of(first_row, first, i, LAYOUT, SHAPE).to(gl.int64)
        starts += (numbers + row * (SHAPE.blocks * _K) + inside,)
    return starts


@gluon.jit
def load_blocks(starts, FIRST: gl.constexpr, SHAPE: gl.constexpr):
    """Loads as many blocks of each tile as a thread holds, or as there are, from the FIRST on."""
    TILES: gl.constexpr = SHAPE.tiles
    LAST: gl.constexpr = min(FIRST + SHAPE.held, SHAPE.part_blocks)
    blocks = ()
    for b in gl.static_range(FIRST, LAST):
        own = ()
        for i in gl.static_range(TILES):
            own += (gl.load(starts[i] + b * _K),)
        blocks += (own,)
    return blocks


@gluon.jit
def load_scales(weight, first_row, first, SHAPE: gl.constexpr):
    """Loads scales and zero points [P, R, C] of each tile, for each round."""
    LAYOUT: gl.constexpr = _products_layout(gl.num_warps())
    B: gl.constexpr = SHAPE.part_blocks
    ROUND: gl.constexpr = SHAPE.round
    TILES: gl.constexpr = SHAPE.tiles
    column, first_block = _along(_C, 2, LAYOUT), _first_block(LAYOUT, SHAPE)
    loaded = ()
    for b in gl.static_range(0, B, ROUND):
        group = (first_block + b) * SHAPE.each + column
        if SHAPE.group > _BLOCK:
            group = group * _BLOCK // SHAPE.group
        is_own, other = None, None
        if b + ROUND > B:
            is_own, other = column < (B - b) * SHAPE.each, 0
        own = ()
        for i in gl.static_range(TILES):
            place = _rows_of(first_row, first, i, LAYOUT, SHAPE) * SHAPE.depths + group
            scale = gl.load(weight.scales + place, mask=is_own, other=other)
            own += ((scale, gl.load(weight.zeros + place, mask=is_own, other=other)),)
        loaded += (own,)
    return loaded


@gluon.jit
def keep_row(p_x, SHAPE: gl.constexpr):
    """Stores the row's blocks [P, 2 * K] in shared memory in the order of the weights: first those
    inputs of a block that are in low halves of bytes."""
    PARTS: gl.constexpr = gl.num_warps()
    B: gl.constexpr = SHAPE.part_blocks
    LANE: gl.constexpr = SHAPE.lane
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [PARTS, 1], [1, 0])
    KEPT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    part = gl.arange(0, PARTS, gl.SliceLayout(1, LAYOUT))[:, None]
    first = gl.minimum(part * B, SHAPE.blocks - B)
    at = gl.arange(0, _BLOCK, gl.SliceLayout(0, LAYOUT))[None, :]
    kept = ()
    for b in gl.static_range(B):
        b_x = gl.load(p_x + (first + b) * _BLOCK + at, mask=first + b >= part * B, other=0.0)
        pieces = gl.permute(gl.reshape(b_x, [PARTS, _K // LANE, 2, LANE]), (0, 2, 1, 3))
        # Separate allocations, since stores to parts of one allocation wait for each other.
        place = gl.allocate_shared_memory(b_x.dtype, [PARTS, _BLOCK], KEPT)
        place.store(gl.reshape(pieces, [PARTS, _BLOCK]))
        kept += (place,)
    return kept


@gluon.jit
def multiply(held, starts, scales, kept, SHAPE: gl.constexpr):
    """Returns each tile's sums [P, R, C]. `held` are the first blocks; as many are loaded while
    others are multiplied."""
    PARTS: gl.constexpr = gl.num_warps()
    B: gl.constexpr = SHAPE.part_blocks
    HELD: gl.constexpr = SHAPE.held
    ROUND: gl.constexpr = SHAPE.round
    dtype: gl.constexpr = kept[0].dtype
    nothing = gl.zeros([PARTS, _R, _C], gl.float32, _products_layout(PARTS))
    ones = gl.full([PARTS, _R, _K], 1.0, dtype, _operand_layout(PARTS, 0))
    total, other_total, product, other, sums = nothing, nothing, nothing, nothing, nothing
    for b in gl.static_range(B):
        if b % HELD == 0:
            blocks = held
            held = load_blocks(starts, b + HELD, SHAPE)
        low_x, high_x = _columns_of(kept[b], b % ROUND, SHAPE)
        sums = mma_v2(ones, high_x, mma_v2(ones, low_x, sums))
        low, high = unpack(blocks[b % HELD][0], dtype)
        product = mma_v2(high, high_x, mma_v2(low, low_x, product))
        if SHAPE.tiles == 2:
            low, high = unpack(blocks[b % HELD][1], dtype)
            other = mma_v2(high, high_x, mma_v2(low, low_x, other))
        if b % ROUND == ROUND - 1 or b == B - 1:
            total += _scaled(product, sums, scales[b // ROUND][0], dtype)
            if SHAPE.tiles == 2:
                other_total += _scaled(other, sums, scales[b // ROUND][1], dtype)
            product, other, sums = nothing, nothing, nothing
    return total, other_total


@gluon.jit
def _columns_of(kept, INDEX: gl.constexpr, SHAPE: gl.constexpr):
    """Loads a block's inputs [P, K, C] in low and in high halves of bytes, each in the column of
    its group; the block is the INDEX-th of its round."""
    LAYOUT: gl.constexpr = _operand_layout(gl.num_warps(), 1)
    LANE: gl.constexpr = SHAPE.lane
    column = _along(_K, 1, LAYOUT) // LANE * (2 * LANE // SHAPE.unit) + INDEX * SHAPE.each
    low = kept.slice(0, _K, 1).load(gl.SliceLayout(2, LAYOUT))
    high = kept.slice(_K, _K, 1).load(gl.SliceLayout(2, LAYOUT))
    return _spread(low, column, LAYOUT), _spread(high, column + LANE // SHAPE.unit, LAYOUT)


@gluon.jit
def _spread(values, column, LAYOUT: gl.constexpr):
    """Returns `values` [P, K] in their `column` [1, K, 1] of eight."""
    # Multiplied, because the units that would choose between bits are busy with unpacking.
    HOW: gl.constexpr = f"mul.{'bf' if values.dtype == gl.bfloat16 else 'f'}16x2 $0, $1, $2;"
    is_own = (column == _along(_C, 2, LAYOUT)).to(values.dtype)
    wide, factor = gl.broadcast(values[:, :, None], is_own)
    return gl.inline_asm_elementwise(
        HOW, "=r,r,r", [wide, factor], dtype=values.dtype, is_pure=True, pack=2
    )


@gluon.jit
def _scaled(product, sums, scales, dtype: gl.constexpr):
    """Returns products less their surplus, scaled."""
    beside: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    surplus = (scales[1].to(gl.float32) + beside) * sums
    return (product - surplus) * scales[0].to(gl.float32)
