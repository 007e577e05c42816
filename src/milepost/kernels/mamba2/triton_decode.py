"""Mamba2's token mixer for one new token a sequence, in one launch.

Some heads of a sequence in each program: convolution, time steps, states, what is read from them.
The heads of a group share B and C, and their norm; so the last program of a group to arrive, when
all have read the convolution's states of B and C, moves these on and norms the group. Which one
that is changes no bit: it reads what the others have stored. A slot that is written is read by no
other sequence, so slot_out may be slot_in.

Legend: D sequences, H heads, P head_dim, G groups, K state_size, J taps; I = H * P entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.conv.triton_parts import convolve_one, keep_window
from milepost.kernels.decode_layout import DecodeLayout
from milepost.kernels.device import num_sms, runs_gluon
from milepost.kernels.mamba2.triton_norm import finish_group
from milepost.kernels.mamba2.triton_parts import advance, sizes_of, time_step
from milepost.kernels.mamba2.weights import Mamba2Weights
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

_WARPS, _ENTRIES = 4, 2048
"""Warps for each head, or as many as have so many entries of its state each, if these are more."""
_HEADS, _FEW_PROGRAMS = 2, 4
"""Heads of a program, where there are so many programs for each SM; else one."""


def decode(
    projected: Tensor,
    weights: Mamba2Weights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
    layout: DecodeLayout,
) -> Tensor:
    """See `mamba2.mix`."""
    num_sequences = len(slot_out)
    if runs_gluon(projected):
        from milepost.kernels.mamba2 import triton_hopper

        if triton_hopper.suits(weights, recurrent_pool, num_sequences):
            pools = conv_pool, recurrent_pool
            return triton_hopper.decode(projected, weights, *pools, slot_in, slot_out)
    _, heads, head_dim, state_size = recurrent_pool.shape
    sizes, pad = sizes_of(weights, recurrent_pool), triton.next_power_of_2
    inner, groups = heads * head_dim, sizes["GROUPS"]
    y = projected.new_empty(num_sequences, inner, dtype=torch.float32)
    output = projected.new_empty(num_sequences, inner)
    each = choose_heads(heads, groups, num_sequences, projected.device)
    _decode[(heads // each, num_sequences)](
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
        recurrent_pool,
        recurrent_pool.stride(0),
        slot_in,
        slot_out,
        layout.arrivals,
        y,
        output,
        **sizes,
        BEFORE_GATE=weights.norm_before_gate,
        EACH=each,
        BLOCK_P=pad(each * head_dim),
        BLOCK_W=pad(inner // groups),
        EARLY=heads // each * num_sequences <= num_sms(projected.device),
        num_warps=choose_warps(head_dim, state_size, each),
        **OVERLAPPED,
    )
    return output


def choose_heads(heads: int, groups: int, num_sequences: int, device: torch.device) -> int:
    """Heads of a program."""
    are_few = heads * num_sequences < _FEW_PROGRAMS * num_sms(device)
    return 1 if are_few or heads // groups % _HEADS else _HEADS


def choose_warps(head_dim: int, state_size: int, num_heads: int) -> int:
    """Warps of a program of so many heads."""
    entries = triton.next_power_of_2(head_dim) * triton.next_power_of_2(state_size)
    return min(16, max(_WARPS, entries // _ENTRIES) * num_heads)


@triton.jit(do_not_specialize_on_alignment=["slot_in", "slot_out", "arrivals"])
def _decode(
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
    pool,
    slot_stride,
    slot_in,
    slot_out,
    arrivals,
    y,
    output,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BEFORE_GATE: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    EARLY: tl.constexpr,
):
    """EACH heads: their states [EACH * P, K] move on by one token and are read; the last heads of a
    group also write the group's part of `output` [D, I]."""
    i_head, i_sequence = tl.program_id(0) * EACH, tl.program_id(1).to(tl.int64)
    i_group = i_head // (HEADS // GROUPS)
    if EARLY:
        let_next_start()
    o_p, o_k = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    is_p, is_k = o_p < EACH * HEAD_DIM, o_k < STATE_SIZE
    heads = i_head + o_p // HEAD_DIM
    inner: tl.constexpr = HEADS * HEAD_DIM
    p_output = output + i_sequence * inner
    written = tl.load(slot_out + i_sequence).to(tl.int64)
    if written < 0:
        # Padding waits too: a launch that is nothing else must not end before the one before it.
        wait_for_inputs()
        tl.store(p_output + i_head * HEAD_DIM + o_p, tl.zeros([BLOCK_P], y.dtype.element_ty), is_p)
        return
    source = tl.load(slot_in + i_sequence).to(tl.int64)
    o_state = (i_head * HEAD_DIM + o_p[:, None]) * STATE_SIZE + o_k[None, :]
    in_state = is_p[:, None] & is_k[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_state = tl.load(pool + source * slot_stride + o_state, in_state, 0).to(tl.float32)
    first_b = inner + i_group * STATE_SIZE
    first_c = first_b + GROUPS * STATE_SIZE
    p_conv = conv_pool + source * conv_stride
    p_token = projected + i_sequence * projected_stride
    wait_for_inputs()

    args = p_conv, p_token + inner, conv_weight, conv_bias
    o_x = i_head * HEAD_DIM + o_p
    b_x, window_x = convolve_one(*args, o_x, is_p, TAPS, BLOCK_TAPS)
    b_b, window_b = convolve_one(*args, first_b + o_k, is_k, TAPS, BLOCK_TAPS)
    b_c, window_c = convolve_one(*args, first_c + o_k, is_k, TAPS, BLOCK_TAPS)
    inputs = tl.load(p_token + 2 * inner + 2 * GROUPS * STATE_SIZE + heads, is_p, 0)
    step = time_step(inputs, tl.load(dt_bias + heads, is_p, 0), dt_low, dt_high)
    b_state = advance(b_state, b_x, b_b, step, tl.load(rate + heads, is_p, 0))
    b_y = tl.sum(b_state * b_c[None, :], 1) + tl.load(skip + heads, is_p, 0) * b_x
    tl.store(y + i_sequence * inner + o_x, b_y, is_p)

    # All of the slots has been read by this program, and what the group's norm reads is stored.
    tl.debug_barrier()
    p_state = pool + written * slot_stride + o_state
    tl.store(p_state, b_state.to(pool.dtype.element_ty), in_state)
    p_conv = conv_pool + written * conv_stride
    keep_window(p_conv, window_x, o_x, is_p, TAPS, BLOCK_TAPS)
    p_arrivals = arrivals + i_sequence * GROUPS + i_group
    arrived = tl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu")
    if arrived == HEADS // GROUPS // EACH - 1:
        tl.store(p_arrivals, 0)
        keep_window(p_conv, window_b, first_b + o_k, is_k, TAPS, BLOCK_TAPS)
        keep_window(p_conv, window_c, first_c + o_k, is_k, TAPS, BLOCK_TAPS)
        token = y + i_sequence * inner, p_token, p_output, norm_weight, norm_eps
        finish_group(*token, i_group, BEFORE_GATE, inner // GROUPS, BLOCK_W)
