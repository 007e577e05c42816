"""How Hopper's decoding kernels get at recurrent states, in Gluon: Triton's language for programs
that place data themselves.

A program goes through states of its own. While it works on one in registers, TMA brings the next to
shared memory, line by line, since memory is slower in strides. That begins before the input
projection has ended: the states were written in an earlier step. A convolution state is changed in
place by the thread that has read it.

`work` are (states, slot_lines, slot_in, slot_out, first, stride, num_states, places, loaded): the
TMA descriptor, lines of a slot, the slots, the program's first unit and the distance to its next,
how many states it has, shared memory for some of them, barriers. A unit is EACH of a sequence's
states, of which there are UNITS * EACH.

Legend: D sequences, C channels, J taps, K rows and W columns of a state.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.gluon import load_box, thread_barrier

STATE_SIZE = 128
"""Of a key and a value of Gated DeltaNet and KDA: a thread for each of their channels."""
_LINE = 32
"""Numbers of a line, 128 bytes: the most that TMA swizzles."""
_BOX = 256
"""Lines that it copies at a time, the most."""
_ALIGNMENT = 16
"""Bytes: TMA's."""
_MAX_LINES = 2**31
"""TMA counts lines from the first state to the last."""

STATE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [1, 4], [1, 0]))
"""Of [K, W], both STATE_SIZE: a warp holds 32 columns, so sums over rows stay inside it."""
BY_LINE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [16, 0], [32, 0], [64, 0], [128, 0], [256, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [4, 0], [8, 0]],
        warp_bases=[[1, 0], [2, 0]],
        block_bases=[],
        shape=[STATE_SIZE * STATE_SIZE // _LINE, _LINE],
    )
)
"""The same by lines, four to a row."""


def can_describe(recurrent_pool: Tensor) -> bool:
    """Whether TMA reaches all states of `recurrent_pool` [slots, heads, K, W]."""
    is_aligned = recurrent_pool.data_ptr() % _ALIGNMENT == 0
    return is_aligned and _num_lines(recurrent_pool) < _MAX_LINES


def _num_lines(recurrent_pool: Tensor) -> int:
    """Lines from the first state to the last, with what lies between."""
    states = (len(recurrent_pool) - 1) * recurrent_pool.stride(0) + recurrent_pool[0].numel()
    return states // _LINE


def describe_states(recurrent_pool: Tensor) -> TensorDescriptor:
    """`recurrent_pool` [slots, heads, K, W] float32 line by line."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    lines = recurrent_pool.as_strided((_num_lines(recurrent_pool), _LINE), (_LINE, 1))
    return TensorDescriptor.from_tensor(lines, [_BOX, _LINE], layout)


@gluon.jit
def begin_work(
    states,
    slot_stride,
    slot_in,
    slot_out,
    num_units,
    SHAPE: gl.constexpr,
    UNITS: gl.constexpr,
    EACH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """This program's `work` on states [K, W] of this SHAPE, with places for STAGES of them, to
    which the first are on their way."""
    LINE: gl.constexpr = states.block_type.shape[1]
    places, loaded = _open_places(states, SHAPE[0] * SHAPE[1] // LINE, STAGES)
    first, stride = gl.program_id(0), gl.num_programs(0)
    num_states = EACH * ((num_units - first + stride - 1) // stride)
    slot_lines = slot_stride // LINE
    work = states, slot_lines, slot_in, slot_out, first, stride, num_states, places, loaded
    for ahead in gl.static_range(STAGES):
        fetch(work, ahead, UNITS, EACH)
    return work


@gluon.jit
def _open_places(states, LINES: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for STAGES states of so many lines, and a barrier for each."""
    LINE: gl.constexpr = states.block_type.shape[1]
    places = gl.allocate_shared_memory(gl.float32, [STAGES, LINES, LINE], states.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=1)
    return places, loaded


@gluon.jit
def fetch(work, number, UNITS: gl.constexpr, EACH: gl.constexpr):
    """Have this program's state of this number brought to shared memory, if there is one. Of
    padding nothing is read, and its turn is over at once."""
    states, slot_lines, slot_in, slot_out, first, stride, num_states, places, loaded = work
    BOX: gl.constexpr = states.block_type.shape[0]
    STAGES: gl.constexpr = places.type.shape[0]
    LINES: gl.constexpr = places.type.shape[1]
    LINE: gl.constexpr = places.type.shape[2]
    if number < num_states:
        unit = first + number // EACH * stride
        sequence, head = unit // UNITS, unit % UNITS * EACH + number % EACH
        is_real = gl.load(slot_out + sequence) >= 0
        line = gl.load(slot_in + sequence).to(gl.int32) * slot_lines + head * LINES
        bar = loaded.index(number % STAGES)
        place = places.index(number % STAGES)
        mbarrier.expect(bar, LINES * LINE * 4, pred=is_real)
        mbarrier.arrive(bar, count=1, pred=is_real == 0)
        for at in gl.static_range(0, LINES, BOX):
            part = place.slice(at, BOX)
            load_box(states, [line + at, 0], bar, part, pred=is_real)


@gluon.jit
def take(
    work,
    number,
    LAYOUT: gl.constexpr,
    LINE_LAYOUT: gl.constexpr,
    SHAPE: gl.constexpr,
    UNITS: gl.constexpr,
    EACH: gl.constexpr,
    decay=None,
):
    """The state of this number in registers as soon as it has come, times its decay; what comes
    next takes its place in shared memory."""
    places, loaded = work[7], work[8]
    STAGES: gl.constexpr = places.type.shape[0]
    mbarrier.wait(loaded.index(number % STAGES), number // STAGES & 1)
    state = places.index(number % STAGES).load(LINE_LAYOUT).reshape(SHAPE)
    state = gl.convert_layout(state, LAYOUT, assert_trivial=True)
    if decay is not None:
        state *= decay
    # All threads have the state: its place is free.
    thread_barrier()
    fetch(work, number + STAGES, UNITS, EACH)
    return state


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
def convolve(window, p_bias=None):
    """Convolution and SiLU, a channel a thread."""
    x = gl.sum(window[0].to(gl.float32) * window[1].to(gl.float32), 1)
    if p_bias is not None:
        x += gl.load(p_bias).to(gl.float32)
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


@gluon.jit
def unit_vectors(query, key, SIZE: gl.constexpr):
    """Both as unit vectors, the query shorter by SIZE ** -0.5."""
    query *= unit_scale(query) * SIZE**-0.5
    key *= unit_scale(key)
    return query, key


@gluon.jit
def by_row(x):
    """[K, 1], a number for each row of a state [K, W]."""
    return gl.convert_layout(x, gl.SliceLayout(1, STATE))[:, None]


@gluon.jit
def unit_scale(x):
    """What makes `x` a unit vector."""
    return gl.rsqrt(gl.sum(x * x, 0) + 1e-6)


@gluon.jit
def softplus(x):
    return gl.where(x > 20, x, gl.log(1 + gl.exp(x)))


@gluon.jit
def sigmoid(x):
    return 1 / (1 + gl.exp(-x.to(gl.float32)))


@gluon.jit
def decay_of(inputs, rate, bias):
    """What a head's state is multiplied by before a token."""
    return gl.exp(rate * softplus(inputs.to(gl.float32) + bias))


@gluon.jit
def times_silu(x, gate):
    gate = gate.to(gl.float32)
    return x * gate / (1 + gl.exp(-gate))


@gluon.jit
def delta_rule(state, key, value, beta):
    """A decayed state [K, W] behind a token, whose key is [K, 1]."""
    change = (value - gl.sum(state * key, 0)) * beta
    state += key * change[None, :]
    return state


@gluon.jit
def pass_token(work, number, token, target, UNITS: gl.constexpr, EACH: gl.constexpr):
    """Take the state [K, W] of this number past a token and store it; returns what the token's
    query reads of it, [W]. `token` are (query [K, 1], key [K, 1], value [W], beta, decay), `target`
    the slot that is written, the head, rows, columns, and whether there is a sequence."""
    query, key, value, beta, decay = token
    written, head, row, column, is_real = target
    SIZE: gl.constexpr = query.shape[0]
    state = take(work, number, STATE, BY_LINE, [SIZE, SIZE], UNITS, EACH, decay)
    state = delta_rule(state, key, value, beta)
    written += head * (SIZE * SIZE)
    gl.store(written + row[:, None] * SIZE + column[None, :], state, mask=is_real)
    return gl.sum(state * query, 0)


@gluon.jit
def rms_scale(x, eps, SIZE: gl.constexpr):
    """What makes the mean square of `x` [SIZE] 1."""
    return gl.rsqrt(gl.sum(x * x, 0) / SIZE + eps)
