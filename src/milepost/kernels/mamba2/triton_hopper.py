"""Decode steps on Hopper, in Gluon: the heads of a group one after the other in each program,
which TMA brings to shared memory ahead. B and C are worked out once, and the group's norm needs
nobody else.

Legend: D sequences, H heads, P head_dim, G groups, K state_size, J taps; I = H * P entries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from milepost.kernels.mamba2.weights import Mamba2Weights
from milepost.kernels.platform.device import num_sms
from milepost.kernels.platform.gluon import launch_dependents, wait_for_inputs
from milepost.kernels.platform.launches import OVERLAPPED, quick
from milepost.kernels.recurrent.hopper.states import (
    CHANNEL,
    begin_work,
    can_describe,
    convolve,
    describe_states,
    keep_window,
    load_window,
    softplus,
    square,
    take,
)

HEAD_DIM, STATE_SIZE = 64, 128
MOST_HEADS = 16
"""Of a group: its outputs stay in registers until its norm is known."""
_STAGES = 2
"""Places for states in a program."""
STATE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
"""Of [P, K]: a warp holds whole rows, so sums over columns stay inside it."""
BY_LINE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [64, 0], [128, 0]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[HEAD_DIM * STATE_SIZE // 32, 32],
    )
)
"""The same by lines, four to a row."""
NUM_WARPS = 4


def suits(weights: Mamba2Weights, recurrent_pool: Tensor, num_sequences: int) -> bool:
    """Whether the kernel can do this work, where `runs_gluon`, and has some for each SM."""
    if weights.norm is None or not suits_states(recurrent_pool):
        return False
    heads = recurrent_pool.shape[1]
    groups = (len(weights.conv) - heads * HEAD_DIM) // (2 * STATE_SIZE)
    has_enough = 2 * groups * num_sequences > num_sms(recurrent_pool.device)
    return heads // groups <= MOST_HEADS and has_enough


def suits_states(recurrent_pool: Tensor) -> bool:
    """Whether a program can go through these states, where `runs_gluon`."""
    return (
        recurrent_pool.dtype == torch.float32
        and recurrent_pool.shape[2:] == (HEAD_DIM, STATE_SIZE)
        and recurrent_pool.stride(0) % STATE_SIZE == 0
        and can_describe(recurrent_pool)
    )


def decode(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
) -> Tensor:
    """See `mamba2.mix`."""
    num_sequences, heads = len(slot_out), recurrent_pool.shape[1]
    channels, conv_width = weights.conv.shape
    inner = heads * HEAD_DIM
    groups = (channels - inner) // (2 * STATE_SIZE)
    output = projected.new_empty(num_sequences, inner)
    num_units = num_sequences * groups
    _decode_kernel[(min(num_units, 2 * num_sms(projected.device)),)](
        projected,
        projected.stride(0),
        weights.conv,
        weights.conv_bias,
        weights.rate,
        weights.dt_bias,
        *weights.dt_limit,
        weights.skip,
        weights.norm,
        weights.norm_eps,
        conv_pool,
        conv_pool.stride(0),
        describe_states(recurrent_pool),
        recurrent_pool,
        recurrent_pool.stride(0),
        slot_in,
        slot_out,
        output,
        num_units,
        GROUPS=groups,
        EACH=heads // groups,
        HEAD_DIM=HEAD_DIM,
        STATE_SIZE=STATE_SIZE,
        TAPS=conv_width,
        BEFORE_GATE=weights.norm_before_gate,
        STAGES=_STAGES,
        num_warps=NUM_WARPS,
        **OVERLAPPED,
    )
    return output


@quick
@gluon.jit(do_not_specialize=["num_units"], do_not_specialize_on_alignment=["slot_in", "slot_out"])
def _decode_kernel(
    projected,
    projected_stride,
    conv_weight,
    conv_bias,
    rate,
    dt_bias,
    dt_low,
    dt_high,
    skip,
    norm_weight,
    norm_eps,
    conv_pool,
    conv_stride,
    states,
    pool,
    slot_stride,
    slot_in,
    slot_out,
    output,
    num_units,
    GROUPS: gl.constexpr,
    EACH: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STATE_SIZE: gl.constexpr,
    TAPS: gl.constexpr,
    BEFORE_GATE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Every so many units, each a group of a sequence, EACH heads."""
    HEADS: gl.constexpr = GROUPS * EACH
    INNER: gl.constexpr = HEADS * HEAD_DIM
    CHANNELS: gl.constexpr = INNER + 2 * GROUPS * STATE_SIZE
    FIRST_B: gl.constexpr = INNER // STATE_SIZE
    SHAPE: gl.constexpr = [HEAD_DIM, STATE_SIZE]
    work = begin_work(
        states, slot_stride, slot_in, slot_out, num_units, SHAPE, GROUPS, EACH, STAGES
    )
    first, stride = work[4], work[5]

    o_p = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, STATE_SIZE, layout=gl.SliceLayout(0, STATE))
    o_c = gl.arange(0, HEAD_DIM, layout=CHANNEL)
    o_wide = gl.arange(0, STATE_SIZE, layout=CHANNEL)
    wait_for_inputs()
    launch_dependents()  # the output projection, which begins with its weights
    for unit in range(first, num_units, stride):
        number = (unit - first) // stride * EACH
        i_n, i_g = (unit // GROUPS).to(gl.int64), unit % GROUPS
        source = gl.load(slot_in + i_n).to(gl.int64)
        target = gl.load(slot_out + i_n).to(gl.int64)
        is_real = target >= 0
        p_token = projected + i_n * projected_stride
        inputs = p_token + INNER, conv_weight, conv_pool + source * conv_stride
        p_conv = conv_pool + target * conv_stride
        p_state = pool + target * slot_stride
        window_b = load_window(inputs, FIRST_B + i_g, STATE_SIZE, TAPS)
        window_c = load_window(inputs, FIRST_B + GROUPS + i_g, STATE_SIZE, TAPS)
        bias = bias_of(conv_bias, INNER + i_g * STATE_SIZE + o_wide)
        b_b = convolve(*window_b, TAPS, bias=bias)
        bias = bias_of(conv_bias, INNER + (GROUPS + i_g) * STATE_SIZE + o_wide)
        b_c = convolve(*window_c, TAPS, bias=bias)
        b_b = gl.convert_layout(b_b, gl.SliceLayout(0, STATE))[None, :]
        b_c = gl.convert_layout(b_c, gl.SliceLayout(0, STATE))[None, :]
        keep_window(window_b[0], p_conv, FIRST_B + i_g, is_real, STATE_SIZE, TAPS)
        keep_window(window_c[0], p_conv, FIRST_B + GROUPS + i_g, is_real, STATE_SIZE, TAPS)
        outputs, squares = (), 0.0
        for i_m in gl.static_range(EACH):
            i_h = i_g * EACH + i_m
            window_x = load_window(inputs, i_h, HEAD_DIM, TAPS)
            b_gate = gl.load(p_token + i_h * HEAD_DIM + o_p).to(gl.float32)
            bias = bias_of(conv_bias, i_h * HEAD_DIM + o_c)
            b_in = gl.load(p_token + INNER + CHANNELS + i_h)
            b_step = time_step(b_in, gl.load(dt_bias + i_h), dt_low, dt_high)
            decay, own_skip = gl.exp(b_step * gl.load(rate + i_h)), gl.load(skip + i_h)
            b_x = gl.convert_layout(convolve(*window_x, TAPS, bias=bias), gl.SliceLayout(1, STATE))
            keep_window(window_x[0], p_conv, i_h, is_real, HEAD_DIM, TAPS)

            b_state = take(work, number + i_m, STATE, BY_LINE, SHAPE, GROUPS, EACH, decay)
            b_state = gl.fma((b_x * b_step)[:, None], b_b, b_state)
            o_state = (i_h * HEAD_DIM + o_p)[:, None] * STATE_SIZE + o_k[None, :]
            gl.store(p_state + o_state, b_state, mask=is_real)
            b_y = gl.fma(b_x, own_skip, read_columns(b_state, b_c))
            b_gate = b_gate / (1 + gl.exp(-b_gate))
            if not BEFORE_GATE:
                b_y *= b_gate
            squares += add_squares(b_y)
            outputs += ((b_y, b_gate),)
        squares = _add_in_turn(squares)
        scale = gl.rsqrt(squares / (EACH * HEAD_DIM) + norm_eps)
        target = output, i_n, i_g, o_p, is_real
        _store_group(outputs, scale, norm_weight, target, EACH, INNER, BEFORE_GATE)


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
    """Those of all warps, from the first to the last."""
    warp = gl.arange(0, x.shape[0], layout=x.type.layout)
    total = 0.0
    for number in gl.static_range(x.shape[0]):
        total += gl.sum(gl.where(warp == number, x, 0.0), 0)
    return total


@gluon.jit
def bias_of(conv_bias, channel):
    """Of some channels' convolution, if there is one."""
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


@gluon.jit
def _store_group(
    outputs,
    scale,
    norm_weight,
    target,
    EACH: gl.constexpr,
    INNER: gl.constexpr,
    BEFORE_GATE: gl.constexpr,
):
    """Norm what a group's heads have read, and store it. `outputs` are theirs, each with the SiLU
    of its gate, if that was not taken yet."""
    output, sequence, group, row, is_real = target
    HEAD_DIM: gl.constexpr = row.shape[0]
    for member in gl.static_range(EACH):
        o_head = (group * EACH + member) * HEAD_DIM + row
        y, gate = outputs[member]
        y *= scale * gl.load(norm_weight + o_head)
        if BEFORE_GATE:
            y *= gate
        y = gl.where(is_real, y, 0.0)
        gl.store(output + sequence * INNER + o_head, y.to(output.dtype.element_ty))
