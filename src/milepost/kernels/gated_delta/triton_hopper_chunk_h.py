"""The gated delta rule's states from chunk to chunk on Hopper, in Gluon: `triton_chunk_h` for
keys of 128.

A program goes through a sequence's chunks one behind the other, so what counts is how long a chunk
takes from its begin to its end. One warp has TMA bring chunks to shared memory ahead of time; what
is looked up for a chunk is asked for a chunk before.

Legend: T tokens, N chunks, C tokens in a chunk, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.gated_delta.triton_shapes import PrefillShapes
from milepost.kernels.layout.chunks import UNSPECIALISED, ChunkLayout
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.gluon import (
    launch_dependents,
    load_box,
    store_box,
    thread_barrier,
    wait_for_inputs,
)
from milepost.kernels.platform.launches import OVERLAPPED, quick

HOST_BOUND_TOKENS = 4096
"""Up to so many the host often takes as long to launch a layer as the device to compute it, and
descriptors for TMA cost it some 0.1 ms: eight layers of the 35B in FP8 take 11.4 ms, not 10.8.
"""
_COLUMNS = 32
"""Of the state in one program."""
_STAGES = 4, 2
"""Chunks under way; then where programs are so many that two of them share an SM."""
_REGISTERS, _PRODUCER_REGISTERS = 128, 24
_WIDE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_NARROW = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)


def suits(shapes: PrefillShapes, values: Tensor) -> bool:
    """Whether the kernel can do this work and is faster, where `runs_gluon`."""
    is_whole = shapes.key_dim == 128 and shapes.value_dim % _COLUMNS == 0
    return is_whole and is_long(shapes, values)


def is_long(shapes: PrefillShapes, values: Tensor) -> bool:
    """Whether so many tokens are computed that the device's time is what counts, in chunks and a
    type that TMA's tiles are made for."""
    is_tile = shapes.chunk == 64 and values.element_size() == 2
    return is_tile and values.shape[1] > HOST_BOUND_TOKENS


def chunk_fwd_h(
    layout: ChunkLayout,
    shapes: PrefillShapes,
    pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    query_key: Tensor,
    values: Tensor,
    w: Tensor,
    decay: Tensor,
    h: Tensor,
) -> None:
    """See `triton_chunk_h.chunk_fwd_h`."""
    size, key_dim, value_dim = shapes.chunk, shapes.key_dim, shapes.value_dim
    grid = value_dim // _COLUMNS, shapes.value_heads, len(slot_out)
    are_many = math.prod(grid) > probe(values.device).num_sms
    _chunk_fwd_h_kernel[grid](
        values.shape[1],
        layout.sequence_chunk,
        layout.chunk_begin,
        layout.chunk_size,
        layout.chunk_slot,
        slot_in,
        slot_out,
        pool,
        pool.stride(0),
        TensorDescriptor.from_tensor(query_key.view(-1, key_dim), [size, key_dim], _WIDE),
        TensorDescriptor.from_tensor(values.view(-1, value_dim), [size, _COLUMNS], _NARROW),
        TensorDescriptor.from_tensor(w.view(-1, key_dim), [size, key_dim], _WIDE),
        TensorDescriptor.from_tensor(h.view(-1, value_dim), [key_dim, _COLUMNS], _NARROW),
        values,
        decay,
        BY_CHANNEL=decay.dim() == 3,
        KEY_HEADS=shapes.key_heads,
        VALUE_HEADS=shapes.value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        C=size,
        COLUMNS=_COLUMNS,
        STAGES=_STAGES[are_many],
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=_REGISTERS,
        **OVERLAPPED,
    )


@quick
@gluon.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def _chunk_fwd_h_kernel(
    num_tokens,
    sequence_chunk,
    chunk_begin,
    chunk_size,
    chunk_slot,
    slot_in,
    slot_out,
    pool,
    slot_stride,
    key,
    value,
    w,
    h,
    values,
    decay,
    BY_CHANNEL: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    VALUE_HEADS: gl.constexpr,
    KEY_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    C: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """COLUMNS of a value head's state over all chunks of a sequence."""
    dtype: gl.constexpr = w.dtype
    launch_dependents()
    i_n = gl.program_id(2)
    first, last = gl.load(sequence_chunk + i_n), gl.load(sequence_chunk + i_n + 1)
    wide_shape: gl.constexpr = [STAGES, C, KEY_DIM]
    b_w = gl.allocate_shared_memory(dtype, wide_shape, w.layout)
    b_k = gl.allocate_shared_memory(dtype, wide_shape, key.layout)
    b_u = gl.allocate_shared_memory(dtype, [STAGES, C, COLUMNS], value.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for bar in gl.static_range(2 * STAGES):
        mbarrier.init(bars.index(bar), count=1)
    stages = (b_w, b_k, b_u, bars)
    chunks = (first, last, chunk_begin, chunk_size, chunk_slot)
    states = (slot_in, slot_out, pool, slot_stride)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    chunks, states, stages, value, h, values, decay, num_tokens,
                    BY_CHANNEL, VALUE_HEADS, KEY_DIM, VALUE_DIM, C, COLUMNS, STAGES,
                ),
            ),
            (
                _produce,
                (
                    chunks, stages, key, value, w, num_tokens,
                    KEY_HEADS, VALUE_HEADS, KEY_DIM, C, COLUMNS, STAGES,
                ),
            ),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _produce(
    chunks,
    stages,
    key,
    value,
    w,
    num_tokens,
    KEY_HEADS: gl.constexpr,
    VALUE_HEADS: gl.constexpr,
    KEY_DIM: gl.constexpr,
    C: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load every chunk as soon as there is room. What is behind a short one's tokens is others'."""
    first, last, chunk_begin, _, _ = chunks
    b_w, b_k, b_u, bars = stages
    i_w, i_hv = gl.program_id(0), gl.program_id(1)
    key_row = (KEY_HEADS + i_hv // (VALUE_HEADS // KEY_HEADS)) * num_tokens
    BYTES: gl.constexpr = (2 * KEY_DIM + COLUMNS) * C * 2
    wait_for_inputs()
    for number in range(last - first):
        stage = number % STAGES
        begin = gl.load(chunk_begin + first + number)
        mbarrier.wait(bars.index(STAGES + stage), (number // STAGES & 1) ^ 1)
        bar = bars.index(stage)
        mbarrier.expect(bar, BYTES)
        load_box(w, [i_hv * num_tokens + begin, 0], bar, b_w.index(stage))
        load_box(value, [i_hv * num_tokens + begin, i_w * COLUMNS], bar, b_u.index(stage))
        load_box(key, [key_row + begin, 0], bar, b_k.index(stage))


@gluon.jit
def _consume(
    chunks,
    states,
    stages,
    value,
    h,
    values,
    decay,
    num_tokens,
    BY_CHANNEL: gl.constexpr,
    VALUE_HEADS: gl.constexpr,
    KEY_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    C: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    first, last, chunk_begin, chunk_size, chunk_slot = chunks
    slot_in, slot_out, pool, slot_stride = states
    dtype: gl.constexpr = h.dtype
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    i_w, i_hv, i_n = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    o_t = gl.arange(0, C, layout=gl.SliceLayout(1, RESULT))
    o_k = gl.arange(0, KEY_DIM, layout=gl.SliceLayout(1, RESULT))
    o_w = i_w * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, RESULT))
    o_h = (i_hv * KEY_DIM + o_k[:, None]) * VALUE_DIM + o_w[None, :]
    held = gl.allocate_shared_memory(dtype, [2, KEY_DIM, COLUMNS], h.layout)
    added = gl.allocate_shared_memory(dtype, [2, C, COLUMNS], value.layout)
    decayed = gl.allocate_shared_memory(dtype, [C, COLUMNS], value.layout)
    buffers, targets = (held, added, decayed), (h, value, values)
    wait_for_inputs()
    if first < last:
        source = pool + gl.load(slot_in + i_n).to(gl.int64) * slot_stride
        state = gl.load(source + o_h).to(gl.float32)
        row = i_hv * num_tokens
        begin, size = gl.load(chunk_begin + first), gl.load(chunk_size + first)
        slot = gl.load(chunk_slot + first)
        at = (decay, row, o_t, o_k)
        b_g, b_last = _load_decay(at, first, begin, size, BY_CHANNEL, VALUE_HEADS, KEY_DIM)
        following = gl.minimum(first + 1, last - 1)
        next_begin, next_size = gl.load(chunk_begin + following), gl.load(chunk_size + following)
        for i_t in range(first, last):
            number = i_t - first
            behind = gl.minimum(i_t + 1, last - 1)
            next_g, next_last = _load_decay(
                at, behind, next_begin, next_size, BY_CHANNEL, VALUE_HEADS, KEY_DIM
            )
            next_slot = gl.load(chunk_slot + behind)
            after = gl.minimum(i_t + 2, last - 1)
            after_begin, after_size = gl.load(chunk_begin + after), gl.load(chunk_size + after)

            chunk = (i_t, number, begin, size, b_g, b_last)
            state = _pass_chunk(
                state, chunk, stages, buffers, targets, row,
                BY_CHANNEL, VALUE_HEADS, KEY_DIM, VALUE_DIM, C, COLUMNS, STAGES, RESULT,
            )  # fmt: skip
            if slot >= 0:
                exported = pool + slot.to(gl.int64) * slot_stride + o_h
                gl.store(exported, state.to(pool.dtype.element_ty))
            begin, size, slot, b_g, b_last = next_begin, next_size, next_slot, next_g, next_last
            next_begin, next_size = after_begin, after_size
        # The slot that the state came from may be the same.
        thread_barrier()
        target = pool + gl.load(slot_out + i_n).to(gl.int64) * slot_stride
        gl.store(target + o_h, state.to(pool.dtype.element_ty))
        tma.store_wait(0)


@gluon.jit
def _load_decay(
    at,
    i_t,
    begin,
    size,
    BY_CHANNEL: gl.constexpr,
    VALUE_HEADS: gl.constexpr,
    KEY_DIM: gl.constexpr,
):
    """Of a chunk's tokens and of its last: sums of log decays; or of channels, twice: decays."""
    decay, row, o_t, o_k = at
    if BY_CHANNEL:
        b_g = gl.load(decay + (i_t * VALUE_HEADS + gl.program_id(1)) * KEY_DIM + o_k)
        b_last = b_g
    else:
        b_g = gl.load(decay + row + begin + gl.minimum(o_t, size - 1))
        b_last = gl.load(decay + row + begin + size - 1)
    return b_g, b_last


@gluon.jit
def _pass_chunk(
    state,
    chunk,
    stages,
    buffers,
    targets,
    row,
    BY_CHANNEL: gl.constexpr,
    VALUE_HEADS: gl.constexpr,
    KEY_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    C: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    RESULT: gl.constexpr,
):
    """The state behind a chunk; the one before it, and what its tokens add, are written."""
    i_t, number, begin, size, b_g, b_last = chunk
    b_w, b_k, b_u, bars = stages
    held, added, decayed = buffers
    h, value, values = targets
    dtype: gl.constexpr = h.dtype
    i_w, i_hv, stage = gl.program_id(0), gl.program_id(1), number % STAGES
    b_h, b_v = held.index(number % 2), added.index(number % 2)
    b_h.store(state.to(dtype))
    fence_async_shared()
    thread_barrier()
    store_box(h, [(i_t * VALUE_HEADS + i_hv) * KEY_DIM, i_w * COLUMNS], b_h)
    mbarrier.wait(bars.index(stage), number // STAGES & 1)
    nothing = gl.zeros([C, COLUMNS], gl.float32, layout=RESULT)
    read = warpgroup_mma(b_w.index(stage), b_h, nothing, use_acc=False, is_async=True)
    u = b_u.index(stage).load(RESULT).to(gl.float32)
    read = warpgroup_mma_wait(0, [read])
    o_t = gl.arange(0, C, layout=gl.SliceLayout(1, RESULT))
    in_chunk = (o_t < size)[:, None]
    v = gl.where(in_chunk, u - read, 0.0)
    b_v.store(v.to(dtype))
    b_vg = b_v
    if BY_CHANNEL:
        decayed_state = state * b_g[:, None]
    else:
        b_vg = decayed
        b_vg.store((v * gl.exp(b_last - b_g)[:, None]).to(dtype))
        decayed_state = state * gl.exp(b_last)
    if size < C:
        _clear(b_k.index(stage), size, C)
        o_w = i_w * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, RESULT))
        o_v = (row + begin + o_t).to(gl.int64)[:, None] * VALUE_DIM + o_w[None, :]
        gl.store(values + o_v, v.to(dtype), mask=in_chunk)
    fence_async_shared()
    # What was stored from the buffers of the chunk before has been read: they are next.
    tma.store_wait(1)
    thread_barrier()
    if size == C:
        store_box(value, [row + begin, i_w * COLUMNS], b_v)
    right = b_k.index(stage).permute((1, 0))
    state = warpgroup_mma(right, b_vg, decayed_state, is_async=True)
    state = warpgroup_mma_wait(0, [state])
    mbarrier.arrive(bars.index(STAGES + stage), count=1)
    return state


@gluon.jit
def _clear(b_k, size, C: gl.constexpr):
    """Put zeros where a short chunk has no keys: what lies there may be no numbers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    keys = b_k.load(LAYOUT)
    b_k.store(gl.where((row < size)[:, None], keys, 0.0).to(keys.dtype))
