"""`triton_verify` on Hopper in one launch, in Gluon.

As `triton_hopper`: programs go through sequences and key heads, and while one works on a value
head's state, TMA brings the next. A key head's queries and keys are worked out once, for all tokens
and all its value heads, and wait in shared memory. A value head's state then goes through all
tokens in registers; the inputs of the next token are asked for before a token is taken in. What
happens with a token is what `triton_hopper` does, in its order: states are the same bit for bit.

Legend: S sequences, F folded and N new tokens of each, C channels, J taps, G key heads, V value
heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from milepost.kernels.device import num_sms
from milepost.kernels.gated_delta.layout import VerifyLayout
from milepost.kernels.gated_delta.triton_hopper import (
    STATE_SIZE,
    convolve,
    describe_states,
    fetch,
)
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.gluon import thread_barrier
from milepost.kernels.overlap import OVERLAPPED
from milepost.kernels.overlap_gluon import let_next_start, wait_for_inputs

_UNSPECIALISED = ["begin", "length", "fold", "row", "slot_in", "slot_out"]


def verify(
    projected: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    layout: VerifyLayout,
    records: Tensor,
    output: Tensor,
) -> None:
    """See `triton_verify.verify`."""
    value_heads = recurrent_pool.shape[1]
    channels, conv_width = weights.conv.shape
    key_heads = (channels - value_heads * STATE_SIZE) // (2 * STATE_SIZE)
    num_units = len(layout.slot_out) * key_heads
    units_at_once = num_sms(projected.device)
    _verify_kernel[(min(num_units, 2 * units_at_once),)](
        projected,
        projected.stride(0),
        records,
        records.stride(0),
        records.stride(1),
        weights.conv,
        conv_pool,
        conv_pool.stride(0),
        weights.decay_rate,
        weights.decay_bias,
        weights.norm,
        weights.norm_eps,
        describe_states(recurrent_pool),
        recurrent_pool,
        recurrent_pool.stride(0),
        layout.begin,
        layout.length,
        layout.fold,
        layout.row,
        layout.slot_in,
        layout.slot_out,
        output,
        num_units,
        KEY_HEADS=key_heads,
        GROUP=value_heads // key_heads,
        SIZE=STATE_SIZE,
        TAPS=conv_width,
        BLOCK_TAPS=triton.next_power_of_2(conv_width),
        PLACES=2 * records.shape[1] + 1,
        STAGES=2 if num_units <= units_at_once else 1,
        num_warps=4,
        **OVERLAPPED,
    )


@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=_UNSPECIALISED)
def _verify_kernel(
    projected,
    projected_stride,
    records,
    row_stride,
    record_stride,
    conv_weight,
    conv_pool,
    conv_stride,
    decay_rate,
    decay_bias,
    norm_weight,
    norm_eps,
    states,
    pool,
    slot_stride,
    begin,
    length,
    fold,
    row,
    slot_in,
    slot_out,
    output,
    num_units,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    BLOCK_TAPS: gl.constexpr,
    PLACES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Every so many units, each the value heads of a key head of a sequence. Layouts are those of
    `triton_hopper`."""
    STATE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 4], [1, 0])
    LINE: gl.constexpr = states.block_type.shape[1]
    LINES: gl.constexpr = SIZE * SIZE // LINE
    BY_LINE: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [16, 0], [32, 0], [64, 0], [128, 0], [256, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [4, 0], [8, 0]],
        warp_bases=[[1, 0], [2, 0]],
        block_bases=[],
        shape=[LINES, LINE],
    )
    WINDOW: gl.constexpr = gl.BlockedLayout([1, BLOCK_TAPS], [32, 1], [4, 1], [1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    VALUE_HEADS: gl.constexpr = KEY_HEADS * GROUP
    CHANNELS: gl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    places = gl.allocate_shared_memory(gl.float32, [STAGES, LINES, LINE], states.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    queries = gl.allocate_shared_memory(gl.float32, [PLACES, SIZE], VECTOR)
    keys = gl.allocate_shared_memory(gl.float32, [PLACES, SIZE], VECTOR)
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=1)
    first, stride = gl.program_id(0), gl.num_programs(0)
    num_states = GROUP * ((num_units - first + stride - 1) // stride)
    work = states, slot_stride // LINE, slot_in, slot_out, first, stride, num_states, places, loaded
    for ahead in gl.static_range(STAGES):
        fetch(work, ahead, KEY_HEADS, GROUP, SIZE, STAGES)

    o_k = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    o_v = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    scale = gl.load(norm_weight + o_v)
    wait_for_inputs()
    let_next_start()  # the output projection, which begins with its weights
    number = 0
    for unit in range(first, num_units, stride):
        sequence, key_head = unit // KEY_HEADS, unit % KEY_HEADS
        target = gl.load(slot_out + sequence)
        num_folded, num_new = gl.load(fold + sequence), gl.load(length + sequence)
        first_token = gl.load(begin + sequence).to(gl.int64)
        token = projected + first_token * projected_stride
        recorded = records + gl.load(row + sequence).to(gl.int64) * row_stride
        read = conv_pool + gl.load(slot_in + sequence).to(gl.int64) * conv_stride
        kept = conv_pool + target.to(gl.int64) * conv_stride
        written = pool + target.to(gl.int64) * slot_stride
        is_real, num_places = target >= 0, num_folded + num_new
        last = num_folded + gl.minimum(num_new, 1) - 1
        # Behind the step's last token there may be nobody's memory: a step may have none at all.
        stream = token, projected_stride, recorded, record_stride, read, num_folded, num_places

        query_taps = _load_taps(conv_weight, key_head, SIZE, TAPS, WINDOW)
        key_taps = _load_taps(conv_weight, KEY_HEADS + key_head, SIZE, TAPS, WINDOW)
        query_window = _load_window(stream, key_head, 0, SIZE, TAPS, WINDOW)
        key_window = _load_window(stream, KEY_HEADS + key_head, 0, SIZE, TAPS, WINDOW)
        for place in range(num_places):
            query, key = convolve((query_window, query_taps)), convolve((key_window, key_taps))
            following = gl.minimum(place + 1, num_places - 1)
            query_window = _load_window(stream, key_head, following, SIZE, TAPS, WINDOW)
            key_window = _load_window(stream, KEY_HEADS + key_head, following, SIZE, TAPS, WINDOW)
            query *= gl.rsqrt(gl.sum(query * query, 0) + 1e-6) * SIZE**-0.5
            key *= gl.rsqrt(gl.sum(key * key, 0) + 1e-6)
            queries.index(place).store(query)
            keys.index(place).store(key)
        thread_barrier()
        for part in gl.static_range(2):
            head = part * KEY_HEADS + key_head
            _keep(stream, kept, head, last, num_new, is_real, SIZE, TAPS, WINDOW)

        for member in gl.static_range(GROUP):
            head = key_head * GROUP + member
            value_head = 2 * KEY_HEADS + head
            value_taps = _load_taps(conv_weight, value_head, SIZE, TAPS, WINDOW)
            rate, bias = gl.load(decay_rate + head), gl.load(decay_bias + head)
            gates = token + CHANNELS + VALUE_HEADS * SIZE + head
            kept_gates = recorded + CHANNELS + head
            gate_at = token + CHANNELS + head * SIZE + o_v
            output_at = output + (first_token * VALUE_HEADS + head) * SIZE + o_v
            # Everything is asked for before anything is used.
            window = _load_window(stream, value_head, 0, SIZE, TAPS, WINDOW)
            b_in, a_in = _load_strengths(stream, gates, kept_gates, 0, VALUE_HEADS)

            mbarrier.wait(loaded.index(number % STAGES), number // STAGES & 1)
            state = places.index(number % STAGES).load(BY_LINE).reshape([SIZE, SIZE])
            state = gl.convert_layout(state, STATE, assert_trivial=True)
            # All threads have the state: its place is free.
            thread_barrier()
            fetch(work, number + STAGES, KEY_HEADS, GROUP, SIZE, STAGES)
            number += 1
            for place in range(num_places):
                new, is_new = place - num_folded, place >= num_folded
                gate = gl.load(gate_at + new * projected_stride, mask=is_new, other=0.0)
                beta = 1 / (1 + gl.exp(-b_in.to(gl.float32)))
                wide = a_in.to(gl.float32) + bias
                decay = gl.exp(rate * gl.where(wide > 20, wide, gl.log(1 + gl.exp(wide))))
                value = gl.convert_layout(convolve((window, value_taps)), gl.SliceLayout(0, STATE))
                query = queries.index(place).load(gl.SliceLayout(1, STATE))[:, None]
                key = keys.index(place).load(gl.SliceLayout(1, STATE))[:, None]
                following = gl.minimum(place + 1, num_places - 1)
                window = _load_window(stream, value_head, following, SIZE, TAPS, WINDOW)
                b_in, a_in = _load_strengths(stream, gates, kept_gates, following, VALUE_HEADS)

                state = state * decay
                change = (value - gl.sum(state * key, 0)) * beta
                state += key * change[None, :]
                if place == last:
                    at = written + head * (SIZE * SIZE) + o_k[:, None] * SIZE + o_v[None, :]
                    gl.store(at, state, mask=is_real)
                if is_new:
                    x = gl.sum(state * query, 0)
                    x *= gl.rsqrt(gl.sum(x * x, 0) / SIZE + norm_eps) * scale
                    gated = gate.to(gl.float32)
                    x = x * gated / (1 + gl.exp(-gated))
                    at = output_at + new * (VALUE_HEADS * SIZE)
                    gl.store(at, x.to(output.dtype.element_ty))
            # All that is read of the records and of the convolution's state has been.
            thread_barrier()
            _keep(stream, kept, value_head, last, num_new, is_real, SIZE, TAPS, WINDOW)
            for draft in range(num_new - 1):
                source, at = (
                    gates + (draft + 1) * projected_stride,
                    kept_gates + draft * record_stride,
                )
                gl.store(at, gl.load(source))
                gl.store(at + VALUE_HEADS, gl.load(source + VALUE_HEADS))


@gluon.jit
def _load_taps(weight, head, SIZE: gl.constexpr, TAPS: gl.constexpr, WINDOW: gl.constexpr):
    """[SIZE, BLOCK_TAPS], the weights of a head's convolution."""
    channel = head * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, WINDOW))[:, None]
    tap = gl.arange(0, WINDOW.size_per_thread[1], layout=gl.SliceLayout(0, WINDOW))[None, :]
    return gl.load(weight + channel * TAPS + tap, mask=tap < TAPS, other=0.0)


@gluon.jit
def _load_window(stream, head, place, SIZE: gl.constexpr, TAPS: gl.constexpr, WINDOW: gl.constexpr):
    """[SIZE, BLOCK_TAPS], a head's inputs up to a place, oldest first: of the state, of records, of
    the step's tokens."""
    token, projected_stride, recorded, record_stride, read, num_folded, num_places = stream
    channel = head * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, WINDOW))[:, None]
    tap = gl.arange(0, WINDOW.size_per_thread[1], layout=gl.SliceLayout(0, WINDOW))[None, :]
    source = place - (TAPS - 1) + tap
    is_new = (source >= num_folded) & (source < num_places) & (tap < TAPS)
    is_folded = (source >= 0) & (source < num_folded) & (tap < TAPS)
    at = token + (source - num_folded) * projected_stride + channel
    new = gl.load(at, mask=is_new, other=0.0)
    folded = gl.load(recorded + source * record_stride + channel, mask=is_folded, other=0.0)
    at = read + channel * (TAPS - 1) + (TAPS - 1) + source
    is_old = (source < 0) & (source > -TAPS) & (tap < TAPS)
    old = gl.load(at, mask=is_old, other=0.0)
    return gl.where(is_new, new, gl.where(is_folded, folded, old.to(new.dtype)))


@gluon.jit
def _load_strengths(stream, gates, kept_gates, place, VALUE_HEADS: gl.constexpr):
    """What a head's beta and decay at a place are made of."""
    _token, projected_stride, _recorded, record_stride, _read, num_folded, num_places = stream
    is_new = (place >= num_folded) & (place < num_places)
    at, kept_at = (
        gates + (place - num_folded) * projected_stride,
        kept_gates + place * record_stride,
    )
    b = gl.load(at, mask=is_new, other=0.0)
    a = gl.load(at + VALUE_HEADS, mask=is_new, other=0.0)
    is_folded = place < num_folded
    kept_b = gl.load(kept_at, mask=is_folded, other=0.0)
    kept_a = gl.load(kept_at + VALUE_HEADS, mask=is_folded, other=0.0)
    return gl.where(is_new, b, kept_b), gl.where(is_new, a, kept_a)


@gluon.jit
def _keep(
    stream,
    kept,
    head,
    last,
    num_new,
    is_real,
    SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Move a head's convolution state on to a place, and record the drafts' inputs."""
    token, projected_stride, recorded, record_stride, _read, _num_folded, _num = stream
    window = _load_window(stream, head, last, SIZE, TAPS, WINDOW)
    channel = head * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, WINDOW))
    tap = gl.arange(0, WINDOW.size_per_thread[1], layout=gl.SliceLayout(0, WINDOW))[None, :]
    at = kept + channel[:, None] * (TAPS - 1) + tap - 1
    gl.store(at, window.to(kept.dtype.element_ty), mask=is_real & (tap > 0) & (tap < TAPS))
    for draft in range(num_new - 1):
        inputs = gl.load(token + (draft + 1) * projected_stride + channel)
        gl.store(recorded + draft * record_stride + channel, inputs)
