"""The WY representation of a chunk of KDA (Kimi Linear, arXiv 2510.26692, section 3): what doesn't
depend on the state before it.

No decay is divided by: over a chunk a channel's may be too small for a number. A later and an
earlier token are in different halves of one block of 2, 4, ... or C tokens, and the decay between
them is the product of that from the earlier one to the end of its half and that from there to the
later one. Neither exceeds 1, and for all pairs of one size of blocks a token has one of them. So
all products are matrix products, one for each size.

Legend: T tokens, N chunks, C tokens in a chunk, H heads, K head_dim.
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
from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

_CHANNELS = 32
"""Of a head at a time; all at once would be more than there are registers."""
_INTRA = {"num_warps": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBuffers:
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
    weights: KDAWeights,
    layout: ChunkLayout,
    shapes: PrefillShapes,
    chunks: ChunkBuffers,
) -> None:
    """Fill and change `chunks`, behind the convolution."""
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
        chunks.w,
        chunks.scores,
        chunks.decay,
        HEADS=shapes.value_heads,
        HEAD_DIM=shapes.key_dim,
        C=shapes.chunk,
        BLOCK_K=_CHANNELS,
        SPLIT=projected.is_cuda and projected.dtype != torch.float32,
        **_INTRA,
        **OVERLAPPED,
    )


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
    o_t = tl.arange(0, C)
    in_chunk = o_t < chunk_tokens
    p_beta = projected + (begin + o_t) * projected_stride + 3 * HEADS * HEAD_DIM + i_h
    b_beta = sigmoid(tl.load(p_beta, in_chunk, 0))
    rate = tl.load(decay_rate + i_h)
    row = i_h * tokens + begin + o_t[:, None]
    p_f = decay_inputs + (begin + o_t)[:, None] * (HEADS * HEAD_DIM) + i_h * HEAD_DIM
    p_bias = decay_bias + i_h * HEAD_DIM
    p_q = query_key + row * HEAD_DIM
    p_k = p_q + HEADS * tokens * HEAD_DIM

    b_qk = tl.zeros([C, C], tl.float32)
    b_kk = tl.zeros([C, C], tl.float32)
    b_own = tl.zeros([C], tl.float32)
    for first in range(0, HEAD_DIM, BLOCK_K):
        o_k = first + tl.arange(0, BLOCK_K)
        b_g = _log_decays(p_f, p_bias, rate, in_chunk, o_k, HEAD_DIM)
        in_k = in_chunk[:, None] & (o_k < HEAD_DIM)[None, :]
        b_q = tl.load(p_q + o_k[None, :], in_k, 0)
        b_k = tl.load(p_k + o_k[None, :], in_k, 0)
        b_own += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
        b_qk, b_kk = _add_pairs(b_q, b_k, b_g, o_t, b_qk, b_kk, C, BLOCK_K)
    b_qk += tl.where(o_t[:, None] == o_t[None, :], b_own[:, None], 0)
    p_scores = scores + row * C + o_t[None, :]
    tl.store(p_scores, b_qk.to(scores.dtype.element_ty), in_chunk[:, None] & (o_t < C)[None, :])
    b_inv = invert(b_kk * b_beta[:, None], o_t, C, SPLIT)
    # The factors of the right sides' rows stand in the inverse's columns.
    b_inv = (b_inv * b_beta[None, :]).to(query_key.dtype.element_ty)

    for first in range(0, HEAD_DIM, BLOCK_K):
        o_k = first + tl.arange(0, BLOCK_K)
        is_k = o_k < HEAD_DIM
        b_g = _log_decays(p_f, p_bias, rate, in_chunk, o_k, HEAD_DIM)
        # Tokens past the chunk's end decay nothing, so the last row holds the whole chunk's.
        b_last = tl.sum(tl.where((o_t == C - 1)[:, None], b_g, 0), 0)
        tl.store(decay + (i_t * HEADS + i_h) * HEAD_DIM + o_k, tl.exp(b_last), is_k)
        in_k = in_chunk[:, None] & is_k[None, :]
        b_q = tl.load(p_q + o_k[None, :], in_k, 0)
        b_k = tl.load(p_k + o_k[None, :], in_k, 0)
        from_begin = tl.exp(b_g)
        tl.store(p_q + o_k[None, :], (b_q.to(tl.float32) * from_begin).to(b_q.dtype), in_k)
        to_end = tl.exp(b_last[None, :] - b_g)
        wide_k = b_k.to(tl.float32)
        tl.store(p_k + o_k[None, :], (wide_k * to_end).to(b_k.dtype), in_k)
        at = row * HEAD_DIM + o_k[None, :]
        b_w = tl.dot(b_inv, (wide_k * from_begin).to(b_k.dtype), input_precision="ieee")
        tl.store(w + at, b_w.to(b_k.dtype), in_k)
        b_v = tl.load(values + at, in_k, 0)
        b_u = tl.dot(b_inv, b_v, input_precision="ieee")
        tl.store(values + at, b_u.to(b_v.dtype), in_k)


@triton.jit
def _log_decays(p_f, p_bias, rate, in_chunk, o_k, HEAD_DIM: tl.constexpr):
    """[C, BLOCK_K] of some channels, added up from the chunk's begin."""
    is_k = o_k < HEAD_DIM
    in_k = in_chunk[:, None] & is_k[None, :]
    inputs = tl.load(p_f + o_k[None, :], in_k, 0).to(tl.float32)
    inputs += tl.load(p_bias + o_k, is_k, 0)[None, :]
    return tl.cumsum(tl.where(in_k, rate * softplus(inputs), 0), 0)


@triton.jit
def _add_pairs(b_q, b_k, b_g, o_t, b_qk, b_kk, C: tl.constexpr, BLOCK_K: tl.constexpr):
    """`b_qk` and `b_kk` [C, C] with decayed products of some channels of queries and keys, and of
    keys and keys, added; those of a later token's with an earlier one's."""
    is_later = o_t[:, None] > o_t[None, :]
    apart = o_t[:, None] ^ o_t[None, :]
    wide_q, wide_k = b_q.to(tl.float32), b_k.to(tl.float32)
    # Rolled up: all sizes at once would be more than there are registers.
    for power in range(6):
        # Halves of 2 ** power tokens; their blocks' first halves end with these.
        end = (o_t | ((2 << power) - 1)) - (1 << power)
        b_end = tl.gather(b_g, tl.broadcast_to(end[:, None], [C, BLOCK_K]), 0)
        factor = tl.exp(-tl.abs(b_g - b_end))
        right = (wide_k * factor).to(b_k.dtype)
        left = (wide_q * factor).to(b_q.dtype)
        is_pair = is_later & ((apart >> power) == 1)
        products = tl.dot(left, tl.trans(right), input_precision="ieee")
        b_qk += tl.where(is_pair, products, 0)
        products = tl.dot(right, tl.trans(right), input_precision="ieee")
        b_kk += tl.where(is_pair, products, 0)
    return b_qk, b_kk
