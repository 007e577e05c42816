"""GEMMs of four-bit weights and 2 to 32 rows on Hopper, in Gluon.

Unpacking is what four bits cost. So weights come to shared memory as they are, by asynchronous
copies several steps ahead, and every thread reads just the bytes that it multiplies, 8 adjacent
ones, and unpacks them where they are multiplied. Weights are the left operand. A block's product is
made of whole numbers, less their zero point, then scaled and added up in float32.

Legend: T tokens, I inputs, O outputs, S split-K partials; N outputs, M rows, K inputs of a step.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from milepost.kernels.platform.gluon import thread_barrier
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.products.forms.quantised import BLOCK, Int4
from milepost.kernels.products.hopper import int4_numbers as int4
from milepost.kernels.products.hopper.small_m import SmallShape
from milepost.kernels.products.hopper.tiles import Int4Tiles
from milepost.kernels.products.run import Multiplication

_BLOCK, _HALF = gl.constexpr(BLOCK), gl.constexpr(BLOCK // 2)


def run(given: Multiplication, tiles: Int4Tiles) -> Tensor:
    """Multiplies 2 to 32 rows by four-bit weights."""
    hidden, weight = given.values, given.weight_as(Int4)
    output, block_k = given.output(tiles.split_k), tiles.num_blocks * BLOCK
    how = {"block_m": tiles.block_m, "mma_n": tiles.block_n, "group": weight.group}
    shape = SmallShape.of(weight, tiles, block_k, **how)
    _gemm_kernel[(shape.tiles, shape.split_k)](
        hidden,
        weight.packed,
        weight.scales,
        weight.zeros,
        output,
        len(hidden),
        hidden.stride(0),
        output.stride(-2),
        SHAPE=shape,
        num_warps=tiles.num_warps,
        **OVERLAPPED,
    )
    return output if tiles.split_k == 1 else output.transpose(0, 1)


@gluon.constexpr_function
def _products_layout(num_warps):
    """Returns the layout of products: each warp has 16 outputs, repeated, and all rows."""
    return gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])


@gluon.constexpr_function
def _copied_layout(width, size, num_warps):
    """Returns the layout of rows of `width` bytes on their way to shared memory, 16 bytes a thread,
    in numbers of `size` bytes."""
    across = min(width, 512) // 16
    return gl.BlockedLayout([1, 16 // size], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def _kept_layout(width):
    """Returns the layout of weights in shared memory, from which four threads read 32 bytes of a
    row, and four rows at a time."""
    per_phase = 128 // width
    return gl.SwizzledSharedLayout(32, per_phase, 4 // per_phase, [1, 0])


@quick
@gluon.jit(do_not_specialize=["num_tokens"])
def _gemm_kernel(
    hidden, weight, scales, zeros, output, num_tokens, stride, output_stride, SHAPE: gl.constexpr
):
    """Multiplies a tile of outputs and a share of the inputs."""
    launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    N: gl.constexpr = SHAPE.block_n
    EACH: gl.constexpr = int4.scales_each(SHAPE.group)
    WORDS: gl.constexpr = SHAPE.inputs // max(SHAPE.group, _BLOCK)
    PRODUCTS: gl.constexpr = _products_layout(WARPS)
    COPIED: gl.constexpr = _copied_layout(SHAPE.block_k // 2, 1, WARPS)
    COPIED_ROWS: gl.constexpr = _copied_layout(SHAPE.block_k * 2, 2, WARPS)
    first = gl.program_id(1) * (SHAPE.block_k * SHAPE.steps)
    # Outputs past the last wrap, rows past the last repeat it: neither is stored.
    tile = gl.program_id(0) * N
    row = (tile + gl.arange(0, N, gl.SliceLayout(1, COPIED))) % SHAPE.outputs
    p_w = weight + row.to(gl.int64) * (SHAPE.inputs // 2)
    weights = _begin(p_w, first, SHAPE)
    scaled = (tile + gl.arange(0, N, gl.SliceLayout(1, PRODUCTS))) % SHAPE.outputs
    p_scale = int4.as_words(scales, EACH) + scaled * WORDS
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 8)
    shifted = (tile + gl.arange(0, N, gl.SliceLayout(1, WEIGHTS))) % SHAPE.outputs
    p_zero = int4.as_words(zeros, EACH) + shifted * WORDS
    wait_for_inputs()
    token = gl.arange(0, SHAPE.block_m, gl.SliceLayout(1, COPIED_ROWS))
    p_x = hidden + gl.minimum(token, num_tokens - 1).to(gl.int64) * stride
    TYPE: gl.constexpr = scales.dtype.element_ty
    result = _accumulate(weights, p_x, p_w, (p_scale, p_zero), first, TYPE, SHAPE)
    STORED: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, WARPS], [0, 1])
    values = gl.convert_layout(result, STORED).to(output.dtype.element_ty)
    o_n = tile + gl.arange(0, N, gl.SliceLayout(1, STORED))[:, None]
    o_m = gl.arange(0, SHAPE.block_m, gl.SliceLayout(0, STORED))[None, :]
    target = output + (gl.program_id(1) * num_tokens + o_m) * output_stride + o_n
    gl.store(target, values, mask=(o_n < SHAPE.outputs) & (o_m < num_tokens))


@gluon.jit
def _begin(p_w, first, SHAPE: gl.constexpr):
    """Allocates the stages of weights and starts to load the first ones: at `p_w` [N], from input
    `first` on."""
    WIDTH: gl.constexpr = SHAPE.block_k // 2
    shape: gl.constexpr = [SHAPE.stages, SHAPE.block_n, WIDTH]
    weights = gl.allocate_shared_memory(gl.uint8, shape, _kept_layout(WIDTH))
    for stage in gl.static_range(SHAPE.stages - 1):
        if stage < SHAPE.steps:
            _copy(weights.index(stage), p_w, first // 2 + stage * WIDTH)
    return weights


@gluon.jit
def _copy(kept, p_rows, start):
    """Copies a step of rows at `p_rows` to shared memory."""
    WIDTH: gl.constexpr = kept.shape[1]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, p_rows.type.layout.parent))
    async_copy.async_copy_global_to_shared(kept, p_rows[:, None] + start + column[None, :])


@gluon.jit
def _accumulate(weights, p_x, p_w, p_words, first, TYPE: gl.constexpr, SHAPE: gl.constexpr):
    """Multiplies rows at `p_x` [M] and weights at `p_w` [N] (see `_begin`): [N, M], from input
    `first` on. Words of scales, of a TYPE, and zero points are at `p_words` [N]."""
    STAGES: gl.constexpr = SHAPE.stages
    STEPS: gl.constexpr = SHAPE.steps
    DEPTH: gl.constexpr = SHAPE.block_k
    # Four threads read 64 bytes of a row, and two rows at a time.
    KEPT: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [1, 0])
    kept = gl.allocate_shared_memory(p_x.dtype.element_ty, [STAGES, p_x.shape[0], DEPTH], KEPT)
    for stage in gl.static_range(STAGES - 1):
        if stage < STEPS:
            _copy(kept.index(stage), p_x, first + stage * DEPTH)
        async_copy.commit_group()
    scales, zeros = _load_words(p_words, first, SHAPE)
    PRODUCTS: gl.constexpr = _products_layout(gl.num_warps())
    result = gl.zeros([p_w.shape[0], p_x.shape[0]], gl.float32, PRODUCTS)
    for step in range(STEPS):
        async_copy.wait_group(STAGES - 2)
        thread_barrier()
        later = step + STAGES - 1
        if later < STEPS:
            _copy(weights.index(later % STAGES), p_w, (first + later * DEPTH) // 2)
            _copy(kept.index(later % STAGES), p_x, first + later * DEPTH)
        async_copy.commit_group()
        ahead = first + gl.minimum(step + 1, STEPS - 1) * DEPTH
        next_scales, next_zeros = _load_words(p_words, ahead, SHAPE)
        numbers, rows = weights.index(step % STAGES), kept.index(step % STAGES)
        for b in gl.static_range(DEPTH // _BLOCK):
            b_w = numbers.slice(b * _HALF, _HALF, 1)
            b_x = rows.slice(b * _BLOCK, _BLOCK, 1)
            result = _add(result, b_w, b_x, scales[b], zeros[b], TYPE, SHAPE)
        scales, zeros = next_scales, next_zeros
    return result


@gluon.jit
def _load_words(p_words, first, SHAPE: gl.constexpr):
    """Loads the words of scales and zero points of a step's blocks."""
    scales, zeros = (), ()
    for b in gl.static_range(SHAPE.block_k // _BLOCK):
        word = (first + b * _BLOCK) // max(SHAPE.group, _BLOCK)
        scales += (gl.load(p_words[0] + word),)
        zeros += (gl.load(p_words[1] + word),)
    return scales, zeros


@gluon.jit
def _add(result, numbers, rows, scales, zeros, TYPE: gl.constexpr, SHAPE: gl.constexpr):
    """Adds a block's product to `result`."""
    dtype: gl.constexpr = rows.dtype
    PRODUCTS: gl.constexpr = result.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 8)
    LAYOUT: gl.constexpr = gl.DotOperandLayout(1, PRODUCTS, 8)
    LANE: gl.constexpr = min(SHAPE.group, _HALF)
    EACH: gl.constexpr = int4.scales_each(SHAPE.group)
    PIECES: gl.constexpr = _BLOCK // LANE
    low, high = int4.unpack(numbers.load(WEIGHTS), dtype)
    low, high = _cut(low, LANE), _cut(high, LANE)
    product = gl.zeros(result.shape, gl.float32, PRODUCTS)
    for i in gl.static_range(PIECES):
        left = gl.convert_layout((low, high)[i % 2][i // 2], WEIGHTS, assert_trivial=True)
        left -= int4.zero_of(zeros, i * EACH // PIECES, dtype)[:, None]
        columns = rows.slice(i * LANE, LANE, 1).permute((1, 0)).load(LAYOUT)
        product = mma_v2(left, columns, product)
        if EACH == PIECES or i == PIECES - 1:
            scale = int4.scale_of(scales, i * EACH // PIECES, TYPE).to(gl.float32)
            result += product * scale[:, None]
            product = gl.zeros(result.shape, gl.float32, PRODUCTS)
    return result


@gluon.jit
def _cut(values, LANE: gl.constexpr):
    """Returns numbers [N, K] in pieces of a lane."""
    return (values,) if LANE == _HALF else int4.halve(values)
