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

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from milepost.kernels.platform.gluon import round_block, thread_barrier
from milepost.kernels.platform.tensors import cdiv
from milepost.kernels.products.forms.quantised import BLOCK, Fp8, Int4

PARTS = 8
"""Warps, and columns of a product."""
TILE = 16
"""Outputs that are multiplied at a time."""
_BLOCK, _HALF = gl.constexpr(BLOCK), gl.constexpr(BLOCK // 2)
_PARTS, _TILE = gl.constexpr(PARTS), gl.constexpr(TILE)
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [PARTS, 1], [TILE, 8]))
_ROW = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [PARTS, 1], [1, 0]))
"""A block of each part."""
_KEPT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_KEPT_SUMS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
OUTPUTS_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1], [2, 16], [PARTS, 1], [1, 0]))


class RowWeight(NamedTuple):
    """Numbers as bytes, scales, and zero points or None."""

    numbers: Any
    scales: Any
    zeros: Any

    @staticmethod
    def of(weight: Fp8 | Int4) -> RowWeight:
        if isinstance(weight, Int4):
            return RowWeight(weight.packed, weight.scales, weight.zeros)
        return RowWeight(weight.values.view(torch.uint8), weight.scales, None)


class RowShape(NamedTuple):
    """A product of one row; a constant on the device. A program has `tiles` tiles of outputs, a
    part `part_blocks` blocks of inputs, a thread `held` at a time. `scale_rows` outputs and `group`
    inputs share a scale (no group in FP8), an output has `depths` of them."""

    blocks: int
    outputs: int
    part_blocks: int
    group: int
    depths: int
    scale_rows: int
    held: int = 1
    tiles: int = 1
    top_k: int = 1
    is_gated: bool = False
    is_active: bool = False
    limit: float = 0.0
    """See `RoutedRows.limit`."""

    @staticmethod
    def of(weight: Fp8 | Int4, outputs: int, num_rows: int = 1, **how: Any) -> RowShape:
        """Returns the shape of a product whose row has `num_rows` times the weight's inputs."""
        blocks, depths = num_rows * (weight.num_inputs // BLOCK), weight.scales.shape[-1]
        group, rows = (weight.group, 1) if isinstance(weight, Int4) else (0, weight.rows)
        return RowShape(blocks, outputs, cdiv(blocks, PARTS), group, depths, rows, **how)


@gluon.constexpr_function
def width_of(group):
    """Returns W, the bytes of a block of inputs in the weights."""
    return BLOCK // 2 if group else BLOCK


@gluon.constexpr_function
def operand_layout(group, operand=0):
    """Returns the layout of weights: a thread loads 16 adjacent bytes of FP8, 8 of four bits. The
    row's columns, operand 1, have their inputs in the same order, whichever that is."""
    return gl.DotOperandLayout(operand, PRODUCTS.value, 8 if group else 16)


@gluon.jit
def rows_of(ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the output within the program and the part of loaded weights, or of products, [ROWS *
    PARTS]."""
    o_m = gl.arange(0, ROWS * _PARTS, gl.SliceLayout(1, LAYOUT))
    return o_m // (_TILE * _PARTS) * _TILE + o_m % _TILE, o_m // _TILE % _PARTS


@gluon.jit
def load_blocks(starts, FIRST: gl.constexpr, SHAPE: gl.constexpr):
    """Loads as many blocks as a thread holds, or as there are, from the FIRST of each row on;
    `starts` are addresses [ROWS * PARTS] for each of B blocks."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, operand_layout(SHAPE.group))
    o_k = gl.arange(0, width_of(SHAPE.group), LAYOUT)[None, :]
    LAST: gl.constexpr = min(FIRST + SHAPE.held, SHAPE.part_blocks)
    blocks = ()
    for b in gl.static_range(FIRST, LAST):
        blocks += (gl.load(starts[b][:, None] + o_k),)
    return blocks


@gluon.jit
def keep_row(p_x, SHAPE: gl.constexpr):
    """Stores the row at `p_x` in shared memory as it is multiplied, B times [PARTS, K], and scales,
    or sums, of its blocks, B times [PARTS]."""
    kept, sums = keep_blocks(load_row(p_x, SHAPE), SHAPE.group)
    thread_barrier()
    return kept, sums


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
def keep_blocks(blocks, GROUP: gl.constexpr):
    """Does `keep_row` for blocks that `load_row` returned; others may read it after a barrier."""
    dtype: gl.constexpr = blocks[0].dtype if GROUP else gl.float16
    kept, sums = (), ()
    for b in gl.static_range(len(blocks)):
        # Separate allocations, since stores to parts of one allocation wait for each other.
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
def multiply_blocks(held, starts, kept, sums, scales, zeros, SHAPE: gl.constexpr):
    """Returns the outputs [ROWS / TILE, TILE] of a program. `held` are the first blocks; as many
    are loaded while others are multiplied. Each block has `scales` and `zeros` [ROWS * PARTS]."""
    SIZE: gl.constexpr = scales[0].shape[0]
    B: gl.constexpr = SHAPE.part_blocks
    HELD: gl.constexpr = SHAPE.held
    acc = gl.zeros([SIZE, 8], gl.float32, PRODUCTS)
    for i_b in gl.static_range(0, B, HELD):
        ahead = load_blocks(starts, i_b + HELD, SHAPE)
        for b in gl.static_range(i_b, min(i_b + HELD, B)):
            b_w = held[b - i_b]
            acc = add_block(acc, b_w, kept[b], sums[b], scales[b], zeros[b], SHAPE.group)
        held = ahead
    part = gl.arange(0, SIZE, gl.SliceLayout(1, PRODUCTS)) // _TILE % _PARTS
    own = own_products(acc, part)
    return gl.sum(gl.reshape(own, [SIZE // (_TILE * _PARTS), _PARTS, _TILE]), 1)


@gluon.jit
def own_products(acc, part):
    """Returns the products of each `part` with its own column."""
    column = gl.arange(0, 8, gl.SliceLayout(0, PRODUCTS))
    return gl.sum(gl.where(column[None, :] == part[:, None], acc, 0.0), 1)


@gluon.jit
def add_block(acc, b_w, b_x, sums, scale, zero, GROUP: gl.constexpr):
    """Adds a block's products to `acc`; `scale` and `zero` [ROWS * PARTS] are the weights'."""
    dtype: gl.constexpr = b_x.dtype
    LAYOUT: gl.constexpr = operand_layout(GROUP, 1)
    product = gl.zeros(acc.shape, gl.float32, PRODUCTS)
    b_sum = sums.load(gl.SliceLayout(0, PRODUCTS))[None, :]
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


def _unpacking(power: str) -> gl.constexpr:
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
