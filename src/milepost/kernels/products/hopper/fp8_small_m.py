"""GEMMs of up to 64 rows with FP8 weights on Hopper, in Gluon: FP8's part of `small_m`.

Two groups of four warps multiply half of a tile's outputs each and do not wait for each other. The
left operand has a side of 64 whatever there is. Up to 32 rows it is the weights, so that no thread
scales sums that are dropped; of more rows it is the rows, and so a thread has two rows' scales and
one or two of the weights. A step is as deep as a block that shares a scale: its product is scaled
and added up in float32.

Legend: T tokens, I inputs, O outputs; N outputs of a group, M rows.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from milepost.kernels.platform.gluon import boxes_of, release, wait_loaded
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.hopper import small_m
from milepost.kernels.products.hopper.raw_small_m import (
    LINE,
    begin_beside,
    consume_beside,
    produce_beside,
)
from milepost.kernels.products.hopper.tiles import MMA_M, Fp8Tiles
from milepost.kernels.products.portable.rounding import round_lines
from milepost.kernels.products.run import Multiplication

_REGISTERS = 80
_MOST_AHEAD = 64 * 32
"""Sums of a group's product up to which its threads have registers for two products at a time."""


def run(given: Multiplication, tiles: Fp8Tiles) -> Tensor:
    """Multiplies up to 64 rows by FP8 weights, and by the raw weights beside them."""
    weight, beside, output = given.weight_as(Fp8), given.beside, given.output(tiles.split_k)
    rows, row_scales = round_lines(given.rows, weight, given.chip)
    shape = small_m.SmallShape.of(
        weight,
        tiles,
        BLOCK,
        block_m=tiles.block_m if tiles.is_swapped else MMA_M,
        mma_n=tiles.mma_n,
        is_swapped=tiles.is_swapped,
        beside=0 if beside is None else beside.num_outputs,
    )
    block_m = tiles.block_m
    boxes = small_m.SmallBoxes(
        boxes_of(rows, block_m, BLOCK),
        boxes_of(weight.values, tiles.box, BLOCK),
        boxes_of(row_scales, 1, block_m),
        None if beside is None else boxes_of(given.values, block_m, LINE),
        None if beside is None else boxes_of(beside.values, small_m.BESIDE_N, LINE),
    )
    product = small_m.SmallProduct(weight.scales, output, len(given.rows), output.stride(-2))
    how = {"PRODUCE": _produce, "CONSUME": _consume, "num_warps": 4, "maxnreg": _REGISTERS}
    return small_m.launch(boxes, product, shape, given.chip.num_sms, **how)


@gluon.jit
def _produce(stages, boxes, SHAPE: gl.constexpr):
    """Loads the FP8 weights, then the raw ones."""
    num_begun = 0
    if SHAPE.beside:
        num_begun = begin_beside(stages, boxes, SHAPE)
    small_m.produce(stages, boxes, SHAPE)
    if SHAPE.beside:
        produce_beside(stages, boxes, num_begun, SHAPE)


@gluon.jit
def _consume(stages, product, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Computes half of the outputs of the loaded stages, which have one or two scales."""
    DEPTHS: gl.constexpr = SHAPE.steps * SHAPE.split_k
    BLOCK: gl.constexpr = SHAPE.block_k
    LAST: gl.constexpr = (SHAPE.outputs + BLOCK - 1) // BLOCK - 1
    N: gl.constexpr = small_m.half_of(SHAPE)
    # Outputs are the rows of the product if it is swapped, else its columns.
    ACROSS: gl.constexpr = 1 if SHAPE.is_swapped else 0
    layout: gl.constexpr = gl.SliceLayout(ACROSS, _layout_of(SHAPE))
    own = gl.expand_dims(gl.arange(0, SHAPE.mma_n // 2, layout=layout), ACROSS)
    # Rows of weights from there on are multiplied too, and dropped.
    END: gl.constexpr = min(PART * N + N, SHAPE.block_n)
    number = 0
    for unit in range(gl.program_id(0), SHAPE.tiles * SHAPE.split_k, gl.num_programs(0)):
        depth = unit // SHAPE.tiles * SHAPE.steps
        column = unit % SHAPE.tiles * SHAPE.block_n + PART * N
        p_first = product.scales + gl.minimum(column // BLOCK, LAST) * DEPTHS + depth
        p_second = product.scales + gl.minimum(column // BLOCK + 1, LAST) * DEPTHS + depth
        pointers = p_first, p_second, own < BLOCK - column % BLOCK
        result, number = _add_up(stages, pointers, number, PART, SHAPE)
        values = result.to(product.base.dtype.element_ty)
        small_m.store(product, values, unit, PART * N + own, END, ACROSS, SHAPE)
    if SHAPE.beside:
        consume_beside(stages, product, number, PART, SHAPE)


@gluon.constexpr_function
def _layout_of(SHAPE):
    """Returns the layout of a group's products."""
    columns = SHAPE.block_m if SHAPE.is_swapped else SHAPE.mma_n // 2
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.jit
def _add_up(stages, pointers, number, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Returns the sum of a unit's products, and the number of the next step. If there are registers
    for two products, a step is multiplied while the one before is scaled."""
    STEPS: gl.constexpr = SHAPE.steps
    TOGETHER: gl.constexpr = _together(SHAPE)
    M: gl.constexpr = SHAPE.block_m
    N: gl.constexpr = SHAPE.mma_n // 2
    SIZES: gl.constexpr = (N, M) if SHAPE.is_swapped else (M, N)
    result = gl.zeros(SIZES, gl.float32, layout=_layout_of(SHAPE))
    scales = _load_scales(pointers, 0, SHAPE)
    for first in range(0, STEPS, TOGETHER):
        product = _begin(stages, number, PART, SHAPE)
        for place in gl.static_range(TOGETHER):
            next_scales = _load_scales(pointers, first + place + 1, SHAPE)
            if place + 1 < TOGETHER:
                following = _begin(stages, number + 1, PART, SHAPE)
                result = _add(stages, result, product, scales, number, 1, SHAPE)
                product = following
            else:
                result = _add(stages, result, product, scales, number, 0, SHAPE)
            scales = next_scales
            number += 1
    return result, number


@gluon.constexpr_function
def _together(SHAPE):
    """Returns the number of steps that a turn of the loop multiplies without a pause. Where a turn
    ends, the compiler waits for all products."""
    if SHAPE.block_m * SHAPE.mma_n // 2 > _MOST_AHEAD:
        return 1
    return next(num for num in (4, 2, 1) if SHAPE.steps % num == 0)


@gluon.jit
def _load_scales(pointers, step, SHAPE: gl.constexpr):
    """Loads the scales of a step's weights."""
    first, second, is_first = pointers
    step = gl.minimum(step, SHAPE.steps - 1)
    return gl.load(first + step), gl.load(second + step), is_first


@gluon.jit
def _begin(stages, number, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Waits for a step, and begins to multiply it."""
    N: gl.constexpr = SHAPE.mma_n // 2
    stage = wait_loaded(stages.bars, number)
    left, right = stages.weights.index(stage).slice(PART * N, N), stages.inputs.index(stage)
    if not SHAPE.is_swapped:
        left, right = right, left
    right = right.permute((1, 0))
    SIZES: gl.constexpr = (left.shape[0], right.shape[1])
    product = gl.zeros(SIZES, gl.float32, layout=_layout_of(SHAPE))
    return warpgroup_mma(left, right, product, use_acc=False, is_async=True)


@gluon.jit
def _add(stages, result, product, scales, number, LATER: gl.constexpr, SHAPE: gl.constexpr):
    """Adds a step's product, times its scales, when all but the LATER ones are computed."""
    RESULT: gl.constexpr = _layout_of(SHAPE)
    stage = number % SHAPE.stages
    if SHAPE.is_swapped:
        row_scale = stages.row_scales.index(stage).slice(0, SHAPE.block_m, 1).load(RESULT)
    else:
        row_scale = stages.row_scales.index(stage).permute((1, 0)).load(RESULT)
    first, second, is_first = scales
    scale = gl.where(is_first, first, second)
    product = warpgroup_mma_wait(LATER, [product])
    release(stages.bars, stage)
    return result + product * (row_scale * scale)
