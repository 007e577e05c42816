"""GEMMs of FP8 weights and up to 64 rows on Hopper, in Gluon.

One warp has TMA bring steps of the weights, of the rows and of the rows' scales to shared memory,
the weights while the kernels are under way that make and round the rows. Two groups of four warps
multiply half of a tile's outputs each and do not wait for each other. The left operand has a side
of 64 whatever there is. Up to 32 rows it is the weights, so that no thread scales sums that are
dropped; of more rows it is the rows, and so a thread has two rows' scales and one or two of the
weights. A step is as deep as a block that shares a scale: its product is scaled and added up in
float32.

Legend: T tokens, I inputs, O outputs, S split-K partials, D scales of a row.
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

from milepost.kernels.platform.gluon import launch_dependents
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.platform.tiles import cdiv
from milepost.kernels.products.forms.quantised import BLOCK, Fp8
from milepost.kernels.products.hopper.beside import (
    Consumed,
    SidedFeed,
    begin_beside,
    consume_beside,
    count_units,
    describe,
    produce_beside,
)
from milepost.kernels.products.hopper.raw_small_m import ScaledFeed, open_stages, produce
from milepost.kernels.products.portable.rounding import round_lines
from milepost.kernels.products.run_products import Multiplication
from milepost.kernels.products.tiles import MMA_M, Fp8Tiles

_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_SCALES = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_REGISTERS = 80
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 104, 24


def run(given: Multiplication, tiles: Fp8Tiles) -> Tensor:
    """Multiplies up to 64 rows by FP8 weights, and by the raw weights beside them."""
    weight, beside, num_sms = given.weight, given.beside, given.chip.num_sms
    assert isinstance(weight, Fp8), "the kernel's form"
    rows, row_scales = round_lines(given.rows, weight, given.chip)
    output = given.output(tiles.split_k)
    num_units = cdiv(weight.num_outputs, tiles.block_n) * tiles.split_k
    num_raw, raw_boxes = 0, (None, None)
    if beside is not None:
        num_raw = beside.num_outputs
        raw_boxes = describe(given.values, beside.values, tiles.block_m)
    # What is copied at a time has a power of two of rows.
    box = tiles.block_n & -tiles.block_n
    _gemm_kernel[(min(num_units + count_units(num_raw), num_sms),)](
        TensorDescriptor.from_tensor(rows, [tiles.block_m, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(weight.values, [box, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(row_scales, [1, tiles.block_m], _SCALES),
        *raw_boxes,
        weight.scales,
        output,
        output.shape[-2],
        output.stride(-2),
        INPUTS=weight.num_inputs,
        OUTPUTS=weight.num_outputs,
        BLOCK_N=tiles.block_n,
        MMA_M=tiles.block_m if tiles.is_swapped else MMA_M,
        MMA_N=tiles.mma_n,
        SPLIT_K=tiles.split_k,
        STAGES=tiles.num_stages,
        SWAPPED=tiles.is_swapped,
        RAW=num_raw,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=_REGISTERS,
        **OVERLAPPED,
    )
    return output if tiles.split_k == 1 else output.transpose(0, 1)


@quick
@gluon.jit(do_not_specialize=["num_tokens"])
def _gemm_kernel(
    rows,
    weight,
    row_scales,
    raw_rows,
    raw_weight,
    scales,
    output,
    num_tokens,
    output_stride,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    MMA_M: gl.constexpr,
    MMA_N: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    SWAPPED: gl.constexpr,
    RAW: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Multiplies units, each a tile of outputs and a share of the inputs, then those of RAW
    outputs."""
    TILES: gl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    BLOCK: gl.constexpr = rows.block_type.shape[1]
    STEPS: gl.constexpr = INPUTS // (SPLIT_K * BLOCK)
    inputs, weights, bars = open_stages(rows, weight, MMA_M, MMA_N, BLOCK, STAGES, 2)
    num_units = TILES * SPLIT_K
    launch_dependents()
    # TMA writes from whole lines of 128 bytes on.
    HELD: gl.constexpr = max(MMA_M, 32)
    held = gl.allocate_shared_memory(gl.float32, [STAGES, 1, HELD], row_scales.layout)
    consumed = Consumed(
        scales, output, num_tokens, output_stride, num_units, inputs, held, weights, bars
    )
    feed = ScaledFeed(rows, weight, num_units, inputs, weights, bars, row_scales, held)
    if RAW:
        feed = SidedFeed(
            rows, weight, num_units, inputs, weights, bars, row_scales, held, raw_rows, raw_weight
        )
    gl.warp_specialize(
        [
            (
                _consume,
                (consumed, 0, OUTPUTS, BLOCK_N, TILES, STEPS, SPLIT_K, STAGES, SWAPPED, RAW),
            ),
            (
                _consume,
                (consumed, 1, OUTPUTS, BLOCK_N, TILES, STEPS, SPLIT_K, STAGES, SWAPPED, RAW),
            ),
            (_produce, (feed, INPUTS, BLOCK_N, TILES, STEPS, STAGES, RAW)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(
    feed,
    INPUTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    RAW: gl.constexpr,
):
    """Loads the FP8 weights, then the raw ones."""
    num_ahead = 0
    if RAW:
        num_ahead = begin_beside(feed, INPUTS, STAGES, RAW)
    produce(feed, BLOCK_N, TILES, STEPS, STAGES)
    if RAW:
        produce_beside(feed, num_ahead, INPUTS, STEPS, STAGES, RAW)


@gluon.jit
def _consume(
    consumed,
    PART: gl.constexpr,
    OUTPUTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TILES: gl.constexpr,
    STEPS: gl.constexpr,
    SPLIT_K: gl.constexpr,
    STAGES: gl.constexpr,
    SWAPPED: gl.constexpr,
    RAW: gl.constexpr,
):
    """Multiplies half of the outputs of what is loaded. They have one or two scales."""
    scales, output, num_tokens, output_stride, num_units, inputs, held, weights, bars = consumed
    MMA_M: gl.constexpr = inputs.type.shape[1]
    WIDTH: gl.constexpr = weights.type.shape[1] // 2
    BLOCK: gl.constexpr = inputs.type.shape[2]
    DEPTHS: gl.constexpr = STEPS * SPLIT_K
    LAST: gl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK - 1
    # Outputs are the rows of what comes of it where it is SWAPPED, else the columns.
    ROWS: gl.constexpr = WIDTH if SWAPPED else MMA_M
    COLUMNS: gl.constexpr = MMA_M if SWAPPED else WIDTH
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    ACROSS: gl.constexpr = 1 if SWAPPED else 0
    own = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(ACROSS, RESULT)), ACROSS)
    number = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        depth = unit // TILES * STEPS
        column = unit % TILES * BLOCK_N + PART * WIDTH
        is_first = own < BLOCK - column % BLOCK
        p_first = scales + gl.minimum(column // BLOCK, LAST) * DEPTHS
        p_second = scales + gl.minimum(column // BLOCK + 1, LAST) * DEPTHS
        first, second = gl.load(p_first + depth), gl.load(p_second + depth)
        result = gl.zeros([ROWS, COLUMNS], gl.float32, layout=RESULT)
        for step in range(STEPS):
            ahead = gl.minimum(depth + step + 1, DEPTHS - 1)
            next_first, next_second = gl.load(p_first + ahead), gl.load(p_second + ahead)
            stage = number % STAGES
            mbarrier.wait(bars.index(stage), number // STAGES & 1)
            product = gl.zeros([ROWS, COLUMNS], gl.float32, layout=RESULT)
            left, right = weights.index(stage).slice(PART * WIDTH, WIDTH), inputs.index(stage)
            if not SWAPPED:
                left, right = right, left
            right = right.permute((1, 0))
            product = warpgroup_mma(left, right, product, use_acc=False, is_async=True)
            if SWAPPED:
                row_scale = held.index(stage).slice(0, MMA_M, 1).load(RESULT)
            else:
                row_scale = held.index(stage).permute((1, 0)).load(RESULT)
            scale = gl.where(is_first, first, second)
            product = warpgroup_mma_wait(0, [product])
            mbarrier.arrive(bars.index(STAGES + stage), count=1)
            result += product * (row_scale * scale)
            first, second = next_first, next_second
            number += 1
        values = result.to(output.dtype.element_ty)
        inside = PART * WIDTH + own
        place = unit // TILES, unit % TILES * BLOCK_N
        _store(output, values, place, inside, num_tokens, output_stride, OUTPUTS, BLOCK_N, ACROSS)
    if RAW:
        consume_beside(consumed, number, PART, DEPTHS * BLOCK, OUTPUTS, STAGES, RAW)


@gluon.jit
def _store(
    output,
    values,
    place,
    inside,
    num_tokens,
    stride,
    OUTPUTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ACROSS: gl.constexpr,
):
    """Stores half of a unit's results to `output` [splits, tokens, OUTPUTS]: outputs `inside` its
    tile, and tokens ACROSS them."""
    split, first = place
    TOKENS: gl.constexpr = gl.SliceLayout(1 - ACROSS, values.type.layout)
    row = gl.expand_dims(gl.arange(0, values.shape[ACROSS], layout=TOKENS), 1 - ACROSS)
    column = first + inside
    target = output + (split * num_tokens + row) * stride + column
    is_column = (inside < BLOCK_N) & (column < OUTPUTS)
    gl.store(target, values, mask=is_column & (row < num_tokens))
