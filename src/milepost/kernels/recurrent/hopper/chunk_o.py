"""Outputs of the gated delta rule on Hopper, in Gluon: `portable.chunk_o` for heads of 128.

TMA brings a chunk's tiles to shared memory all at once, so a thread needs registers for results
alone, and two programs that share an SM take turns at loading and multiplying.

Legend: T tokens, N chunks, C tokens in a chunk, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.layout.emit import Fp8Rows
from milepost.kernels.platform.gluon import load_box, round_block, thread_barrier
from milepost.kernels.platform.launches import OVERLAPPED, quick, wait_for_inputs
from milepost.kernels.platform.numerics import silu
from milepost.kernels.platform.tensors import LEAST_SCALE
from milepost.kernels.recurrent.hopper.chunk_h import clear_rows
from milepost.kernels.recurrent.structures import ChunkTensors, Mixer, PrefillChunks, RoundedOutput

_LEAST_SCALE = gl.constexpr(LEAST_SCALE)
_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class Operands(NamedTuple):
    """A chunk's tiles in shared memory."""

    q: Any
    k: Any
    v: Any
    h: Any
    bars: Any
    """That the state and queries, the keys, the values are there."""


def run(
    mixer: Mixer,
    chunk: int,
    chunks: PrefillChunks,
    tensors: ChunkTensors,
    output: Tensor,
    fp8: Fp8Rows | None,
) -> None:
    """See `portable.chunk_o.run`; outputs go to `fp8` alone if there is that."""
    sizes, size, rounded, scales_stride = mixer.sizes, mixer.sizes.own, None, 0
    if fp8 is not None:
        rounded, scales_stride = RoundedOutput(fp8.values, fp8.scales), fp8.scales.stride(0)
    boxes = (
        TensorDescriptor.from_tensor(tensor.view(-1, size), [num_rows, size], _TILE)
        for tensor, num_rows in ((tensors.query_key, chunk), (tensors.v, chunk), (tensors.h, size))
    )
    operands = len(output), mixer.inputs.gate, mixer.weights, chunks, *boxes, tensors.decay
    outputs = output, rounded, scales_stride
    options = {"num_warps": 4, **OVERLAPPED}
    grid = sizes.heads, len(chunks.size)
    _chunk_fwd_o_kernel[grid](*operands, *outputs, SIZES=sizes, C=chunk, **options)


class Target(NamedTuple):
    """Where a chunk's outputs go."""

    output: Any
    rounded: Any
    scales_stride: Any
    begin: Any
    """The first token."""
    num_tokens: Any


@quick
@gluon.jit(
    do_not_specialize=["num_tokens", "scales_stride"], do_not_specialize_on_alignment=["chunks"]
)
def _chunk_fwd_o_kernel(
    num_tokens,
    gate,
    weights,
    chunks,
    query_key,
    values,
    h,
    g_cumsum,
    output,
    rounded,
    scales_stride,
    SIZES: gl.constexpr,
    C: gl.constexpr,
):
    """One value head of a chunk, into `output` [T, V * W] or to float8; zeros for tokens of no
    sequence."""
    # Of rows in global memory.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    SIZE: gl.constexpr = SIZES.own
    i_hv, i_t = gl.program_id(0), gl.program_id(1)
    size = gl.load(chunks.size + i_t)
    wait_for_inputs()
    if size != 0:
        begin = gl.load(chunks.begin + i_t)
        o_t = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))
        o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, ROWS))
        in_chunk = (o_t < gl.maximum(size, -size))[:, None]
        row = (begin + o_t).to(gl.int64)[:, None]
        dtype: gl.constexpr = output.dtype.element_ty
        outputs = output, rounded, scales_stride, begin
        if size < 0:
            _store_zeros(Target(*outputs, -size), SIZES, C)
        else:
            tiles = _load_tiles(query_key, values, h, num_tokens, begin, SIZES, C)
            p_gate = gate.base + row * gate.stride + i_hv * SIZE + o_v[None, :]
            b_gate = gl.load(p_gate, in_chunk, 0)
            p_g = g_cumsum + i_hv * num_tokens + begin
            b_o = _read(tiles, p_g, size, C, SIZE)
            RESULT: gl.constexpr = b_o.type.layout
            # As `rules.gated_delta.finish`, which is written for Triton's layouts.
            o_w = gl.arange(0, SIZE, layout=gl.SliceLayout(0, RESULT))
            scale = gl.rsqrt(gl.sum(b_o * b_o, 1) / SIZE + weights.norm_eps)
            b_o = b_o * scale[:, None] * gl.load(weights.norm + o_w)[None, :]
            b_o *= silu(gl.convert_layout(b_gate, RESULT).to(gl.float32))
            _store(Target(*outputs, size), b_o.to(dtype), SIZES, C)


@gluon.jit
def _store(target, b_o, SIZES: gl.constexpr, C: gl.constexpr):
    """A head's outputs as they are; or rounded to float8, with a scale for each token."""
    if target.rounded is None:
        _store_rows(target.output, target, b_o, SIZES, 8)
    else:
        values, scale = round_block(b_o.to(gl.float32), 1)
        _store_scales(target, scale, C)
        _store_rows(target.rounded.base, target, values, SIZES, 16)


@gluon.jit
def _store_zeros(target, SIZES: gl.constexpr, C: gl.constexpr):
    """Store zeros as `_store` would. Constants are not converted: CUDA 12.8's ptxas turns a zero
    that it knows into float8 with another register's bits."""
    SIZE: gl.constexpr = SIZES.own
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    if target.rounded is None:
        zeros = gl.zeros([C, SIZE], target.output.dtype.element_ty, layout=LAYOUT)
        _store_rows(target.output, target, zeros, SIZES, 8)
    else:
        zeros = gl.zeros([C, SIZE], gl.uint8, layout=LAYOUT).to(gl.float8e4nv, bitcast=True)
        _store_rows(target.rounded.base, target, zeros, SIZES, 16)
        least = gl.full([C], _LEAST_SCALE, gl.float32, layout=gl.SliceLayout(1, LAYOUT))
        _store_scales(target, least, C)


@gluon.jit
def _store_scales(target, scale, C: gl.constexpr):
    o_t = gl.arange(0, C, layout=scale.type.layout)
    p_scale = target.rounded.scales + gl.program_id(0) * target.scales_stride + target.begin + o_t
    gl.store(p_scale, scale, o_t < target.num_tokens)


@gluon.jit
def _store_rows(base, target, b_o, SIZES: gl.constexpr, WIDTH: gl.constexpr):
    """[C, W], so that a thread writes 16 bytes, WIDTH numbers."""
    C: gl.constexpr = b_o.shape[0]
    SIZE: gl.constexpr = b_o.shape[1]
    ACROSS: gl.constexpr = SIZE // WIDTH
    ROWS: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    o_t = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, ROWS))
    row = (target.begin + o_t).to(gl.int64)[:, None]
    place = row * SIZES.width + gl.program_id(0) * SIZE + o_v[None, :]
    gl.store(base + place, gl.convert_layout(b_o, ROWS), (o_t < target.num_tokens)[:, None])


@gluon.jit
def _load_tiles(query_key, values, h, num_tokens, begin, SIZES: gl.constexpr, C: gl.constexpr):
    """Have TMA bring what the chunk's products are made of, and say by a barrier each when the
    state, then the keys, then the values are there."""
    SIZE: gl.constexpr = SIZES.own
    i_hv, i_t = gl.program_id(0), gl.program_id(1)
    dtype: gl.constexpr = h.dtype
    b_q = gl.allocate_shared_memory(dtype, [C, SIZE], query_key.layout)
    b_k = gl.allocate_shared_memory(dtype, [C, SIZE], query_key.layout)
    b_v = gl.allocate_shared_memory(dtype, [C, SIZE], values.layout)
    b_h = gl.allocate_shared_memory(dtype, [SIZE, SIZE], h.layout)
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(3):
        mbarrier.init(bars.index(bar), count=1)
    fence_async_shared()
    thread_barrier()
    row = i_hv // SIZES.group * num_tokens + begin
    BYTES: gl.constexpr = C * SIZE * 2
    mbarrier.expect(bars.index(0), BYTES + SIZE * SIZE * 2)
    load_box(query_key, [row, 0], bars.index(0), b_q)
    load_box(h, [(i_t * SIZES.heads + i_hv) * SIZE, 0], bars.index(0), b_h)
    mbarrier.expect(bars.index(1), BYTES)
    load_box(query_key, [SIZES.units * num_tokens + row, 0], bars.index(1), b_k)
    mbarrier.expect(bars.index(2), BYTES)
    load_box(values, [i_hv * num_tokens + begin, 0], bars.index(2), b_v)
    return Operands(b_q, b_k, b_v, b_h, bars)


@gluon.jit
def _read(tiles, p_g, size, C: gl.constexpr, SIZE: gl.constexpr):
    """Returns [C, W], float32: what queries read from the state before the chunk and from its
    tokens."""
    b_q, b_k, b_v, b_h, bars = tiles
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    o_i = gl.arange(0, C, layout=gl.SliceLayout(1, SCORES))
    o_j = gl.arange(0, C, layout=gl.SliceLayout(0, SCORES))
    o_r = gl.arange(0, C, layout=gl.SliceLayout(1, RESULT))
    # Past the end what is there belongs to others, and is no number sometimes.
    g_i, g_j = gl.load(p_g + o_i, o_i < size, 0), gl.load(p_g + o_j, o_j < size, 0)
    g_r = gl.load(p_g + o_r, o_r < size, 0)
    mbarrier.wait(bars.index(0), 0)
    b_o = gl.zeros([C, SIZE], gl.float32, layout=RESULT)
    b_o = warpgroup_mma(b_q, b_h, b_o, use_acc=False, is_async=True)
    mbarrier.wait(bars.index(1), 0)
    b_a = gl.zeros([C, C], gl.float32, layout=SCORES)
    b_a = warpgroup_mma(b_q, b_k.permute((1, 0)), b_a, use_acc=False, is_async=True)
    b_o = warpgroup_mma_wait(1, [b_o])
    b_o *= gl.exp(g_r)[:, None]
    mbarrier.wait(bars.index(2), 0)
    if size < C:
        clear_rows(b_v, size, C)
        fence_async_shared()
        thread_barrier()
    is_later = o_i[:, None] >= o_j[None, :]
    decay = gl.exp(gl.where(is_later, g_i[:, None] - g_j[None, :], 0.0))
    b_a = warpgroup_mma_wait(0, [b_a])
    b_a = gl.where(is_later, b_a * decay, 0.0).to(b_v.dtype)
    b_o = warpgroup_mma(gl.convert_layout(b_a, FACTOR), b_v, b_o, is_async=True)
    return warpgroup_mma_wait(0, [b_o])
