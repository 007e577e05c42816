"""The delta rule's states from chunk to chunk on Hopper, in Gluon: `portable.chunk_h` for keys of
128.

A program goes through a sequence's chunks one after the other, so the latency of a chunk decides.
One warp has TMA bring chunks to shared memory ahead of time; a chunk's begin, size, decays and
export slot are loaded one chunk ahead.

Legend: T tokens, N chunks, C tokens in a chunk, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from milepost.kernels.platform.device import probe
from milepost.kernels.platform.gluon import (
    boxes_of,
    load_box,
    open_bars,
    release,
    store_box,
    thread_barrier,
    wait_free,
    wait_loaded,
)
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.recurrent.mixer import MixerSizes
from milepost.kernels.recurrent.structures import (
    ChunkTensors,
    Mixer,
    PrefillChunks,
    SlotStates,
)

_COLUMNS = 32
"""State columns of a program."""
_STAGES = 4, 2
"""Chunks in flight if a program has an SM to itself, and if two share one."""
_REGISTERS, _PRODUCER_REGISTERS = 128, gl.constexpr(24)


class ChunksUnderWay(NamedTuple):
    """Shared memory for chunks in flight, and barriers: chunk loaded, place free."""

    w: Any
    k: Any
    u: Any
    bars: Any


class Buffers(NamedTuple):
    """Shared memory for a program's results, which are also operands of its products."""

    held: Any
    """[2, K, COLUMNS], states before chunks."""
    added: Any
    """[2, C, COLUMNS], what tokens add."""
    decayed: Any
    """[C, COLUMNS], the same decayed to the chunk's end."""


class ChunkPlace(NamedTuple):
    """A chunk, its number in its sequence, its tokens, and their decays."""

    index: Any
    number: Any
    begin: Any
    size: Any
    g: Any
    g_last: Any


class ChunkOutputs(NamedTuple):
    """Destinations of results: TMA descriptors, and a pointer for values of short chunks."""

    h: Any
    value: Any
    v: Any


def run(
    mixer: Mixer, chunk: int, pool: SlotStates, chunks: PrefillChunks, tensors: ChunkTensors
) -> None:
    """See `portable.chunk_h.run`."""
    sizes = mixer.sizes
    grid = sizes.own // _COLUMNS, sizes.heads, len(chunks.slot_out)
    are_many = math.prod(grid) > probe(tensors.v.device).num_sms

    boxes = (
        boxes_of(tensors.query_key, chunk, sizes.shared),
        boxes_of(tensors.v, chunk, _COLUMNS),
        boxes_of(tensors.w, chunk, sizes.shared),
        boxes_of(tensors.h, sizes.shared, _COLUMNS),
    )
    operands = tensors.v.shape[1], chunks, pool, *boxes, tensors.v, tensors.decay
    form = StateForm(sizes, chunk, _COLUMNS, _STAGES[are_many])
    options = {"num_warps": 4, "maxnreg": _REGISTERS, **OVERLAPPED}
    _chunk_fwd_h_kernel[grid](*operands, FORM=form, **options)


class StateForm(NamedTuple):
    """Constants of the kernel."""

    sizes: MixerSizes
    chunk: int
    columns: int
    stages: int


@quick
@gluon.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["chunks"])
def _chunk_fwd_h_kernel(
    num_tokens, chunks, pool, key, value, w, h, values, decay, FORM: gl.constexpr
):
    """Takes some columns of a value head's state through all chunks of a sequence."""
    dtype: gl.constexpr = w.dtype
    C: gl.constexpr = FORM.chunk
    STAGES: gl.constexpr = FORM.stages
    COLUMNS: gl.constexpr = FORM.columns
    launch_dependents()
    i_n = gl.program_id(2)
    span = gl.load(chunks.first + i_n), gl.load(chunks.first + i_n + 1)
    wide_shape: gl.constexpr = [STAGES, C, FORM.sizes.shared]
    b_w = gl.allocate_shared_memory(dtype, wide_shape, w.layout)
    b_k = gl.allocate_shared_memory(dtype, wide_shape, key.layout)
    b_u = gl.allocate_shared_memory(dtype, [STAGES, C, COLUMNS], value.layout)
    places = ChunksUnderWay(b_w, b_k, b_u, open_bars(STAGES, 1, 1))
    outputs = ChunkOutputs(h, value, values)
    gl.warp_specialize(
        [
            (_consume, (span, chunks, pool, places, outputs, decay, num_tokens, FORM)),
            (_produce, (span, chunks, places, key, value, w, num_tokens, FORM)),
        ],
        [1],
        [_PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(span, chunks, places, key, value, w, num_tokens, FORM: gl.constexpr):
    """Loads every chunk as soon as there is room. Boxes have a fixed size, so short chunks come
    with the rows after them."""
    SIZES: gl.constexpr = FORM.sizes
    BYTES: gl.constexpr = (2 * SIZES.shared + FORM.columns) * FORM.chunk * 2
    first, last = span
    i_w, i_hv = gl.program_id(0), gl.program_id(1)
    key_row = (SIZES.units + i_hv // SIZES.group) * num_tokens
    wait_for_inputs()
    for number in range(last - first):
        begin = gl.load(chunks.begin + first + number)
        stage = wait_free(places.bars, number)
        bar = places.bars.index(stage)
        mbarrier.expect(bar, BYTES)
        load_box(w, [i_hv * num_tokens + begin, 0], bar, places.w.index(stage))
        load_box(value, [i_hv * num_tokens + begin, i_w * FORM.columns], bar, places.u.index(stage))
        load_box(key, [key_row + begin, 0], bar, places.k.index(stage))


@gluon.jit
def _consume(span, chunks, pool, places, outputs, decay, num_tokens, FORM: gl.constexpr):
    """Takes the state through every chunk."""
    first, last = span
    dtype: gl.constexpr = outputs.h.dtype
    SIZES: gl.constexpr = FORM.sizes
    C: gl.constexpr = FORM.chunk
    COLUMNS: gl.constexpr = FORM.columns
    KEY_DIM: gl.constexpr = SIZES.shared
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    i_w, i_hv, i_n = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    o_k = gl.arange(0, KEY_DIM, layout=gl.SliceLayout(1, RESULT))
    o_w = i_w * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, RESULT))
    o_h = (i_hv * KEY_DIM + o_k[:, None]) * SIZES.own + o_w[None, :]
    held = gl.allocate_shared_memory(dtype, [2, KEY_DIM, COLUMNS], outputs.h.layout)
    added = gl.allocate_shared_memory(dtype, [2, C, COLUMNS], outputs.value.layout)
    decayed = gl.allocate_shared_memory(dtype, [C, COLUMNS], outputs.value.layout)
    buffers = Buffers(held, added, decayed)
    wait_for_inputs()
    if first < last:
        source = pool.base + gl.load(chunks.slot_in + i_n).to(gl.int64) * pool.stride
        state = gl.load(source + o_h).to(gl.float32)
        row = i_hv * num_tokens
        begin, size = gl.load(chunks.begin + first), gl.load(chunks.size + first)
        slot = gl.load(chunks.export + first)
        b_g, b_last = _load_decay(decay, row, first, begin, size, RESULT, FORM)
        following = gl.minimum(first + 1, last - 1)
        next_begin, next_size = gl.load(chunks.begin + following), gl.load(chunks.size + following)
        for i_t in range(first, last):
            after = gl.minimum(i_t + 1, last - 1)
            next_g, next_last = _load_decay(decay, row, after, next_begin, next_size, RESULT, FORM)
            next_slot = gl.load(chunks.export + after)
            later = gl.minimum(i_t + 2, last - 1)
            later_begin, later_size = gl.load(chunks.begin + later), gl.load(chunks.size + later)

            chunk = ChunkPlace(i_t, i_t - first, begin, size, b_g, b_last)
            state = _pass_chunk(state, chunk, places, buffers, outputs, row, RESULT, FORM)
            if slot >= 0:
                exported = pool.base + slot.to(gl.int64) * pool.stride + o_h
                gl.store(exported, state.to(pool.base.dtype.element_ty))
            begin, size, slot, b_g, b_last = next_begin, next_size, next_slot, next_g, next_last
            next_begin, next_size = later_begin, later_size
        # The slot that the state came from may be the same.
        thread_barrier()
        target = pool.base + gl.load(chunks.slot_out + i_n).to(gl.int64) * pool.stride
        gl.store(target + o_h, state.to(pool.base.dtype.element_ty))
        tma.store_wait(0)


@gluon.jit
def _load_decay(decay, row, i_t, begin, size, RESULT: gl.constexpr, FORM: gl.constexpr):
    """Returns the log decays [C] of a chunk's tokens, summed from its begin, and that of the last
    token; by channel the chunk's decays [K], twice."""
    SIZES: gl.constexpr = FORM.sizes
    if SIZES.by_channel:
        o_k = gl.arange(0, SIZES.shared, layout=gl.SliceLayout(1, RESULT))
        b_g = gl.load(decay + (i_t * SIZES.heads + gl.program_id(1)) * SIZES.shared + o_k)
        b_last = b_g
    else:
        o_t = gl.arange(0, FORM.chunk, layout=gl.SliceLayout(1, RESULT))
        b_g = gl.load(decay + row + begin + gl.minimum(o_t, size - 1))
        b_last = gl.load(decay + row + begin + size - 1)
    return b_g, b_last


@gluon.jit
def _pass_chunk(
    state, chunk, places, buffers, outputs, row, RESULT: gl.constexpr, FORM: gl.constexpr
):
    """Returns the state after a chunk. Stores the state before it, and what its tokens add."""
    dtype: gl.constexpr = outputs.h.dtype
    SIZES: gl.constexpr = FORM.sizes
    C: gl.constexpr = FORM.chunk
    COLUMNS: gl.constexpr = FORM.columns
    i_w, i_hv, stage = gl.program_id(0), gl.program_id(1), chunk.number % FORM.stages
    b_h, b_v = buffers.held.index(chunk.number % 2), buffers.added.index(chunk.number % 2)
    b_h.store(state.to(dtype))
    fence_async_shared()
    thread_barrier()
    store_box(outputs.h, [(chunk.index * SIZES.heads + i_hv) * SIZES.shared, i_w * COLUMNS], b_h)
    wait_loaded(places.bars, chunk.number)
    nothing = gl.zeros([C, COLUMNS], gl.float32, layout=RESULT)
    read = warpgroup_mma(places.w.index(stage), b_h, nothing, use_acc=False, is_async=True)
    u = places.u.index(stage).load(RESULT).to(gl.float32)
    read = warpgroup_mma_wait(0, [read])
    o_t = gl.arange(0, C, layout=gl.SliceLayout(1, RESULT))
    in_chunk = (o_t < chunk.size)[:, None]
    v = gl.where(in_chunk, u - read, 0.0)
    b_v.store(v.to(dtype))
    b_vg = b_v
    if SIZES.by_channel:
        decayed_state = state * chunk.g[:, None]
    else:
        b_vg = buffers.decayed
        b_vg.store((v * gl.exp(chunk.g_last - chunk.g)[:, None]).to(dtype))
        decayed_state = state * gl.exp(chunk.g_last)
    if chunk.size < C:
        clear_rows(places.k.index(stage), chunk.size, C)
        o_w = i_w * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, RESULT))
        o_v = (row + chunk.begin + o_t).to(gl.int64)[:, None] * SIZES.own + o_w[None, :]
        gl.store(outputs.v + o_v, v.to(dtype), mask=in_chunk)
    fence_async_shared()
    # Stores from the buffers of the chunk before are complete: those buffers are next.
    tma.store_wait(1)
    thread_barrier()
    if chunk.size == C:
        store_box(outputs.value, [row + chunk.begin, i_w * COLUMNS], b_v)
    right = places.k.index(stage).permute((1, 0))
    state = warpgroup_mma(right, b_vg, decayed_state, is_async=True)
    state = warpgroup_mma_wait(0, [state])
    release(places.bars, stage)
    return state


@gluon.jit
def clear_rows(tile, size, C: gl.constexpr):
    """Zeroes the rows after a short chunk's tokens, which may be NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, C, layout=gl.SliceLayout(1, LAYOUT))
    rows = tile.load(LAYOUT)
    tile.store(gl.where((row < size)[:, None], rows, 0.0).to(rows.dtype))
