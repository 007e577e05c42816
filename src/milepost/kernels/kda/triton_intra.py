"""The WY representation of a chunk of KDA (Kimi Linear, arXiv 2510.26692, section 3): what doesn't
depend on the state before it.

No decay is divided by: over a chunk a channel's may be too small for a number. Between two tokens
of one block of 16 it is taken from the difference of their sums; between blocks it is the product
of the decays up to the later block's begin and from there, neither of which exceeds 1.

Legend: T tokens, N chunks, C tokens in a chunk, B = C / 16 blocks, H heads, K head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.activations import sigmoid, softplus
from milepost.kernels.chunks import UNSPECIALISED, ChunkLayout
from milepost.kernels.gated_delta.triton_shapes import PrefillShapes
from milepost.kernels.gated_delta.triton_wy import invert
from milepost.kernels.kda.weights import MixerWeights
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

_CHANNELS = 32
"""Of a head at a time, where products are summed channel by channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """What the launches of a prefill hand on."""

    query_key: Tensor
    """[2 * H, T, K]; from `intra` on queries are decayed from their chunk's begin, keys to its
    end."""
    values: Tensor
    """[H, T, K]; from `intra` on what tokens add for their keys, as if the state before the chunk
    were zero; from `chunk_fwd_h` on what they do add."""
    w: Tensor
    """[H, T, K], times the state before the chunk what tokens add less."""
    scores: Tensor
    """[H, T, C], decayed products of queries and keys, zero for later keys."""
    decay: Tensor
    """[N, H, K] float32, over the whole chunk."""


def intra(
    projected: Tensor,
    decay_inputs: Tensor,
    weights: MixerWeights,
    layout: ChunkLayout,
    shapes: PrefillShapes,
    chunks: Chunks,
) -> None:
    """Fill and change `chunks`, behind the convolution, in two launches."""
    heads, num_tokens, head_dim = chunks.values.shape
    blocks = chunks.decay.new_empty(2 * heads, num_tokens, 16)
    parts = shapes.chunk // 16
    _blocks_kernel[(heads, len(layout.chunk_size) * parts)](
        num_tokens,
        decay_inputs,
        weights.decay_rate,
        weights.decay_bias,
        layout.chunk_begin,
        layout.chunk_size,
        chunks.query_key,
        blocks,
        HEADS=heads,
        HEAD_DIM=head_dim,
        PARTS=parts,
        BLOCK_K=_CHANNELS,
        num_warps=1,
        **OVERLAPPED,
    )
    _intra_kernel[(shapes.value_heads, len(layout.chunk_size))](
        projected,
        projected.stride(0),
        len(projected),
        decay_inputs,
        weights.decay_rate,
        weights.decay_bias,
        layout.chunk_begin,
        layout.chunk_size,
        chunks.query_key,
        chunks.values,
        blocks,
        chunks.w,
        chunks.scores,
        chunks.decay,
        HEADS=shapes.value_heads,
        HEAD_DIM=shapes.key_dim,
        C=shapes.chunk,
        BLOCK_K=shapes.blocks["BLOCK_K"],
        SPLIT=projected.is_cuda and projected.dtype != torch.float32,
        num_warps=8,
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def _blocks_kernel(
    num_tokens,
    decay_inputs,
    decay_rate,
    decay_bias,
    chunk_begin,
    chunk_size,
    query_key,
    blocks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A head of up to 16 tokens of a chunk: decayed products of their queries and keys, and of keys
    and keys, into `blocks` [2 * H, T, 16]; zero for later keys.

    One warp holds a few channels of all rows, so that a token's row is taken from registers.
    """
    i_h, i_t = tl.program_id(0), tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
    let_next_start()
    left = tl.load(chunk_size + i_t) - part * 16
    wait_for_inputs()
    if left <= 0:
        return
    begin = tl.load(chunk_begin + i_t).to(tl.int64) + part * 16
    tokens = tl.cast(num_tokens, tl.int64)
    row = tl.arange(0, 16)
    in_block = row < left
    rate = tl.load(decay_rate + i_h)
    b_qk = tl.zeros([16, 16], tl.float32)
    b_kk = tl.zeros([16, 16], tl.float32)
    # Rolled up: all columns of all channels at once would be far more than there are registers.
    for first in range(0, HEAD_DIM, BLOCK_K):
        o_k = first + tl.arange(0, BLOCK_K)
        is_k = o_k < HEAD_DIM
        in_k = in_block[:, None] & is_k[None, :]
        o_head = i_h * HEAD_DIM + o_k
        p_f = decay_inputs + (begin + row)[:, None] * (HEADS * HEAD_DIM) + o_head[None, :]
        bias = tl.load(decay_bias + o_head, is_k, 0)
        inputs = tl.load(p_f, in_k, 0).to(tl.float32) + bias[None, :]
        b_g = tl.cumsum(tl.where(in_k, rate * softplus(inputs), 0), 0)
        p_q = query_key + (i_h * tokens + begin + row)[:, None] * HEAD_DIM + o_k[None, :]
        b_q = tl.load(p_q, in_k, 0).to(tl.float32)
        b_k = tl.load(p_q + HEADS * tokens * HEAD_DIM, in_k, 0).to(tl.float32)
        for column in range(16):
            is_own = (row == column)[:, None]
            own_k = tl.sum(tl.where(is_own, b_k, 0), 0)[None, :]
            own_g = tl.sum(tl.where(is_own, b_g, 0), 0)[None, :]
            is_later = (row >= column)[:, None]
            since = tl.exp(tl.where(is_later, b_g - own_g, float("-inf"))) * own_k
            is_column = (row == column)[None, :]
            b_qk += tl.where(is_column, tl.sum(b_q * since, 1)[:, None], 0)
            b_kk += tl.where(is_column, tl.sum(b_k * since, 1)[:, None], 0)
    p_blocks = blocks + (i_h * tokens + begin + row)[:, None] * 16 + row[None, :]
    tl.store(p_blocks, b_qk, in_block[:, None] & (row < 16)[None, :])
    p_blocks += HEADS * tokens * 16
    tl.store(p_blocks, b_kk, in_block[:, None] & (row < 16)[None, :])


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def _intra_kernel(
    projected,
    projected_stride,
    num_tokens,
    decay_inputs,
    decay_rate,
    decay_bias,
    chunk_begin,
    chunk_size,
    query_key,
    values,
    blocks,
    w,
    scores,
    decay,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One head of a chunk."""
    i_h, i_t = tl.program_id(0), tl.program_id(1)
    let_next_start()
    chunk_tokens = tl.load(chunk_size + i_t)
    wait_for_inputs()
    if chunk_tokens <= 0:
        return
    begin = tl.load(chunk_begin + i_t).to(tl.int64)
    tokens = tl.cast(num_tokens, tl.int64)
    o_t, o_k = tl.arange(0, C), tl.arange(0, BLOCK_K)
    in_chunk, is_k = o_t < chunk_tokens, o_k < HEAD_DIM
    in_k = in_chunk[:, None] & is_k[None, :]
    o_head = i_h * HEAD_DIM + o_k
    p_beta = projected + (begin + o_t) * projected_stride + 3 * HEADS * HEAD_DIM + i_h
    b_beta = sigmoid(tl.load(p_beta, in_chunk, 0))

    p_f = decay_inputs + (begin + o_t)[:, None] * (HEADS * HEAD_DIM) + o_head[None, :]
    bias = tl.load(decay_bias + o_head, is_k, 0)
    inputs = tl.load(p_f, in_k, 0).to(tl.float32) + bias[None, :]
    b_g = tl.where(in_k, tl.load(decay_rate + i_h) * softplus(inputs), 0)
    b_g = tl.cumsum(b_g, 0)
    # Tokens past the chunk's end decay nothing, so the last row holds the whole chunk's.
    b_last = tl.sum(tl.where((o_t == C - 1)[:, None], b_g, 0), 0)
    tl.store(decay + (i_t * HEADS + i_h) * HEAD_DIM + o_k, tl.exp(b_last), is_k)

    p_q = query_key + (i_h * tokens + begin + o_t)[:, None] * HEAD_DIM + o_k[None, :]
    p_k = p_q + HEADS * tokens * HEAD_DIM
    b_q, b_k = tl.load(p_q, in_k, 0), tl.load(p_k, in_k, 0)
    b_qk, b_kk = _between_blocks(b_q, b_k, b_g, o_t, C)
    b_qk += _diagonal(blocks, i_h * tokens + begin, in_chunk, o_t)
    b_kk += _diagonal(blocks, (HEADS + i_h) * tokens + begin, in_chunk, o_t)

    p_scores = scores + (i_h * tokens + begin + o_t)[:, None] * C + o_t[None, :]
    tl.store(p_scores, b_qk.to(scores.dtype.element_ty), in_chunk[:, None] & (o_t < C)[None, :])
    is_before = o_t[:, None] > o_t[None, :]
    b_inv = invert(tl.where(is_before, b_kk, 0) * b_beta[:, None], o_t, C, SPLIT)
    from_begin = tl.exp(b_g)
    tl.store(p_q, (b_q.to(tl.float32) * from_begin).to(b_q.dtype), in_k)
    to_end = tl.exp(b_last[None, :] - b_g)
    wide_k = b_k.to(tl.float32)
    tl.store(p_k, (wide_k * to_end).to(b_k.dtype), in_k)
    # The factors of the right sides' rows stand in the inverse's columns.
    b_inv = (b_inv * b_beta[None, :]).to(b_k.dtype)
    at = (i_h * tokens + begin + o_t)[:, None] * HEAD_DIM + o_k[None, :]
    b_w = tl.dot(b_inv, (wide_k * from_begin).to(b_k.dtype), input_precision="ieee")
    tl.store(w + at, b_w.to(b_k.dtype), in_k)
    b_v = tl.load(values + at, in_k, 0)
    b_u = tl.dot(b_inv, b_v, input_precision="ieee")
    tl.store(values + at, b_u.to(b_v.dtype), in_k)


@triton.jit
def _between_blocks(b_q, b_k, b_g, o_t, C: tl.constexpr):
    """[C, C], decayed products of queries and keys, and of keys and keys, of tokens in different
    blocks; zero in a block."""
    b_qk = tl.zeros([C, C], tl.float32)
    b_kk = tl.zeros([C, C], tl.float32)
    block = o_t // 16
    for i_b in tl.static_range(1, C // 16):
        b_first = tl.sum(tl.where((o_t == 16 * i_b)[:, None], b_g, 0), 0)[None, :]
        is_later, is_earlier = (block == i_b)[:, None], (block < i_b)[:, None]
        later = tl.exp(tl.where(is_later, b_g - b_first, float("-inf")))
        earlier = tl.exp(tl.where(is_earlier, b_first - b_g, float("-inf")))
        right = tl.trans((b_k.to(tl.float32) * earlier).to(b_k.dtype))
        left = (b_q.to(tl.float32) * later).to(b_q.dtype)
        b_qk = tl.dot(left, right, b_qk, input_precision="ieee")
        left = (b_k.to(tl.float32) * later).to(b_k.dtype)
        b_kk = tl.dot(left, right, b_kk, input_precision="ieee")
    return b_qk, b_kk


@triton.jit
def _diagonal(blocks, row, in_chunk, o_t):
    """[C, C], zero but for the blocks of 16 on the diagonal: rows [C, 16] from `row` on."""
    at = (row + o_t)[:, None] * 16 + (o_t % 16)[None, :]
    is_own = (o_t // 16)[:, None] == (o_t // 16)[None, :]
    return tl.load(blocks + at, in_chunk[:, None] & is_own, 0)
