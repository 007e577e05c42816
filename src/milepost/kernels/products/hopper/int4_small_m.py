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

from milepost.kernels.platform.gluon import launch_dependents, thread_barrier, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.platform.tiles import cdiv
from milepost.kernels.products.forms.quantised import BLOCK, Int4
from milepost.kernels.products.hopper.gemv_parts import unpack
from milepost.kernels.products.run_products import Multiplication
from milepost.kernels.products.tiles import Int4Tiles

_BLOCK, _HALF = gl.constexpr(BLOCK), gl.constexpr(BLOCK // 2)


def run(given: Multiplication, tiles: Int4Tiles) -> Tensor:
    """Multiplies 2 to 32 rows by four-bit weights."""
    hidden, weight = given.values, given.weight
    assert isinstance(weight, Int4), "the kernel's form"
    output = given.output(tiles.split_k)
    _gemm_kernel[(cdiv(weight.num_outputs, tiles.block_n), tiles.split_k)](
        hidden,
        weight.packed,
        weight.scales,
        weight.zeros,
        output,
        len(hidden),
        hidden.stride(0),
        output.stride(-2),
        INPUTS=weight.num_inputs,
        OUTPUTS=weight.num_outputs,
        GROUP=weight.group,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCKS=tiles.num_blocks,
        STEPS=weight.num_inputs // (tiles.split_k * tiles.num_blocks * BLOCK),
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        **OVERLAPPED,
    )
    return output if tiles.split_k == 1 else output.transpose(0, 1)


@gluon.constexpr_function
def products_layout(num_warps):
    """Gives each warp 16 outputs, again and again, and all rows."""
    return gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])


@gluon.constexpr_function
def weights_layout(num_warps):
    return gl.DotOperandLayout(0, products_layout(num_warps), 8)


@gluon.constexpr_function
def copies_layout(width, size, num_warps):
    """Returns the layout of rows of `width` bytes on their way to shared memory, 16 bytes a thread,
    in numbers of `size` bytes."""
    across = width // 16
    return gl.BlockedLayout([1, 16 // size], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def _kept_weights(width):
    """Four threads read 32 bytes of a row, and four rows at a time."""
    per_phase = 128 // width
    return gl.SwizzledSharedLayout(32, per_phase, 4 // per_phase, [1, 0])


@gluon.constexpr_function
def weights_copied(blocks, num_warps):
    """Returns the layout of a step's weights, with this many blocks."""
    return copies_layout(blocks * BLOCK // 2, 1, num_warps)


@gluon.constexpr_function
def rows_copied(blocks, num_warps):
    return copies_layout(min(blocks * BLOCK * 2, 512), 2, num_warps)


@quick
@gluon.jit(do_not_specialize=["num_tokens"])
def _gemm_kernel(
    hidden,
    weight,
    scales,
    zeros,
    output,
    num_tokens,
    stride,
    output_stride,
    INPUTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    PRODUCTS: gl.constexpr = products_layout(WARPS)
    WEIGHTS: gl.constexpr = weights_layout(WARPS)
    first = gl.program_id(1) * (BLOCKS * STEPS * _BLOCK)
    # Outputs past the last wrap, rows past the last repeat it: neither is stored.
    tile = gl.program_id(0) * BLOCK_N
    row = (tile + gl.arange(0, BLOCK_N, gl.SliceLayout(1, weights_copied(BLOCKS, WARPS)))) % OUTPUTS
    p_w = weight + row.to(gl.int64) * (INPUTS // 2)
    weights = begin(p_w, first, BLOCKS, STEPS, STAGES)
    scaled = (tile + gl.arange(0, BLOCK_N, gl.SliceLayout(1, PRODUCTS))) % OUTPUTS
    p_scale = scales + scaled * (INPUTS // GROUP)
    shifted = (tile + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WEIGHTS))) % OUTPUTS
    p_zero = zeros + shifted * (INPUTS // GROUP)
    wait_for_inputs()
    token = gl.arange(0, BLOCK_M, gl.SliceLayout(1, rows_copied(BLOCKS, WARPS)))
    p_x = hidden + gl.minimum(token, num_tokens - 1).to(gl.int64) * stride
    result = accumulate(weights, p_x, p_w, p_scale, p_zero, first, BLOCKS, STEPS, GROUP)
    STORED: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, WARPS], [0, 1])
    values = gl.convert_layout(result, STORED).to(output.dtype.element_ty)
    o_n = tile + gl.arange(0, BLOCK_N, gl.SliceLayout(1, STORED))[:, None]
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, STORED))[None, :]
    target = output + (gl.program_id(1) * num_tokens + o_m) * output_stride + o_n
    gl.store(target, values, mask=(o_n < OUTPUTS) & (o_m < num_tokens))


@gluon.jit
def begin(p_w, first, BLOCKS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Allocates the stages of weights and starts to load the first ones: at `p_w` [N], from input
    `first` on. A step has BLOCKS blocks of inputs."""
    WIDTH: gl.constexpr = BLOCKS * _HALF
    shape: gl.constexpr = [STAGES, p_w.shape[0], WIDTH]
    weights = gl.allocate_shared_memory(gl.uint8, shape, _kept_weights(WIDTH))
    for stage in gl.static_range(STAGES - 1):
        if stage < STEPS:
            _copy(weights.index(stage), p_w, first // 2 + stage * WIDTH)
    return weights


@gluon.jit
def _copy(kept, p_rows, start):
    """Copies a step of rows at `p_rows` to shared memory."""
    WIDTH: gl.constexpr = kept.shape[1]
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, p_rows.type.layout.parent))
    async_copy.async_copy_global_to_shared(kept, p_rows[:, None] + start + column[None, :])


@gluon.jit
def accumulate(
    weights,
    p_x,
    p_w,
    p_scale,
    p_zero,
    first,
    BLOCKS: gl.constexpr,
    STEPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Multiplies rows at `p_x` [M] and weights at `p_w` [N] (see `begin`), whose scales are at
    `p_scale` and `p_zero` [N]: [N, M] over STEPS steps from input `first` on."""
    STAGES: gl.constexpr = weights.shape[0]
    DEPTH: gl.constexpr = BLOCKS * _BLOCK
    PRODUCTS: gl.constexpr = products_layout(gl.num_warps())
    KEPT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    kept = gl.allocate_shared_memory(p_x.dtype.element_ty, [STAGES, p_x.shape[0], DEPTH], KEPT)
    for stage in gl.static_range(STAGES - 1):
        if stage < STEPS:
            _copy(kept.index(stage), p_x, first + stage * DEPTH)
        async_copy.commit_group()
    scales, zeros = _scales(p_scale, p_zero, first, BLOCKS, GROUP)
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
        next_scales, next_zeros = _scales(p_scale, p_zero, ahead, BLOCKS, GROUP)
        numbers, rows = weights.index(step % STAGES), kept.index(step % STAGES)
        for b in gl.static_range(BLOCKS):
            b_w = numbers.slice(b * _HALF, _HALF, 1)
            b_x = rows.slice(b * _BLOCK, _BLOCK, 1)
            result = _add(result, b_w, b_x, scales[b], zeros[b])
        scales, zeros = next_scales, next_zeros
    return result


@gluon.jit
def _scales(p_scale, p_zero, first, BLOCKS: gl.constexpr, GROUP: gl.constexpr):
    """Loads the scales and zero points of a step's blocks."""
    scales, zeros = (), ()
    for b in gl.static_range(BLOCKS):
        group = (first + b * _BLOCK) // GROUP
        scales += (gl.load(p_scale + group),)
        zeros += (gl.load(p_zero + group),)
    return scales, zeros


@gluon.jit
def _add(result, numbers, rows, scale, zero):
    """Adds a block's product to `result`."""
    dtype: gl.constexpr = rows.dtype
    PRODUCTS: gl.constexpr = result.type.layout
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 8)
    LAYOUT: gl.constexpr = gl.DotOperandLayout(1, PRODUCTS, 8)
    beside: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    low, high = unpack(numbers.load(WEIGHTS), dtype)
    b_zero = (zero.to(gl.float32) + beside).to(dtype)[:, None]
    columns = rows.permute((1, 0))
    product = gl.zeros(result.shape, gl.float32, PRODUCTS)
    product = mma_v2(low - b_zero, columns.slice(0, _HALF).load(LAYOUT), product)
    product = mma_v2(high - b_zero, columns.slice(_HALF, _HALF).load(LAYOUT), product)
    return result + product * scale.to(gl.float32)[:, None]
