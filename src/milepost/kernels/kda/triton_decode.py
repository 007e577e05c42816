"""KDA's token mixer for one new token a sequence, in one launch.

A head of a sequence in each program: no two heads share a channel of the convolution. A slot that
is written is read by no other sequence, so slot_out may be slot_in.

Legend: D sequences, C channels, J taps, H heads, K head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.activations import sigmoid, softplus
from milepost.kernels.conv.triton_parts import convolve_one, keep_window
from milepost.kernels.kda.triton_parts import gated_norm
from milepost.kernels.kda.weights import MixerWeights
from milepost.kernels.overlap import OVERLAPPED, wait_for_inputs

_DECODE = {"num_warps": 8}


def decode(
    projected: Tensor,
    decay_inputs: Tensor,
    gate: Tensor,
    weights: MixerWeights,
    conv_pool: Tensor,
    recurrent_pool: Tensor,
    slot_in: Tensor,
    slot_out: Tensor,
) -> Tensor:
    """See `kda.mix`."""
    num_sequences = len(slot_out)
    _, heads, head_dim, _ = recurrent_pool.shape
    conv_width = weights.conv.shape[1]
    output = projected.new_empty(num_sequences, heads * head_dim)
    _decode[(heads, num_sequences)](
        projected,
        projected.stride(0),
        decay_inputs,
        gate,
        weights.conv,
        weights.decay_rate,
        weights.decay_bias,
        weights.norm,
        weights.norm_eps,
        conv_pool,
        conv_pool.stride(0),
        recurrent_pool,
        recurrent_pool.stride(0),
        slot_in,
        slot_out,
        output,
        HEADS=heads,
        HEAD_DIM=head_dim,
        TAPS=conv_width,
        BLOCK_TAPS=triton.next_power_of_2(conv_width),
        BLOCK=triton.next_power_of_2(head_dim),
        **_DECODE,
        **OVERLAPPED,
    )
    return output


@triton.jit(do_not_specialize_on_alignment=["slot_in", "slot_out"])
def _decode(
    projected,
    projected_stride,
    decay_inputs,
    gate,
    conv_weight,
    decay_rate,
    decay_bias,
    norm_weight,
    norm_eps,
    conv_pool,
    conv_stride,
    pool,
    slot_stride,
    slot_in,
    slot_out,
    output,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head: its state [K, K] moves on by one token, is read, and the gated norm of what was
    read goes to `output` [D, H * K]."""
    i_head, i_sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    is_k = o_k < HEAD_DIM
    size: tl.constexpr = HEADS * HEAD_DIM
    o_head = i_head * HEAD_DIM + o_k
    o_token = i_sequence * size + o_head
    written = tl.load(slot_out + i_sequence).to(tl.int64)
    if written < 0:
        # Padding waits too: a launch that is nothing else must not end before the one before it.
        wait_for_inputs()
        tl.store(output + o_token, tl.zeros([BLOCK], output.dtype.element_ty), is_k)
        return
    source = tl.load(slot_in + i_sequence).to(tl.int64)
    o_state = (i_head * HEAD_DIM + o_k[:, None]) * HEAD_DIM + o_k[None, :]
    in_state = is_k[:, None] & is_k[None, :]
    # What an earlier step wrote may be read before the kernels of this one have ended.
    b_state = tl.load(pool + source * slot_stride + o_state, in_state, 0).to(tl.float32)
    rate, bias = tl.load(decay_rate + i_head), tl.load(decay_bias + o_head, is_k, 0)
    b_norm = tl.load(norm_weight + o_k, is_k, 0)
    wait_for_inputs()

    p_conv = conv_pool + source * conv_stride
    p_token = projected + i_sequence * projected_stride
    args = p_conv, p_token, conv_weight, None
    b_q, window_q = convolve_one(*args, o_head, is_k, TAPS, BLOCK_TAPS)
    b_k, window_k = convolve_one(*args, size + o_head, is_k, TAPS, BLOCK_TAPS)
    b_v, window_v = convolve_one(*args, 2 * size + o_head, is_k, TAPS, BLOCK_TAPS)
    b_q *= tl.rsqrt(tl.sum(b_q * b_q) + 1e-6) * HEAD_DIM**-0.5
    b_k *= tl.rsqrt(tl.sum(b_k * b_k) + 1e-6)
    beta = sigmoid(tl.load(p_token + 3 * size + i_head))
    b_g = rate * softplus(tl.load(decay_inputs + o_token, is_k, 0).to(tl.float32) + bias)

    b_state *= tl.exp(b_g)[:, None]
    change = (b_v - tl.sum(b_state * b_k[:, None], 0)) * beta
    b_state += b_k[:, None] * change[None, :]
    # All of the slots has been read by this program.
    tl.debug_barrier()
    p_state = pool + written * slot_stride + o_state
    tl.store(p_state, b_state.to(pool.dtype.element_ty), in_state)
    p_conv = conv_pool + written * conv_stride
    keep_window(p_conv, window_q, o_head, is_k, TAPS, BLOCK_TAPS)
    keep_window(p_conv, window_k, size + o_head, is_k, TAPS, BLOCK_TAPS)
    keep_window(p_conv, window_v, 2 * size + o_head, is_k, TAPS, BLOCK_TAPS)
    b_o = tl.sum(b_state * b_q[:, None], 0)
    b_gate = tl.load(gate + o_token, is_k, 0)
    b_o = gated_norm(b_o, b_norm, b_gate, norm_eps, HEAD_DIM, 0)
    tl.store(output + o_token, b_o.to(output.dtype.element_ty), is_k)
