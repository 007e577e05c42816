"""Parts of Hopper's products of one row with quantised weights, in Gluon.

A program has ROWS outputs, and cuts the inputs' blocks into PARTS, one for each of its warps.
Tensor cores multiply eight columns and there is one row, so each column is another part of it. Of a
tile of products [ROWS * PARTS, 8], those are added up that a part's weights make with its own
column. Every thread loads just the numbers that it multiplies, many at a time, and no weight passes
through shared memory; only the row does, and all warps round it, or sum it up, together.

FP8 is multiplied in float16, which holds its numbers. A number of four bits stands in the bits
beside a power of two, and the surplus is subtracted from a block's product.

Legend: B blocks of a part, K inputs of a block, W numbers or bytes of one in the weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from milepost.kernels.platform.gluon import round_block, thread_barrier
from milepost.kernels.products.forms.quantised import BLOCK

PARTS = 8
"""Warps, and columns of a product."""
TILE = 16
"""Outputs that are multiplied at a time."""
_BLOCK, _HALF = gl.constexpr(BLOCK), gl.constexpr(BLOCK // 2)
_PARTS, _TILE = gl.constexpr(PARTS), gl.constexpr(TILE)
_PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [PARTS, 1], [TILE, 8]))
_ROW = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [PARTS, 1], [1, 0]))
"""A block of each part."""
_KEPT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_KEPT_SUMS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
OUTPUTS_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1], [2, 16], [PARTS, 1], [1, 0]))


@gluon.constexpr_function
def width_of(group):
    """W."""
    return BLOCK // 2 if group else BLOCK


@gluon.constexpr_function
def weights_layout(group):
    """Returns the layout of weights: a thread loads 16 adjacent bytes of FP8, 8 of four bits. Both
    operands have their inputs in one order, whichever that is."""
    return gl.DotOperandLayout(0, _PRODUCTS.value, 8 if group else 16)


@gluon.constexpr_function
def _column_layout(group):
    return gl.DotOperandLayout(1, _PRODUCTS.value, 8 if group else 16)


@gluon.jit
def weight_rows(ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Returns the output within the program and the part of loaded weights, [ROWS * PARTS]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, weights_layout(GROUP))
    o_m = gl.arange(0, ROWS * _PARTS, LAYOUT)
    return o_m // (_TILE * _PARTS) * _TILE + o_m % _TILE, o_m // _TILE % _PARTS


@gluon.jit
def product_rows(ROWS: gl.constexpr):
    """Returns the output within the program and the part of products, [ROWS * PARTS]."""
    o_m = gl.arange(0, ROWS * _PARTS, gl.SliceLayout(1, _PRODUCTS))
    return o_m // (_TILE * _PARTS) * _TILE + o_m % _TILE, o_m // _TILE % _PARTS


@gluon.jit
def scale_place(block, GROUP: gl.constexpr):
    """Returns the place of a block's scale among a row's."""
    if GROUP:
        return block * _BLOCK // GROUP
    else:
        return block


@gluon.jit
def load_blocks(
    starts, FIRST: gl.constexpr, COUNT: gl.constexpr, B: gl.constexpr, GROUP: gl.constexpr
):
    """Loads COUNT blocks, or as many as there are, from the FIRST of each row on; `starts` are
    addresses [ROWS * PARTS] for each of B blocks."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, weights_layout(GROUP))
    o_k = gl.arange(0, width_of(GROUP), LAYOUT)[None, :]
    blocks = ()
    for b in gl.static_range(FIRST, min(FIRST + COUNT, B)):
        blocks += (gl.load(starts[b][:, None] + o_k),)
    return blocks


@gluon.jit
def keep_row(p_x, NUM_BLOCKS: gl.constexpr, B: gl.constexpr, GROUP: gl.constexpr):
    """Stores the row at `p_x` in shared memory as it is multiplied, B times [PARTS, K], and scales,
    or sums, of its blocks, B times [PARTS]."""
    kept, sums = keep_blocks(load_row(p_x, NUM_BLOCKS, B), GROUP)
    thread_barrier()
    return kept, sums


@gluon.jit
def load_row(p_x, NUM_BLOCKS: gl.constexpr, B: gl.constexpr):
    """Loads the row's blocks [PARTS, BLOCK], B of each part."""
    blocks = ()
    for b in gl.static_range(B):
        column = _row_columns(b, B)
        if NUM_BLOCKS == B * _PARTS:
            blocks += (gl.load(p_x + column),)
        else:
            is_block = column < NUM_BLOCKS * _BLOCK
            blocks += (gl.load(p_x + column, mask=is_block, other=0.0),)
    return blocks


@gluon.jit
def _row_columns(b: gl.constexpr, B: gl.constexpr):
    """Returns the columns of block b of each part, in the row [PARTS, BLOCK]."""
    part = gl.arange(0, _PARTS, gl.SliceLayout(1, _ROW))[:, None]
    return (part * B + b) * _BLOCK + gl.arange(0, _BLOCK, gl.SliceLayout(0, _ROW))[None, :]


@gluon.jit
def keep_blocks(blocks, GROUP: gl.constexpr):
    """Does `keep_row` for blocks that `load_row` returned; others may read it after a barrier."""
    dtype: gl.constexpr = blocks[0].dtype if GROUP else gl.float16
    kept, sums = (), ()
    for b in gl.static_range(len(blocks)):
        # Memory of their own: stores to parts of one wait for each other.
        place = gl.allocate_shared_memory(dtype, [_PARTS, _BLOCK], _KEPT)
        p_sum = gl.allocate_shared_memory(gl.float32, [_PARTS], _KEPT_SUMS)
        wide = blocks[b].to(gl.float32)
        if GROUP:
            place.store(blocks[b])
            p_sum.store(gl.sum(wide, 1))
        else:
            rounded, scale = round_block(wide, 1)
            place.store(rounded.to(dtype))
            p_sum.store(scale)
        kept += (place,)
        sums += (p_sum,)
    return kept, sums


@gluon.jit
def multiply_blocks(
    held,
    starts,
    kept,
    sums,
    scales,
    zeros,
    B: gl.constexpr,
    HELD: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Returns the outputs [ROWS / TILE, TILE] of a program. `held` are the first HELD blocks; as
    many are loaded while others are multiplied. `scales` and `zeros` [ROWS * PARTS] are of each
    block."""
    SIZE: gl.constexpr = scales[0].shape[0]
    acc = gl.zeros([SIZE, 8], gl.float32, _PRODUCTS)
    for i_b in gl.static_range(0, B, HELD):
        ahead = load_blocks(starts, i_b + HELD, HELD, B, GROUP)
        for b in gl.static_range(i_b, min(i_b + HELD, B)):
            b_w = held[b - i_b]
            acc = add_block(acc, b_w, kept[b], sums[b], scales[b], zeros[b], GROUP)
        held = ahead
    part = gl.arange(0, SIZE, gl.SliceLayout(1, _PRODUCTS)) // _TILE % _PARTS
    own = own_products(acc, part)
    return gl.sum(gl.reshape(own, [SIZE // (_TILE * _PARTS), _PARTS, _TILE]), 1)


@gluon.jit
def own_products(acc, part):
    """Returns the products of each `part` with its own column."""
    column = gl.arange(0, 8, gl.SliceLayout(0, _PRODUCTS))
    return gl.sum(gl.where(column[None, :] == part[:, None], acc, 0.0), 1)


@gluon.jit
def ring_rows():
    """Does `product_rows` for boxes that hold one row's parts after the other's, [TILE * PARTS]."""
    o_m = gl.arange(0, _TILE * _PARTS, gl.SliceLayout(1, _PRODUCTS))
    return o_m // _PARTS, o_m % _PARTS


@gluon.jit
def no_products(ROWS: gl.constexpr):
    return gl.zeros([ROWS * _PARTS, 8], gl.float32, _PRODUCTS)


@gluon.jit
def add_block(acc, b_w, b_x, sums, scale, zero, GROUP: gl.constexpr):
    """Adds a block's products to `acc`; `scale` and `zero` [ROWS * PARTS] are the weights'."""
    dtype: gl.constexpr = b_x.dtype
    LAYOUT: gl.constexpr = _column_layout(GROUP)
    product = gl.zeros(acc.shape, gl.float32, _PRODUCTS)
    b_sum = sums.load(gl.SliceLayout(0, _PRODUCTS))[None, :]
    if GROUP:
        low, high = unpack(b_w, dtype)
        columns = b_x.permute((1, 0))
        product = mma_v2(low, columns.slice(0, _HALF).load(LAYOUT), product)
        product = mma_v2(high, columns.slice(_HALF, _HALF).load(LAYOUT), product)
        beside: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
        product -= (zero.to(gl.float32) + beside)[:, None] * b_sum
        return acc + product * scale[:, None]
    else:
        wide = b_w.to(gl.float8e4nv, bitcast=True).to(dtype)
        product = mma_v2(wide, b_x.permute((1, 0)).load(LAYOUT), product)
        return acc + product * (scale[:, None] * b_sum)


def _unpacking(power):
    """Returns code that splits four bytes into their low and high halves, in 16 bits each, beside a
    power of two."""
    return gl.constexpr(f"""{{
        .reg .b32 low, high, power;
        mov.b32 power, {power};
        and.b32 low, $4, 0x0f0f0f0f;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0f0f0f0f;
        prmt.b32 $0, low, power, 0x4140;
        prmt.b32 $1, low, power, 0x4342;
        prmt.b32 $2, high, power, 0x4140;
        prmt.b32 $3, high, power, 0x4342;
        }}""")


_TO_BFLOAT16, _TO_FLOAT16 = _unpacking("0x43434343"), _unpacking("0x64646464")


@gluon.jit
def unpack(b_w, dtype: gl.constexpr):
    """Returns the numbers in the low and in the high half of each byte, in the bits beside a power
    of two."""
    how: gl.constexpr = _TO_BFLOAT16 if dtype == gl.bfloat16 else _TO_FLOAT16
    low, high = gl.inline_asm_elementwise(
        how, "=r,=r,=r,=r,r", [b_w], dtype=(gl.int16, gl.int16), is_pure=True, pack=4
    )
    return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)


@gluon.jit
def to_outputs(values):
    """Converts [ROWS / TILE, TILE] to the layout of `outputs_of`."""
    return gl.convert_layout(values, OUTPUTS_LAYOUT)


@gluon.jit
def outputs_of(ROWS: gl.constexpr):
    """Returns the places of a program's outputs, [ROWS / TILE, TILE]."""
    tile = gl.arange(0, ROWS // _TILE, gl.SliceLayout(1, OUTPUTS_LAYOUT))[:, None]
    return tile * _TILE + gl.arange(0, _TILE, gl.SliceLayout(0, OUTPUTS_LAYOUT))[None, :]
