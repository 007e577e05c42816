"""How Hopper multiplies four-bit weights with some rows, in Gluon.

Taking nibbles apart is what they cost. So weights come to shared memory as they are, by
asynchronous copies that are several steps ahead, and every thread reads just the bytes that it
multiplies, 8 side by side, and unpacks them where they are multiplied. Weights are the left
operand. A block's product is made of whole numbers, less their zero point, then scaled and added
up in float32.

Legend: N outputs, M rows, K inputs of a step.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from milepost.kernels.platform.gluon import thread_barrier
from milepost.kernels.products.forms.quantised import BLOCK
from milepost.kernels.products.hopper.gemv_parts import unpack


def can_copy(rows: Tensor) -> bool:
    """Whether rows [M, K] of 16-bit numbers lie so that 16 bytes of them are copied at a time, as
    far as Triton can tell: it knows of a stride whether 16 divides it."""
    return rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0


_BLOCK, _HALF = gl.constexpr(BLOCK), gl.constexpr(BLOCK // 2)


@gluon.constexpr_function
def products_layout(num_warps):
    """A warp has 16 outputs of so many times 16, and all rows."""
    return gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])


@gluon.constexpr_function
def weights_layout(num_warps):
    return gl.DotOperandLayout(0, products_layout(num_warps), 8)


@gluon.constexpr_function
def copies_layout(width, size, num_warps):
    """Of rows of so many bytes on their way to shared memory, 16 bytes a thread, in numbers of
    `size` bytes."""
    across = width // 16
    return gl.BlockedLayout([1, 16 // size], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def _kept_weights(width):
    """Four threads read 32 bytes of a row, and four rows at a time."""
    per_phase = 128 // width
    return gl.SwizzledSharedLayout(32, per_phase, 4 // per_phase, [1, 0])


@gluon.constexpr_function
def weights_copied(blocks, num_warps):
    """As `copies_layout`, of steps of so many blocks."""
    return copies_layout(blocks * BLOCK // 2, 1, num_warps)


@gluon.constexpr_function
def rows_copied(blocks, num_warps):
    return copies_layout(min(blocks * BLOCK * 2, 512), 2, num_warps)


@gluon.jit
def begin(p_w, first, BLOCKS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for steps of weights, of which the first are on their way: at `p_w` [N], from
    input `first` on. BLOCKS of inputs are a step."""
    WIDTH: gl.constexpr = BLOCKS * _HALF
    shape: gl.constexpr = [STAGES, p_w.shape[0], WIDTH]
    weights = gl.allocate_shared_memory(gl.uint8, shape, _kept_weights(WIDTH))
    for stage in gl.static_range(STAGES - 1):
        if stage < STEPS:
            _copy(weights.index(stage), p_w, first // 2 + stage * WIDTH)
    return weights


@gluon.jit
def _copy(kept, p_rows, start):
    """A step of rows at `p_rows` to shared memory."""
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
    """Products [N, M] of the inputs from `first` on, BLOCKS for each of STEPS: of rows at `p_x` [M]
    and weights at `p_w` [N] (see `begin`), whose scales are at `p_scale` and `p_zero` [N]."""
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
    """Of a step's blocks."""
    scales, zeros = (), ()
    for b in gl.static_range(BLOCKS):
        group = (first + b * _BLOCK) // GROUP
        scales += (gl.load(p_scale + group),)
        zeros += (gl.load(p_zero + group),)
    return scales, zeros


@gluon.jit
def _add(result, numbers, rows, scale, zero):
    """`result` and a block's product."""
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
