"""What the experts' GEMMs of four-bit weights and many rows have in common on Hopper, in Gluon.

Some warps bring steps to shared memory: rows, and weights as they are. Two groups of four warps
multiply 64 outputs each of both parts of the weights with the same rows. Weights are the left
operand, which the tensor cores take from registers: while they multiply a quarter of a step for a
group, it unpacks the next one. A number is rounded to the rows' type, as where a launch of its own
unpacks it, and so the products have the same bits.

The stages are `inputs` [2 * STAGES, BLOCK_M, HALF], both halves of a step's inputs, and `weights`
[PARTS * STAGES, BLOCK, HALF / 2], two bytes in a number, in shared memory, and `bars`: those that
are loaded, then those that are used up. The parts are gates and ups, or two blocks of outputs.

Legend: N outputs of a group, M rows, K inputs of a half of a step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from milepost.kernels.platform.gluon import thread_barrier
from milepost.kernels.products.forms.quantised import BLOCK
from milepost.kernels.products.hopper.fp8_grouped_parts import find_block

HALF = BLOCK // 2
PARTS = 2
STAGES = {64: 6, 128: 4}
"""By a block's rows: as many as there is room for."""
REGISTERS = 168
"""Of a thread, before the groups share them out."""
ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
WEIGHTS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
STORED = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
"""Of products [N, M] on their way to memory, where a row's outputs lie side by side."""

_ROWS = gl.constexpr(ROWS_LAYOUT)
_BLOCK, _HALF, _PARTS = gl.constexpr(BLOCK), gl.constexpr(HALF), gl.constexpr(PARTS)
_OUTPUTS = gl.constexpr(HALF)
_PACKED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[HALF, HALF // 2],
    )
)
"""Of packed weights, two bytes in a number: a thread has those whose numbers it multiplies."""
_OF_OUTPUTS = gl.constexpr(gl.SliceLayout(1, _PACKED.value))


@gluon.constexpr_function
def _products_layout(width):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def _weights_layout(width):
    return gl.DotOperandLayout(0, _products_layout(width), 2)


@gluon.jit
def open_stages(
    dtype: gl.constexpr,
    weight,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    LOADERS: gl.constexpr,
):
    """Shared memory for the stages, and barriers, for so many LOADERS of one."""
    inputs = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_M, _HALF], _ROWS)
    shape: gl.constexpr = [_PARTS * STAGES, _BLOCK, _HALF // 2]
    weights = gl.allocate_shared_memory(weight.dtype, shape, weight.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=LOADERS)
        mbarrier.init(bars.index(STAGES + stage), count=2)
    return inputs, weights, bars


@gluon.jit
def consume(
    shared,
    scales,
    zeros,
    target,
    OWN: gl.constexpr,
    MAKE: gl.constexpr,
    HEIGHT: gl.constexpr,
    PART: gl.constexpr,
    WIDE: gl.constexpr,
    TILES: gl.constexpr,
    INPUTS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The work of a program's group OWN: of each tile 64 outputs of both parts, which begin PART
    rows of weights apart. An expert has HEIGHT of those, a tile WIDE in its first part or in both.
    MAKE brings a tile to `target`."""
    blocks, capacity, num_tiles, stages = shared
    BLOCK_M: gl.constexpr = stages[0].type.shape[1]
    STEPS: gl.constexpr = INPUTS // _BLOCK
    SCALES: gl.constexpr = INPUTS // GROUP
    number, first_index = 0, gl.program_id(0)
    # There may be more programs than tiles.
    start = gl.minimum(first_index, num_tiles - 1)
    expert, first_row, end = find_block(blocks, capacity, start // TILES)
    place = _find_outputs(expert, start % TILES, OWN, HEIGHT, WIDE) * SCALES
    held = load_scales(scales + place, zeros + place, PART * SCALES, 0)
    for index in range(first_index, num_tiles, gl.num_programs(0)):
        # Looked up a tile ahead, or each would begin with waiting.
        following = gl.minimum(index + gl.num_programs(0), num_tiles - 1)
        next_expert, next_row, next_end = find_block(blocks, capacity, following // TILES)
        next_place = _find_outputs(next_expert, following % TILES, OWN, HEIGHT, WIDE) * SCALES
        own = scales + place, zeros + place
        next_own = scales + next_place, zeros + next_place
        tile = target, first_row, end, index % TILES * WIDE + OWN * _OUTPUTS
        # An expert's last block is often less than half full: then half the rows are multiplied.
        # fmt: off
        if end - first_row <= BLOCK_M // 2:
            held = MAKE(tile, stages, held, own, next_own, number, OWN, BLOCK_M // 2,
                        PART * SCALES, STEPS, STAGES, GROUP)
        else:
            held = MAKE(tile, stages, held, own, next_own, number, OWN, BLOCK_M,
                        PART * SCALES, STEPS, STAGES, GROUP)
        # fmt: on
        expert, first_row, end, place = next_expert, next_row, next_end, next_place
        number += STEPS


@gluon.jit
def _find_outputs(expert, tile, OWN: gl.constexpr, HEIGHT: gl.constexpr, WIDE: gl.constexpr):
    """The rows of weights [N] that a group has of a tile's first part."""
    o_n = OWN * _OUTPUTS + gl.arange(0, _OUTPUTS, _OF_OUTPUTS)
    return (expert * HEIGHT + tile * WIDE).to(gl.int64) + o_n


@gluon.jit
def load_scales(p_scale, p_zero, stride, place):
    """Scales and zero points [N] by part, `stride` apart: of one group, the `place`-th."""
    scales, zeros = (), ()
    for part in gl.static_range(_PARTS):
        scales += (gl.load(p_scale + part * stride + place),)
        zeros += (gl.load(p_zero + part * stride + place),)
    return scales, zeros


@gluon.jit
def multiply(
    stages,
    held,
    p_scale,
    p_zero,
    stride,
    number,
    OWN: gl.constexpr,
    WIDTH: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Both parts' products [N, WIDTH] of a tile, whose first step has the `number` among a
    program's and the scales `held`; those of later ones are at `p_scale` and `p_zero`.

    What the tensor cores read from registers must be there before they begin, and they are waited
    for before more is: ptxas lets nothing else overlap."""
    inputs, weights, bars = stages
    dtype: gl.constexpr = inputs.dtype
    scales, zeros = held
    first = gl.zeros([_OUTPUTS, WIDTH], gl.float32, _products_layout(WIDTH))
    second = gl.zeros([_OUTPUTS, WIDTH], gl.float32, _products_layout(WIDTH))
    mbarrier.wait(bars.index(number % STAGES), number // STAGES & 1)
    packed = _load(weights, number % STAGES, 0, OWN)
    left = _unpack(packed, zeros[0], scales[0], False, dtype, WIDTH)
    for step in range(STEPS):
        stage = number % STAGES
        low = inputs.index(2 * stage).slice(0, WIDTH, 0).permute((1, 0))
        high = inputs.index(2 * stage + 1).slice(0, WIDTH, 0).permute((1, 0))
        ahead = gl.minimum(step + 1, STEPS - 1)
        next_scales, next_zeros = load_scales(p_scale, p_zero, stride, ahead * _BLOCK // GROUP)
        product = warpgroup_mma(left, low, first, is_async=True)
        left = _unpack(packed, zeros[0], scales[0], True, dtype, WIDTH)
        first = warpgroup_mma_wait(0, [product])
        product = warpgroup_mma(left, high, first, is_async=True)
        packed = _load(weights, stage, 1, OWN)
        left = _unpack(packed, zeros[1], scales[1], False, dtype, WIDTH)
        first = warpgroup_mma_wait(0, [product])
        product = warpgroup_mma(left, low, second, is_async=True)
        left = _unpack(packed, zeros[1], scales[1], True, dtype, WIDTH)
        second = warpgroup_mma_wait(0, [product])
        # The next step; behind the last one the same once more, for nothing.
        number += gl.where(step + 1 < STEPS, 1, 0)
        mbarrier.wait(bars.index(number % STAGES), number // STAGES & 1)
        scales, zeros = next_scales, next_zeros
        product = warpgroup_mma(left, high, second, is_async=True)
        packed = _load(weights, number % STAGES, 0, OWN)
        left = _unpack(packed, zeros[0], scales[0], False, dtype, WIDTH)
        second = warpgroup_mma_wait(0, [product])
        thread_barrier()
        mbarrier.arrive(bars.index(STAGES + stage), count=1)
    return first, second


@gluon.jit
def _load(weights, stage, PART: gl.constexpr, OWN: gl.constexpr):
    """A group's packed weights [N, HALF / 2] of a step's part."""
    place = weights.index(_PARTS * stage + PART)
    return place.slice(OWN * _OUTPUTS, _OUTPUTS, 0).load(_PACKED)


@gluon.jit
def _unpack(packed, zero, scale, HIGH: gl.constexpr, dtype: gl.constexpr, WIDTH: gl.constexpr):
    """The weights [N, K] in the low or in the high halves of bytes."""
    beside: gl.constexpr = 0x4300 if dtype == gl.bfloat16 else 0x6400
    # Two of each in 32 bits.
    zeros = (zero.to(gl.int32) | beside) * 0x10001
    scales = scale.to(dtype).to(gl.uint16, bitcast=True).to(gl.int32) * 0x10001
    how: gl.constexpr = _unpacking(dtype == gl.bfloat16, HIGH)
    even, odd = gl.inline_asm_elementwise(
        how, "=h,=h,h,r,r", [packed, zeros[:, None], scales[:, None]],
        dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    numbers = gl.reshape(gl.join(even, odd), [_OUTPUTS, _HALF]).to(dtype, bitcast=True)
    return gl.convert_layout(numbers, _weights_layout(WIDTH), assert_trivial=True)


@gluon.constexpr_function
def _unpacking(is_bfloat, is_high):
    """Two bytes' low or high halves, less zero points and times scales: a number is first put in
    the bits beside a power of two."""
    power, kind = ("0x43004300", "bf16x2") if is_bfloat else ("0x64006400", "f16x2")
    shift = "shr.u32 both, both, 4;" if is_high else ""
    return f"""{{
        .reg .b32 both;
        cvt.u32.u16 both, $2;
        prmt.b32 both, both, 0, 0x4140;
        {shift}
        lop3.b32 both, both, 0x000f000f, {power}, 0xea;
        sub.{kind} both, both, $3;
        mul.{kind} both, both, $4;
        mov.b32 {{$0, $1}}, both;
        }}"""
