"""What the experts' GEMMs of FP8 weights and many rows have in common on Hopper, in Gluon.

Some warps bring steps to shared memory. Two groups of four multiply 64 rows each of the same block:
while one adds a step's product up in float32, times its scales, the other's runs on the tensor
cores. They begin in turn: begun at once they end at once, and the tensor cores wait for both (a
layer's up projection on an H200, 8,192 tokens: 378 us, not in turn 458). A step is as deep as a
block that shares a scale.

The stages are `inputs` [2 * STAGES, HALF, BLOCK], both halves of the rows, `weights` [PARTS *
STAGES, BLOCK, BLOCK] in shared memory, and `bars`: those that are loaded, then those that are used
up. PARTS blocks of weights are multiplied with the same rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK_M = 128
HALF = BLOCK_M // 2
STAGES = 4
REGISTERS = 168
"""Of a thread, before the groups share them out."""
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@gluon.jit
def open_stages(
    weight,
    HALF: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    LOADERS: gl.constexpr,
):
    """Shared memory for the stages, and barriers, for so many LOADERS of one; and for turns."""
    dtype: gl.constexpr = weight.dtype
    inputs = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF, BLOCK], weight.layout)
    weights = gl.allocate_shared_memory(dtype, [PARTS * STAGES, BLOCK, BLOCK], weight.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=LOADERS)
        mbarrier.init(bars.index(STAGES + stage), count=2)
    for half in gl.static_range(2):
        mbarrier.init(turns.index(half), count=1)
    return inputs, weights, bars, turns


@gluon.jit
def find_block(blocks, capacity, block):
    """A block's expert, first row and end of the expert's rows."""
    expert = gl.load(blocks + block)
    return expert, gl.load(blocks + capacity + block), gl.load(blocks + 2 * capacity + block)


@gluon.jit
def wait_for_room(number, bars, STAGES: gl.constexpr):
    """The stage of a program's step of this number, once it is used up."""
    stage = number % STAGES
    mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
    return stage


@gluon.jit
def multiply(
    p_first,
    p_second,
    p_row,
    stride,
    number,
    turn,
    is_tall,
    stages,
    HALF_TILE: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    RESULT: gl.constexpr,
):
    """Both parts' products [HALF, BLOCK] of a tile, whose scales are at `p_first` and `p_second`;
    those of its rows at `p_row`, step by step `stride` apart. `turn` counts the products of tiles
    in which both groups have rows, `is_tall`."""
    inputs, weights, bars, turns = stages
    HALF: gl.constexpr = inputs.type.shape[1]
    BLOCK: gl.constexpr = weights.type.shape[1]
    first = gl.zeros([HALF, BLOCK], gl.float32, layout=RESULT)
    second = first
    first_scale, second_scale, row_scale = gl.load(p_first), gl.load(p_second), gl.load(p_row)
    for step in range(STEPS):
        ahead = gl.minimum(step + 1, STEPS - 1)
        next_first, next_second = gl.load(p_first + ahead), gl.load(p_second + ahead)
        next_row = gl.load(p_row + ahead * stride)
        stage = number % STAGES
        mbarrier.wait(bars.index(stage), number // STAGES & 1)
        left = inputs.index(2 * stage + HALF_TILE)
        right = weights.index(stage * PARTS).permute((1, 0))
        product = _multiply_in_turn(left, right, turns, turn, is_tall, HALF_TILE, RESULT)
        turn += 1
        if PARTS == 1:
            mbarrier.arrive(bars.index(STAGES + stage), count=1)
        first = _add_here(first, product, row_scale * first_scale)
        if PARTS == 2:
            right = weights.index(stage * PARTS + 1).permute((1, 0))
            product = _multiply_in_turn(left, right, turns, turn, is_tall, HALF_TILE, RESULT)
            turn += 1
            mbarrier.arrive(bars.index(STAGES + stage), count=1)
            second = _add_here(second, product, row_scale * second_scale)
        first_scale, second_scale, row_scale = next_first, next_second, next_row
        number += 1
    return first, second


@gluon.jit
def _multiply_in_turn(
    left, right, turns, turn, is_tall, HALF_TILE: gl.constexpr, RESULT: gl.constexpr
):
    """The product, begun when the other group's is: both at once would end at once, and then the
    tensor cores would wait for both."""
    HALF: gl.constexpr = left.type.shape[0]
    BLOCK: gl.constexpr = right.type.shape[1]
    nothing = gl.zeros([HALF, BLOCK], gl.float32, layout=RESULT)
    mbarrier.wait(turns.index(HALF_TILE), (turn & 1) ^ (1 - HALF_TILE), pred=is_tall)
    product = warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - HALF_TILE), count=1, pred=is_tall)
    return warpgroup_mma_wait(0, [product])


@gluon.jit
def _add_here(total, product, scale):
    """`total` plus rows of `product` times their scales. The compiler would rather add up behind
    the next product, and has no registers for two: so what comes of it is used at once."""
    total += product * scale[:, None]
    return gl.inline_asm_elementwise(
        "mov.f32 $0, $1;", "=f,f", [total], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def skip(number, bars, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Give a tile's steps back without rows of one's own."""
    for _ in range(STEPS):
        mbarrier.wait(bars.index(number % STAGES), number // STAGES & 1)
        mbarrier.arrive(bars.index(STAGES + number % STAGES), count=1)
        number += 1
