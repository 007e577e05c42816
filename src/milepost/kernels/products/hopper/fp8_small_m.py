"""GEMMs of up to 64 rows with FP8 weights on Hopper, in Gluon: FP8's part of `small_m`.

Two groups of four warps multiply half of a tile's outputs each and do not wait for each other. The
left operand has a side of 64 whatever there is. Up to 32 rows it is the weights, so that no thread
scales sums that are dropped; of more rows it is the rows, and so a thread has two rows' scales and
one or two of the weights. A step is as deep as a block that shares a scale: its product is scaled
and added up in float32.

Beside the tiles a small raw product may run: the rows, before rounding, times raw weights, such as
gates have. Its units come after those of the FP8 weights, so SMs with one tile fewer than others
get them first. Steps go through the same stages: one stage of weights is read as 128 lines of 64
numbers of 16 bits. They are the rows, then a unit's weights; up to 32 rows, twice that, for the
next 64 inputs. Rows are the left operand, together with the lines after them, whose results are
dropped.

Legend: T tokens, I inputs, O outputs, R raw outputs; N outputs of a group, M rows.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import load_box
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.hopper.small_m import (
    BESIDE_N,
    SmallBoxes,
    SmallProduct,
    SmallShape,
    launch,
    produce,
    store,
)
from milepost.kernels.products.hopper.tiles import MMA_M, Fp8Tiles
from milepost.kernels.products.portable.rounding import round_lines
from milepost.kernels.products.run import Multiplication

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_RAW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_REGISTERS = 80
_LINE = 64
"""Inputs of a line, the widest that TMA swizzles, and rows of an MMA."""
_MMA_M, _RAW_N, _LINES = gl.constexpr(_LINE), gl.constexpr(BESIDE_N), gl.constexpr(_RAW_LAYOUT)


def run(given: Multiplication, tiles: Fp8Tiles) -> Tensor:
    """Multiplies up to 64 rows by FP8 weights, and by the raw weights beside them."""
    weight, beside, output = given.weight, given.beside, given.output(tiles.split_k)
    assert isinstance(weight, Fp8), "the kernel's form"
    rows, row_scales = round_lines(given.rows, weight, given.chip)
    shape = SmallShape.of(
        weight,
        tiles,
        BLOCK,
        block_m=tiles.block_m if tiles.is_swapped else MMA_M,
        mma_n=tiles.mma_n,
        is_swapped=tiles.is_swapped,
        beside=0 if beside is None else beside.num_outputs,
    )
    describe, block_m = TensorDescriptor.from_tensor, tiles.block_m
    boxes = SmallBoxes(
        describe(rows, [block_m, BLOCK], _LAYOUT),
        describe(weight.values, [tiles.block_n & -tiles.block_n, BLOCK], _LAYOUT),
        describe(row_scales, [1, block_m], _SCALES),
        None if beside is None else describe(given.values, [block_m, _LINE], _RAW_LAYOUT),
        None if beside is None else describe(beside.values, [BESIDE_N, _LINE], _RAW_LAYOUT),
    )
    product = SmallProduct(weight.scales, output, len(given.rows), output.stride(-2))
    how = {"PRODUCE": _produce, "CONSUME": _consume, "num_warps": 4, "maxnreg": _REGISTERS}
    return launch(boxes, product, shape, given.chip.num_sms, **how)


@gluon.constexpr_function
def _parts_of(block_m):
    """Returns the number of lines per row in a step if `block_m` rows are loaded; a stage has 128
    lines."""
    return 1 if block_m == _LINE else 2


@gluon.jit
def _produce(stages, boxes, SHAPE: gl.constexpr):
    """Loads the FP8 weights, then the raw ones."""
    num_begun = 0
    if SHAPE.beside:
        num_begun = _begin_beside(stages, boxes, SHAPE)
    produce(stages, boxes, SHAPE)
    if SHAPE.beside:
        _produce_beside(stages, boxes, num_begun, SHAPE)


@gluon.jit
def _consume(stages, product, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Computes half of the outputs of the loaded stages, which have one or two scales."""
    DEPTHS: gl.constexpr = SHAPE.steps * SHAPE.split_k
    BLOCK: gl.constexpr = SHAPE.block_k
    LAST: gl.constexpr = (SHAPE.outputs + BLOCK - 1) // BLOCK - 1
    N: gl.constexpr = SHAPE.mma_n // 2
    # Outputs are the rows of the product if it is swapped, else its columns.
    COLUMNS: gl.constexpr = SHAPE.block_m if SHAPE.is_swapped else N
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    ACROSS: gl.constexpr = 1 if SHAPE.is_swapped else 0
    own = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(ACROSS, RESULT)), ACROSS)
    number = 0
    for unit in range(gl.program_id(0), SHAPE.tiles * SHAPE.split_k, gl.num_programs(0)):
        depth = unit // SHAPE.tiles * SHAPE.steps
        column = unit % SHAPE.tiles * SHAPE.block_n + PART * N
        is_first = own < BLOCK - column % BLOCK
        p_first = product.scales + gl.minimum(column // BLOCK, LAST) * DEPTHS
        p_second = product.scales + gl.minimum(column // BLOCK + 1, LAST) * DEPTHS
        result, number = _add_up(stages, p_first, p_second, is_first, depth, number, PART, SHAPE)
        values = result.to(product.base.dtype.element_ty)
        store(product, values, unit, PART * N + own, ACROSS, SHAPE)
    if SHAPE.beside:
        _consume_beside(stages, product, number, PART, SHAPE)


@gluon.jit
def _add_up(
    stages, p_first, p_second, is_first, depth, number, PART: gl.constexpr, SHAPE: gl.constexpr
):
    """Returns the sum of a unit's products, times the scales from `depth` on of the outputs that
    `is_first` and of others; and the number of the next step."""
    STAGES: gl.constexpr = SHAPE.stages
    DEPTHS: gl.constexpr = SHAPE.steps * SHAPE.split_k
    M: gl.constexpr = SHAPE.block_m
    N: gl.constexpr = SHAPE.mma_n // 2
    ROWS: gl.constexpr = N if SHAPE.is_swapped else M
    COLUMNS: gl.constexpr = M if SHAPE.is_swapped else N
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    bars = stages.bars
    first, second = gl.load(p_first + depth), gl.load(p_second + depth)
    result = gl.zeros([ROWS, COLUMNS], gl.float32, layout=RESULT)
    for step in range(SHAPE.steps):
        ahead = gl.minimum(depth + step + 1, DEPTHS - 1)
        next_first, next_second = gl.load(p_first + ahead), gl.load(p_second + ahead)
        stage = number % STAGES
        mbarrier.wait(bars.index(stage), number // STAGES & 1)
        product = gl.zeros([ROWS, COLUMNS], gl.float32, layout=RESULT)
        left, right = stages.weights.index(stage).slice(PART * N, N), stages.inputs.index(stage)
        if not SHAPE.is_swapped:
            left, right = right, left
        right = right.permute((1, 0))
        product = warpgroup_mma(left, right, product, use_acc=False, is_async=True)
        if SHAPE.is_swapped:
            row_scale = stages.row_scales.index(stage).slice(0, M, 1).load(RESULT)
        else:
            row_scale = stages.row_scales.index(stage).permute((1, 0)).load(RESULT)
        scale = gl.where(is_first, first, second)
        product = warpgroup_mma_wait(0, [product])
        mbarrier.arrive(bars.index(STAGES + stage), count=1)
        result += product * (row_scale * scale)
        first, second = next_first, next_second
        number += 1
    return result, number


@gluon.jit
def _find_units(SHAPE: gl.constexpr):
    """Returns how many units of FP8 weights this program has, its first raw unit, and the end of
    the raw units."""
    NUM_UNITS: gl.constexpr = SHAPE.tiles * SHAPE.split_k
    first, stride = gl.program_id(0), gl.num_programs(0)
    own = (NUM_UNITS - first + stride - 1) // stride
    return own, first + own * stride, NUM_UNITS + (SHAPE.beside + _RAW_N - 1) // _RAW_N


@gluon.jit
def _begin_beside(stages, boxes, SHAPE: gl.constexpr):
    """Starts to load the first raw weights if the program has none of FP8; returns for how many
    steps."""
    STEPS: gl.constexpr = SHAPE.inputs // (_parts_of(boxes.raw_rows.block_type.shape[0]) * _MMA_M)
    own, unit, end = _find_units(SHAPE)
    num_begun = gl.where((own == 0) & (unit < end), min(STEPS, SHAPE.stages), 0)
    for step in range(num_begun):
        _fetch_raw(stages, boxes, unit - SHAPE.tiles * SHAPE.split_k, step, step)
    return num_begun


@gluon.jit
def _produce_beside(stages, boxes, num_begun, SHAPE: gl.constexpr):
    """Loads the steps of the raw units after those of FP8 weights; the first `num_begun` steps of
    weights are already on their way."""
    STAGES: gl.constexpr = SHAPE.stages
    STEPS: gl.constexpr = SHAPE.inputs // (_parts_of(boxes.raw_rows.block_type.shape[0]) * _MMA_M)
    own, first, end = _find_units(SHAPE)
    number = own * SHAPE.steps
    for unit in range(first, end, gl.num_programs(0)):
        for step in range(STEPS):
            stage = number % STAGES
            if number >= num_begun:
                mbarrier.wait(stages.bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
                _fetch_raw(stages, boxes, unit - SHAPE.tiles * SHAPE.split_k, step, stage)
            _fetch_raw_rows(stages, boxes, step, stage)
            number += 1


@gluon.jit
def _fetch_raw(stages, boxes, unit, step, stage):
    """Starts to load a step's weights; its barrier waits for the rows too."""
    weight = boxes.raw_weight
    ROWS: gl.constexpr = boxes.raw_rows.block_type.shape[0]
    DEPTH: gl.constexpr = weight.block_type.shape[1]
    PARTS: gl.constexpr = _parts_of(ROWS)
    bar, place = stages.bars.index(stage), _as_lines(stages.weights.index(stage), weight.dtype)
    mbarrier.expect(bar, PARTS * (ROWS + _RAW_N) * DEPTH * 2)
    for part in gl.static_range(PARTS):
        at = [unit * _RAW_N, (step * PARTS + part) * DEPTH]
        load_box(weight, at, bar, place.slice(part * _MMA_M + _MMA_M // PARTS, _RAW_N))


@gluon.jit
def _fetch_raw_rows(stages, boxes, step, stage):
    rows = boxes.raw_rows
    ROWS: gl.constexpr = rows.block_type.shape[0]
    DEPTH: gl.constexpr = rows.block_type.shape[1]
    PARTS: gl.constexpr = _parts_of(ROWS)
    place = _as_lines(stages.weights.index(stage), rows.dtype)
    for part in gl.static_range(PARTS):
        at = [0, (step * PARTS + part) * DEPTH]
        load_box(rows, at, stages.bars.index(stage), place.slice(part * _MMA_M, ROWS))


@gluon.jit
def _consume_beside(stages, product, number, PART: gl.constexpr, SHAPE: gl.constexpr):
    """Multiplies half of the outputs of raw units; the program has used up `number` steps."""
    STAGES: gl.constexpr = SHAPE.stages
    HALF: gl.constexpr = _RAW_N // 2
    PARTS: gl.constexpr = _parts_of(SHAPE.block_m)
    STEPS: gl.constexpr = SHAPE.inputs // (PARTS * _MMA_M)
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dtype: gl.constexpr = product.base.dtype.element_ty
    row = gl.arange(0, _MMA_M, layout=gl.SliceLayout(1, RESULT))[:, None]
    inside = PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, RESULT))[None, :]
    _, first, end = _find_units(SHAPE)
    for unit in range(first, end, gl.num_programs(0)):
        result = gl.zeros([_MMA_M, HALF], gl.float32, layout=RESULT)
        for _ in range(STEPS):
            stage = number % STAGES
            mbarrier.wait(stages.bars.index(stage), number // STAGES & 1)
            place = _as_lines(stages.weights.index(stage), dtype)
            for part in gl.static_range(PARTS):
                left = place.slice(part * _MMA_M, _MMA_M)
                right = place.slice(part * _MMA_M + _MMA_M // PARTS + PART * HALF, HALF)
                result = warpgroup_mma(left, right.permute((1, 0)), result, is_async=True)
            result = warpgroup_mma_wait(0, [result])
            mbarrier.arrive(stages.bars.index(STAGES + stage), count=1)
            number += 1
        column = (unit - SHAPE.tiles * SHAPE.split_k) * _RAW_N + inside
        target = product.base + row * product.stride + SHAPE.outputs + column
        mask = (row < product.num_tokens) & (column < SHAPE.beside)
        gl.store(target, result.to(dtype), mask=mask)


@gluon.jit
def _as_lines(stage, dtype: gl.constexpr):
    """Returns a stage of FP8 weights as twice 64 lines of 64 numbers."""
    return stage._reinterpret(dtype, [2 * _MMA_M, _MMA_M], _LINES)
