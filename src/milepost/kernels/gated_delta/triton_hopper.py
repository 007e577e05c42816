"""`triton_decode` on Hopper in one launch, in Gluon: Triton's language for programs that place data
themselves.

Programs go through sequences and key heads. While one works on a value head's state in registers,
TMA brings the next to shared memory. It begins before the input projection has ended:
the states were written in an earlier step. A key head's query and key are worked out once for all
its value heads, and by one program, which alone reads and writes their convolution states.

Where there is work for many, two programs share an SM, with one place for a state each:
one waits while the other works. Else a program has two places, and fetches both states at once.

Legend: D sequences, C channels, J taps, G key heads, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.device import num_sms
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.gluon import load_box, thread_barrier
from milepost.kernels.overlap import OVERLAPPED
from milepost.kernels.overlap_gluon import let_next_start, wait_for_inputs

STATE_SIZE = 128
"""Of a key and a value: a thread for each of their channels."""
_LINE = 32
"""Numbers of a line, 128 bytes: the most that TMA swizzles. It is to read a state line
by line, since memory is slower in strides."""
_BOX = 256
"""Lines that it copies at a time, the most."""
_ALIGNMENT = 16
"""Bytes: TMA's."""
_MAX_LINES = 2**31
"""TMA counts lines from the first state to the last."""


def suits(recurrent_pool: Tensor) -> bool:
    """Whether the kernel can do this work, where `runs_gluon`."""
    return (
        recurrent_pool.dtype == torch.float32
        and recurrent_pool.shape[2:] == (STATE_SIZE, STATE_SIZE)
        and recurrent_pool.stride(0) % STATE_SIZE == 0
        and can_describe(recurrent_pool)
    )


def can_describe(recurrent_pool: Tensor) -> bool:
    """Whether TMA reaches all states."""
    is_aligned = recurrent_pool.data_ptr() % _ALIGNMENT == 0
    return is_aligned and _num_lines(recurrent_pool) < _MAX_LINES


def _num_lines(recurrent_pool: Tensor) -> int:
    """Lines from the first state to the last, with what lies between."""
    states = (len(recurrent_pool) - 1) * recurrent_pool.stride(0) + recurrent_pool[0].numel()
    return states // _LINE


def describe_states(recurrent_pool: Tensor) -> TensorDescriptor:
    """Line by line."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    lines = recurrent_pool.as_strided((_num_lines(recurrent_pool), _LINE), (_LINE, 1))
    return TensorDescriptor.from_tensor(lines, [_BOX, _LINE], layout)


def decode(
    projected: Tensor,
    weights: GatedDeltaWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
) -> Tensor:
    """See `gated_delta.mix`."""
    num_sequences = len(slot_out)
    value_heads = recurrent_pool.shape[1]
    channels, conv_width = weights.conv.shape
    key_heads = (channels - value_heads * STATE_SIZE) // (2 * STATE_SIZE)
    output = projected.new_empty(num_sequences, value_heads * STATE_SIZE)
    states = describe_states(recurrent_pool)
    num_units = num_sequences * key_heads
    units_at_once = num_sms(projected.device)
    stages = 2 if num_units <= units_at_once else 1
    _decode_kernel[(min(num_units, 2 * units_at_once),)](
        projected,
        projected.stride(0),
        weights.conv,
        conv_pool,
        conv_pool.stride(0),
        weights.decay_rate,
        weights.decay_bias,
        weights.norm,
        weights.norm_eps,
        states,
        recurrent_pool,
        recurrent_pool.stride(0),
        slot_in,
        slot_out,
        output,
        num_units,
        KEY_HEADS=key_heads,
        GROUP=value_heads // key_heads,
        SIZE=STATE_SIZE,
        TAPS=conv_width,
        BLOCK_TAPS=triton.next_power_of_2(conv_width),
        STAGES=stages,
        num_warps=4,
        **OVERLAPPED,
    )
    return output


@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=["slot_in", "slot_out"])
def _decode_kernel(
    projected,
    projected_stride,
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
    slot_in,
    slot_out,
    output,
    num_units,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    BLOCK_TAPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Every so many units, each the value heads of a key head of a sequence."""
    # A warp holds 32 columns of a state, so sums over rows stay inside it.
    STATE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 4], [1, 0])
    # The same by lines, four to a row.
    LINE: gl.constexpr = states.block_type.shape[1]
    LINES: gl.constexpr = SIZE * SIZE // LINE
    BY_LINE: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [16, 0], [32, 0], [64, 0], [128, 0], [256, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [4, 0], [8, 0]],
        warp_bases=[[1, 0], [2, 0]],
        block_bases=[],
        shape=[LINES, LINE],
    )
    # A thread holds a channel's inputs: a convolution state is changed in place by who has read it.
    WINDOW: gl.constexpr = gl.BlockedLayout([1, BLOCK_TAPS], [32, 1], [4, 1], [1, 0])
    VALUE_HEADS: gl.constexpr = KEY_HEADS * GROUP
    CHANNELS: gl.constexpr = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
    places = gl.allocate_shared_memory(gl.float32, [STAGES, LINES, LINE], states.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=1)
    first, stride = gl.program_id(0), gl.num_programs(0)
    num_states = GROUP * ((num_units - first + stride - 1) // stride)
    slot_lines = slot_stride // LINE
    work = states, slot_lines, slot_in, slot_out, first, stride, num_states, places, loaded
    for ahead in gl.static_range(STAGES):
        fetch(work, ahead, KEY_HEADS, GROUP, SIZE, STAGES)

    row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, STATE))
    scale = gl.load(norm_weight + column)
    following = first // KEY_HEADS
    source, target = gl.load(slot_in + following), gl.load(slot_out + following)
    wait_for_inputs()
    let_next_start()  # the output projection, which begins with its weights
    number = 0
    for unit in range(first, num_units, stride):
        sequence, key_head = (unit // KEY_HEADS).to(gl.int64), unit % KEY_HEADS
        token = projected + sequence * projected_stride
        # Everything is asked for before anything is used.
        inputs = token, conv_weight, conv_pool + source.to(gl.int64) * conv_stride
        query_window = load_window(inputs, key_head, SIZE, TAPS, WINDOW)
        key_window = load_window(inputs, KEY_HEADS + key_head, SIZE, TAPS, WINDOW)
        members = ()
        for member in gl.static_range(GROUP):
            head = key_head * GROUP + member
            window = load_window(inputs, 2 * KEY_HEADS + head, SIZE, TAPS, WINDOW)
            gate = gl.load(token + CHANNELS + head * SIZE + column)
            gates = token + CHANNELS + VALUE_HEADS * SIZE + head
            strengths = gl.load(gates), gl.load(gates + VALUE_HEADS)
            decays = gl.load(decay_rate + head), gl.load(decay_bias + head)
            members += ((window, gate, strengths, decays),)
        is_real = target >= 0
        kept = conv_pool + target.to(gl.int64) * conv_stride
        written = pool + target.to(gl.int64) * slot_stride
        following = gl.minimum(unit + stride, num_units - 1) // KEY_HEADS
        source, target = gl.load(slot_in + following), gl.load(slot_out + following)

        query, key = convolve(query_window), convolve(key_window)
        query *= gl.rsqrt(gl.sum(query * query, 0) + 1e-6) * SIZE**-0.5
        key *= gl.rsqrt(gl.sum(key * key, 0) + 1e-6)
        query = gl.convert_layout(query, gl.SliceLayout(1, STATE))[:, None]
        key = gl.convert_layout(key, gl.SliceLayout(1, STATE))[:, None]
        keep_window(query_window, kept, key_head, is_real, SIZE, TAPS, WINDOW)
        keep_window(key_window, kept, KEY_HEADS + key_head, is_real, SIZE, TAPS, WINDOW)
        for member in gl.static_range(GROUP):
            window, gate, strengths, decays = members[member]
            head = key_head * GROUP + member
            value = gl.convert_layout(convolve(window), gl.SliceLayout(0, STATE))
            keep_window(window, kept, 2 * KEY_HEADS + head, is_real, SIZE, TAPS, WINDOW)
            beta = 1 / (1 + gl.exp(-strengths[0].to(gl.float32)))
            wide = strengths[1].to(gl.float32) + decays[1]
            decay = gl.exp(decays[0] * gl.where(wide > 20, wide, gl.log(1 + gl.exp(wide))))

            mbarrier.wait(loaded.index(number % STAGES), number // STAGES & 1)
            state = places.index(number % STAGES).load(BY_LINE).reshape([SIZE, SIZE])
            state = gl.convert_layout(state, STATE, assert_trivial=True) * decay
            # All threads have the state: its place is free.
            thread_barrier()
            fetch(work, number + STAGES, KEY_HEADS, GROUP, SIZE, STAGES)
            number += 1
            change = (value - gl.sum(state * key, 0)) * beta
            state += key * change[None, :]
            written_at = written + head * (SIZE * SIZE) + row[:, None] * SIZE + column[None, :]
            gl.store(written_at, state, mask=is_real)
            x = gl.sum(state * query, 0)
            x *= gl.rsqrt(gl.sum(x * x, 0) / SIZE + norm_eps) * scale
            gate = gate.to(gl.float32)
            x = gl.where(is_real, x * gate / (1 + gl.exp(-gate)), 0.0)
            output_at = output + (sequence * VALUE_HEADS + head) * SIZE + column
            gl.store(output_at, x.to(output.dtype.element_ty))


@gluon.jit
def fetch(
    work,
    number,
    KEY_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Have this program's state of this number brought to shared memory, if there is one. Of
    padding nothing is read, and its turn is over at once."""
    states, slot_lines, slot_in, slot_out, first, stride, num_states, places, loaded = work
    BOX: gl.constexpr = states.block_type.shape[0]
    LINES: gl.constexpr = SIZE * SIZE // states.block_type.shape[1]
    if number < num_states:
        unit = first + number // GROUP * stride
        sequence, head = unit // KEY_HEADS, unit % KEY_HEADS * GROUP + number % GROUP
        is_real = gl.load(slot_out + sequence) >= 0
        line = gl.load(slot_in + sequence).to(gl.int32) * slot_lines + head * LINES
        bar = loaded.index(number % STAGES)
        place = places.index(number % STAGES)
        mbarrier.expect(bar, SIZE * SIZE * 4, pred=is_real)
        mbarrier.arrive(bar, count=1, pred=is_real == 0)
        for at in gl.static_range(0, LINES, BOX):
            part = place.slice(at, BOX)
            load_box(states, [line + at, 0], bar, part, pred=is_real)


@gluon.jit
def load_window(inputs, head, SIZE: gl.constexpr, TAPS: gl.constexpr, WINDOW: gl.constexpr):
    """A head's inputs of the convolution, oldest first, and its weights: [SIZE, BLOCK_TAPS]."""
    token, weight, source = inputs
    channel = head * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, WINDOW))[:, None]
    tap = gl.arange(0, WINDOW.size_per_thread[1], layout=gl.SliceLayout(0, WINDOW))[None, :]
    taps = gl.load(weight + channel * TAPS + tap, mask=tap < TAPS, other=0.0)
    older = gl.load(source + channel * (TAPS - 1) + tap, mask=tap < TAPS - 1, other=0.0)
    newest = gl.load(token + channel)
    return gl.where(tap == TAPS - 1, newest, older.to(newest.dtype)), taps


@gluon.jit
def convolve(window):
    """Convolution and SiLU, a channel a thread."""
    x = gl.sum(window[0].to(gl.float32) * window[1].to(gl.float32), 1)
    return x / (1 + gl.exp(-x))


@gluon.jit
def keep_window(
    window, target, head, is_real, SIZE: gl.constexpr, TAPS: gl.constexpr, WINDOW: gl.constexpr
):
    """Move a head's convolution state on by one input."""
    channel = head * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, WINDOW))[:, None]
    tap = gl.arange(0, WINDOW.size_per_thread[1], layout=gl.SliceLayout(0, WINDOW))[None, :]
    is_kept = is_real & (tap > 0) & (tap < TAPS)
    at = target + channel * (TAPS - 1) + tap - 1
    gl.store(at, window[0].to(target.dtype.element_ty), mask=is_kept)
