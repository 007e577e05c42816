"""Recurrent states in Hopper's kernels for decoding steps, in Gluon: Triton's language for programs
that place data themselves.

Each program loops over some states. While it works on one in registers, TMA brings the next to
shared memory, as lines of 128 bytes, because strided copies are slower. The first copies start
before the input projection has ended: an earlier step wrote the states. The thread that has read
an entry of a convolution state also overwrites it.

Legend: C channels, J taps, K rows and W columns of a state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from milepost.kernels.platform.gluon import boxes_of, load_box, thread_barrier
from milepost.kernels.platform.numerics import softplus
from milepost.kernels.recurrent.mixer import MixerSizes
from milepost.kernels.recurrent.structures import DecodingSteps, Mixer

STATE_SIZE = 128
"""Channels of a key and of a value of Gated DeltaNet and KDA, each a thread's."""
_LINE = 32
"""Numbers of a line: 128 bytes, the widest that TMA swizzles."""
MOST_AT_ONCE = 8
"""Largest number of tokens whose inputs a thread holds at a time."""
_BOX = 256
"""Lines that TMA copies at a time, its maximum."""

CHANNEL = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Layout of a head's channels, one per thread."""
STATE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [1, 4], [1, 0]))
"""Layout of a state [K, W], both STATE_SIZE. A warp holds 32 columns, so sums over rows stay in the
warp."""
BY_LINE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [16, 0], [32, 0], [64, 0], [128, 0], [256, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [4, 0], [8, 0]],
        warp_bases=[[1, 0], [2, 0]],
        block_bases=[],
        shape=[STATE_SIZE * STATE_SIZE // _LINE, _LINE],
    )
)
"""Layout of a state by lines of 128 bytes, four per row."""


class Work(NamedTuple):
    """The states that a program goes through, and shared memory for some of them."""

    states: Any
    """TMA's descriptor of the lines of all states."""
    slot_lines: Any
    slot_in: Any
    slot_out: Any
    first: Any
    stride: Any
    """The program's first unit, and the distance to its next."""
    num_states: Any
    places: Any
    loaded: Any
    """A barrier for each place."""


class Window(NamedTuple):
    """A head's inputs of the convolution, oldest first, and its weights: tuples of [SIZE]."""

    rows: Any
    taps: Any


def operands(mixer: Mixer, steps: DecodingSteps) -> tuple[Any, ...]:
    """Returns the first arguments of Hopper's step kernels: inputs, weights, steps, and TMA's
    descriptor of states."""
    return mixer.inputs, mixer.weights, steps, _describe_states(steps.recurrent.base)


def _describe_states(recurrent_pool: Tensor) -> TensorDescriptor:
    """Returns TMA's descriptor of `recurrent_pool` [slots, heads, K, W] float32, line by line."""
    num_states = (len(recurrent_pool) - 1) * recurrent_pool.stride(0) + recurrent_pool[0].numel()
    lines = recurrent_pool.as_strided((num_states // _LINE, _LINE), (_LINE, 1))
    return boxes_of(lines, _BOX, _LINE)


class StepForm(NamedTuple):
    """Constants of Hopper's step kernels."""

    sizes: MixerSizes
    each: int
    """Heads of a unit of work."""
    stages: int
    """Places for states in a program."""
    places: int = 1
    """Largest number of tokens of a sequence."""
    at_once: int = 1
    """Tokens whose inputs a thread holds at a time."""

    @property
    def units(self) -> int:
        """Units of a sequence."""
        return self.sizes.heads // self.each


@gluon.jit
def begin_work(states, steps, num_units, FORM: gl.constexpr):
    """Returns this program's `Work`, after starting to load its first states."""
    EACH: gl.constexpr = FORM.each
    STAGES: gl.constexpr = FORM.stages
    LINE: gl.constexpr = states.block_type.shape[1]
    LINES: gl.constexpr = FORM.sizes.own * FORM.sizes.shared // LINE
    places = gl.allocate_shared_memory(gl.float32, [STAGES, LINES, LINE], states.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=1)
    first, stride = gl.program_id(0), gl.num_programs(0)
    num_states = EACH * ((num_units - first + stride - 1) // stride)
    slots = steps.sequences.slot_in, steps.sequences.slot_out
    slot_lines = steps.recurrent.stride // LINE
    work = Work(states, slot_lines, *slots, first, stride, num_states, places, loaded)
    for ahead in gl.static_range(STAGES):
        fetch(work, ahead, FORM)
    return work


@gluon.jit
def fetch(work, number, FORM: gl.constexpr):
    """Starts loading the program's state `number` into shared memory, if it has that many. Padding
    loads nothing and counts as loaded."""
    UNITS: gl.constexpr = FORM.units
    EACH: gl.constexpr = FORM.each
    BOX: gl.constexpr = work.states.block_type.shape[0]
    STAGES: gl.constexpr = work.places.type.shape[0]
    LINES: gl.constexpr = work.places.type.shape[1]
    LINE: gl.constexpr = work.places.type.shape[2]
    if number < work.num_states:
        unit = work.first + number // EACH * work.stride
        sequence, head = unit // UNITS, unit % UNITS * EACH + number % EACH
        is_real = gl.load(work.slot_out + sequence) >= 0
        line = gl.load(work.slot_in + sequence).to(gl.int32) * work.slot_lines + head * LINES
        bar = work.loaded.index(number % STAGES)
        place = work.places.index(number % STAGES)
        mbarrier.expect(bar, LINES * LINE * 4, pred=is_real)
        mbarrier.arrive(bar, count=1, pred=is_real == 0)
        for at in gl.static_range(0, LINES, BOX):
            part = place.slice(at, BOX)
            load_box(work.states, [line + at, 0], bar, part, pred=is_real)


@gluon.jit
def take(
    work, number, LAYOUT: gl.constexpr, LINE_LAYOUT: gl.constexpr, FORM: gl.constexpr, decay=None
):
    """Waits for the state `number` and returns it in registers, times its decay; then starts to
    load the next state into its place."""
    STAGES: gl.constexpr = FORM.stages
    HEIGHT: gl.constexpr = FORM.sizes.own
    WIDTH: gl.constexpr = FORM.sizes.shared
    mbarrier.wait(work.loaded.index(number % STAGES), number // STAGES & 1)
    state = work.places.index(number % STAGES).load(LINE_LAYOUT).reshape([HEIGHT, WIDTH])
    state = gl.convert_layout(state, LAYOUT, assert_trivial=True)
    if decay is not None:
        state *= decay
    # All threads have read the state: its place is free.
    thread_barrier()
    fetch(work, number + STAGES, FORM)
    return state


@gluon.jit
def load_window(token, weight, state, head, SIZE: gl.constexpr, TAPS: gl.constexpr):
    """Returns a head's `Window`: the convolution's `state`, then the `token`'s input."""
    channel = head * SIZE + gl.arange(0, SIZE, layout=CHANNEL)
    newest = gl.load(token + channel)
    window = ()
    for tap in gl.static_range(TAPS - 1):
        window += (gl.load(state + channel * (TAPS - 1) + tap).to(newest.dtype),)
    window += (newest,)
    return Window(window, load_taps(weight, channel, TAPS))


@gluon.jit
def load_taps(weight, channel, TAPS: gl.constexpr):
    """Returns a convolution's weights, a tuple of TAPS tensors."""
    taps = ()
    for tap in gl.static_range(TAPS):
        taps += (gl.load(weight + channel * TAPS + tap).to(gl.float32),)
    return taps


@gluon.jit
def convolve(window, TAPS: gl.constexpr, PLACE: gl.constexpr = 0, bias=None):
    """Returns the convolution of TAPS inputs from PLACE on, through SiLU. Fused multiply-adds are
    explicit here and below, so that verify and decode kernels round alike."""
    rows, taps = window
    x = rows[PLACE].to(gl.float32) * taps[0]
    for tap in gl.static_range(1, TAPS):
        x = gl.fma(rows[PLACE + tap].to(gl.float32), taps[tap], x)
    if bias is not None:
        x += bias
    return x / (1 + gl.exp(-x))


@gluon.jit
def keep_window(window, state, head, is_real, SIZE: gl.constexpr, TAPS: gl.constexpr):
    """Advances a head's convolution state by one input."""
    channel = head * SIZE + gl.arange(0, SIZE, layout=CHANNEL)
    for tap in gl.static_range(1, TAPS):
        at = state + channel * (TAPS - 1) + tap - 1
        gl.store(at, window.rows[tap].to(state.dtype.element_ty), mask=is_real)


@gluon.jit
def unit_vectors(query, key, SIZE: gl.constexpr):
    """Makes both unit vectors, the query shorter by SIZE ** -0.5."""
    squares = gl.reduce((square(query), square(key)), 0, _add_each)
    query *= gl.rsqrt(squares[0] + 1e-6) * SIZE**-0.5
    key *= gl.rsqrt(squares[1] + 1e-6)
    return query, key


@gluon.jit
def _add_each(a, b, c, d):
    return a + c, b + d


@gluon.jit
def square(x):
    """Returns the square, rounded before it is added to anything."""
    return gl.fma(x, x, gl.zeros_like(x))


@gluon.jit
def by_row(x):
    """Returns [K, 1], a number for each row of a state [K, W]."""
    return gl.convert_layout(x, gl.SliceLayout(1, STATE))[:, None]


@gluon.jit
def sigmoid(x):
    return 1 / (1 + gl.exp(-x.to(gl.float32)))


@gluon.jit
def decays_of(x, rate, LEAST: gl.constexpr):
    """Returns the decays of a token: see `MixerSizes.least_decay`."""
    if LEAST != 0:
        return gl.exp(LEAST * sigmoid(-rate * x))
    else:
        return gl.exp(rate * softplus(x))


@gluon.jit
def read_rows(state, x):
    """Returns the product [W] of `x` [K, 1] and a state [K, W]. A thread's sum begins with a
    rounded product, its first; otherwise the compiler would choose which of the first two to
    round."""
    SIZE: gl.constexpr = state.shape[0]
    row = gl.arange(0, SIZE, layout=gl.SliceLayout(1, STATE))[:, None]
    begins = row < 4  # of all threads' first rows
    rounded = gl.fma(state, x, gl.zeros_like(state))
    return gl.sum(gl.where(begins, rounded, state * x), 0)


@gluon.jit
def delta_rule(state, key, value, beta):
    """Applies the delta rule to a decayed state [K, W], with a token's key [K, 1]."""
    change = (value - read_rows(state, key)) * beta
    return gl.fma(key, change[None, :], state)


@gluon.jit
def norm_and_gate(x, scale, eps, gate, SIZE: gl.constexpr, BY_CHANNEL: gl.constexpr):
    """Returns a head's output: its norm times SiLU of `gate`, or for KDA, which decays BY_CHANNEL,
    times its sigmoid."""
    x *= gl.rsqrt(gl.sum(square(x), 0) / SIZE + eps) * scale
    gate = gate.to(gl.float32)
    return (x if BY_CHANNEL else x * gate) / (1 + gl.exp(-gate))
