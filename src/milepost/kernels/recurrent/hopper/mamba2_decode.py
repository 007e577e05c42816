"""Mamba2's decoding steps on Hopper, in Gluon: the heads of a group one after the other in each
program, which TMA brings to shared memory ahead. B and C are worked out once, and the group's norm
needs nobody else.

Legend: S sequences, H heads, P head_dim, G groups, K state_size, J taps.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.layout.emit import Fp8Rows
from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.gluon import launch_dependents, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.recurrent.hopper.states import (
    CHANNEL,
    StepForm,
    begin_work,
    convolve,
    keep_window,
    load_window,
    operands,
    softplus,
    square,
    take,
)
from milepost.kernels.recurrent.structures import DecodingSteps, Mixer

HEAD_DIM, STATE_SIZE = 64, 128
NUM_WARPS = 4
_STAGES = 2
"""Places for states in a program."""
STATE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
"""Layout of [P, K]: a warp holds whole rows, so sums over columns stay inside it."""
BY_LINE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [64, 0], [128, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[HEAD_DIM * STATE_SIZE // 32, 32],
    )
)
"""A state by lines, four to a row."""


def run(
    mixer: Mixer,
    steps: DecodingSteps,
    output: Tensor,
    arrivals: Tensor | None = None,
    fp8: Fp8Rows | None = None,
) -> None:
    """Advance each sequence by one token; writes `output` [S, H * P], zeros for padding."""
    assert fp8 is None, "outputs are rounded by who reads them"
    sizes = mixer.sizes
    num_units = len(output) * sizes.units
    grid = (min(num_units, 2 * num_sms(output.device)),)
    options = {"FORM": StepForm(sizes, sizes.group, _STAGES), "num_warps": NUM_WARPS, **OVERLAPPED}
    _decode_kernel[grid](*operands(mixer, steps), output, num_units, **options)


@quick
@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=["steps"])
def _decode_kernel(inputs, weights, steps, lines, output, num_units, FORM: gl.constexpr):
    """A unit after the other, each a group of a sequence."""
    SIZES: gl.constexpr = FORM.sizes
    GROUPS: gl.constexpr = SIZES.units
    EACH: gl.constexpr = SIZES.group
    HEAD_DIM: gl.constexpr = SIZES.own
    STATE_SIZE: gl.constexpr = SIZES.shared
    TAPS: gl.constexpr = SIZES.taps
    WIDTH: gl.constexpr = SIZES.width
    FIRST_B: gl.constexpr = WIDTH // STATE_SIZE
    conv, states, sequences = steps.conv, steps.recurrent, steps.sequences
    work = begin_work(lines, steps, num_units, FORM)

    o_p = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, STATE_SIZE, layout=gl.SliceLayout(0, STATE))
    o_c = gl.arange(0, HEAD_DIM, layout=CHANNEL)
    o_wide = gl.arange(0, STATE_SIZE, layout=CHANNEL)
    wait_for_inputs()
    launch_dependents()  # the output projection, which begins with its weights
    for unit in range(work.first, num_units, work.stride):
        number = (unit - work.first) // work.stride * EACH
        i_n, i_g = (unit // GROUPS).to(gl.int64), unit % GROUPS
        source = gl.load(sequences.slot_in + i_n).to(gl.int64)
        target = gl.load(sequences.slot_out + i_n).to(gl.int64)
        is_real = target >= 0
        p_gate = inputs.gate.base + i_n * inputs.gate.stride
        p_step = inputs.strengths.base + i_n * inputs.strengths.stride
        p_token = inputs.mixed.base + i_n * inputs.mixed.stride
        args = p_token, weights.conv, conv.base + source * conv.stride
        p_conv = conv.base + target * conv.stride
        p_state = states.base + target * states.stride
        window_b = load_window(*args, FIRST_B + i_g, STATE_SIZE, TAPS)
        window_c = load_window(*args, FIRST_B + GROUPS + i_g, STATE_SIZE, TAPS)
        bias = bias_of(weights.conv_bias, WIDTH + i_g * STATE_SIZE + o_wide)
        b_b = convolve(window_b, TAPS, bias=bias)
        bias = bias_of(weights.conv_bias, WIDTH + (GROUPS + i_g) * STATE_SIZE + o_wide)
        b_c = convolve(window_c, TAPS, bias=bias)
        b_b = gl.convert_layout(b_b, gl.SliceLayout(0, STATE))[None, :]
        b_c = gl.convert_layout(b_c, gl.SliceLayout(0, STATE))[None, :]
        keep_window(window_b, p_conv, FIRST_B + i_g, is_real, STATE_SIZE, TAPS)
        keep_window(window_c, p_conv, FIRST_B + GROUPS + i_g, is_real, STATE_SIZE, TAPS)
        outputs, squares = (), 0.0
        for i_m in gl.static_range(EACH):
            i_h = i_g * EACH + i_m
            window_x = load_window(*args, i_h, HEAD_DIM, TAPS)
            b_gate = gl.load(p_gate + i_h * HEAD_DIM + o_p).to(gl.float32)
            bias = bias_of(weights.conv_bias, i_h * HEAD_DIM + o_c)
            b_in = gl.load(p_step + i_h)
            b_step = time_step(
                b_in, gl.load(weights.dt_bias + i_h), weights.dt_low, weights.dt_high
            )
            decay, skip = gl.exp(b_step * gl.load(weights.rate + i_h)), gl.load(weights.skip + i_h)
            b_x = gl.convert_layout(convolve(window_x, TAPS, bias=bias), gl.SliceLayout(1, STATE))
            keep_window(window_x, p_conv, i_h, is_real, HEAD_DIM, TAPS)

            b_state = take(work, number + i_m, STATE, BY_LINE, FORM, decay)
            b_state = gl.fma((b_x * b_step)[:, None], b_b, b_state)
            o_state = (i_h * HEAD_DIM + o_p)[:, None] * STATE_SIZE + o_k[None, :]
            gl.store(p_state + o_state, b_state, mask=is_real)
            b_y = gl.fma(b_x, skip, read_columns(b_state, b_c))
            b_gate = b_gate / (1 + gl.exp(-b_gate))
            if SIZES.gates_first:
                b_y *= b_gate
            squares += add_squares(b_y)
            outputs += ((b_y, b_gate),)
        scale = gl.rsqrt(_add_in_turn(squares) / (EACH * HEAD_DIM) + weights.norm_eps)
        for i_m in gl.static_range(EACH):
            o_head = (i_g * EACH + i_m) * HEAD_DIM + o_p
            b_y, b_gate = outputs[i_m]
            b_y *= scale * gl.load(weights.norm + o_head)
            if not SIZES.gates_first:
                b_y *= b_gate
            b_y = gl.where(is_real, b_y, 0.0)
            gl.store(output + i_n * WIDTH + o_head, b_y.to(output.dtype.element_ty))


@gluon.jit
def read_columns(state, x):
    """[P], what `x` [1, K] reads of a state [P, K]; as `states.read_rows`."""
    column = gl.arange(0, state.shape[1], layout=gl.SliceLayout(0, STATE))[None, :]
    begins = column & 99 == 0  # of all threads' first columns
    rounded = gl.fma(state, x, gl.zeros_like(state))
    return gl.sum(gl.where(begins, rounded, state * x), 1)


@gluon.jit
def add_squares(y):
    """[NUM_WARPS], the sums of squares of what each warp has of `y` [P]: none waits for another."""
    x = square(y).reshape([y.shape[0] // 16, 4, 4])
    return gl.sum(gl.sum(x, 0), 1)


@gluon.jit
def _add_in_turn(x):
    """The sum of all warps' sums, from the first to the last."""
    warp = gl.arange(0, x.shape[0], layout=x.type.layout)
    total = 0.0
    for number in gl.static_range(x.shape[0]):
        total += gl.sum(gl.where(warp == number, x, 0.0), 0)
    return total


@gluon.jit
def bias_of(conv_bias, channel):
    """The bias of some channels' convolution, if there is one."""
    bias = conv_bias
    if conv_bias is not None:
        bias = gl.load(conv_bias + channel).to(gl.float32)
    return bias


@gluon.jit
def time_step(inputs, bias, dt_low, dt_high):
    """A head's time step, between its limits."""
    step = softplus(inputs.to(gl.float32) + bias)
    step = gl.where(step < dt_low, dt_low, step)
    return gl.where(step > dt_high, dt_high, step)
