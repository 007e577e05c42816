"""The WY representation of a chunk of KDA (Kimi Linear, arXiv 2510.26692, section 3): the part that
doesn't depend on the state before the chunk.

Channels that decay little take one matrix product for all pairs of tokens: both the decay from the
middle of the chunk to a token and its inverse are representable. For the others nothing is divided
by a decay, which over a chunk may underflow. Two tokens of a chunk are in different halves of
exactly one block of 2, 4, ... or C tokens. The decay between them is the product of two factors,
from the earlier token to the end of its half and from there to the later token, and neither exceeds
1. A token has one such factor for all pairs with the same size of block, so there is one matrix
product for each size.

Legend: T tokens, N chunks, C tokens in a chunk, H heads, K head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import LOG2_E, sigmoid
from milepost.kernels.recurrent.mixer import MixerSizes
from milepost.kernels.recurrent.portable.delta import invert, split, splits
from milepost.kernels.recurrent.portable.gated_delta import log_decays
from milepost.kernels.recurrent.structures import ChunkTensors, Mixer, PrefillChunks

_CHANNELS = tl.constexpr(64)
"""Channels of a head per iteration; all at once do not fit the registers."""
_MOST = {torch.float16: 6.0}
"""Largest log2 decay of half a chunk for which decays and their inverses are representable in the
dtype."""
_MOST_OF_OTHERS = 100.0


def intra(mixer: Mixer, chunk: int, chunks: PrefillChunks, tensors: ChunkTensors) -> None:
    """Fills and changes `tensors`, after the convolution."""
    sizes, like = mixer.sizes, tensors.v
    form = IntraForm(sizes, chunk, _MOST.get(like.dtype, _MOST_OF_OTHERS), splits(like))
    operands = like.shape[1], mixer.inputs, mixer.weights, chunks, tensors
    options = {"num_warps": 4, "num_stages": 2, **OVERLAPPED}
    _intra_kernel[(sizes.heads, len(chunks.size))](*operands, FORM=form, **options)


class IntraForm(NamedTuple):
    """Constants of the kernel."""

    sizes: MixerSizes
    chunk: int
    most: float
    """See `_MOST`."""
    splits: bool
    """See `delta.splits`."""


class HeadPlaces(NamedTuple):
    """Pointers to a chunk's tokens of a head: rows [C, 1], then those of the head alone."""

    decay_inputs: Any
    query: Any
    key: Any
    w: Any
    decay_bias: Any
    decay: Any


class PairSums(NamedTuple):
    """Products of pairs of tokens, summed over channels."""

    qk: Any
    kk: Any
    """[C, C], decayed."""
    own: Any
    """[C], each query with its own key."""


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["chunks"])
def _intra_kernel(num_tokens, inputs, weights, chunks, tensors, FORM: tl.constexpr):
    """Handles one head of a chunk: stores decayed queries and keys, w, u, scores and the chunk's
    decays."""
    HEADS: tl.constexpr = FORM.sizes.heads
    HEAD_DIM: tl.constexpr = FORM.sizes.shared
    C: tl.constexpr = FORM.chunk
    SPLIT: tl.constexpr = FORM.splits
    i_h, i_t = tl.program_id(0), tl.program_id(1)
    launch_dependents()
    chunk_tokens = tl.load(chunks.size + i_t)
    wait_for_inputs()
    if chunk_tokens <= 0:
        return
    begin = tl.load(chunks.begin + i_t).to(tl.int64)
    tokens = tl.cast(num_tokens, tl.int64)
    o_t = tl.arange(0, C)
    in_chunk = o_t < chunk_tokens
    p_beta = inputs.strengths.base + (begin + o_t) * inputs.strengths.stride + i_h
    b_beta = sigmoid(tl.load(p_beta, in_chunk, 0))
    rate = tl.load(weights.decay_rate + i_h)
    row = i_h * tokens + begin + o_t[:, None]
    p_q = tensors.query_key + row * HEAD_DIM
    at = HeadPlaces(
        inputs.decays.base + (begin + o_t)[:, None] * inputs.decays.stride + i_h * HEAD_DIM,
        p_q,
        p_q + HEADS * tokens * HEAD_DIM,
        tensors.w + row * HEAD_DIM,
        weights.decay_bias + i_h * HEAD_DIM,
        tensors.decay + (i_t * HEADS + i_h) * HEAD_DIM,
    )

    b_qk = tl.zeros([C, C], tl.float32)
    b_kk = tl.zeros([C, C], tl.float32)
    b_own = tl.zeros([C], tl.float32)
    signs = _signs(o_t, C // 2 - 1, SPLIT)
    for first in range(0, HEAD_DIM, _CHANNELS):
        o_k = first + tl.arange(0, _CHANNELS)
        sums = PairSums(b_qk, b_kk, b_own)
        b_qk, b_kk, b_own = _take_channels(at, sums, o_t, o_k, in_chunk, rate, signs, FORM)

    is_later = o_t[:, None] > o_t[None, :]
    b_qk = tl.where(is_later, b_qk, tl.where(o_t[:, None] == o_t[None, :], b_own[:, None], 0))
    p_scores = tensors.scores + row * C + o_t[None, :]
    tl.store(
        p_scores, b_qk.to(tensors.scores.dtype.element_ty), in_chunk[:, None] & (o_t < C)[None, :]
    )
    b_inv = invert(tl.where(is_later, b_kk * b_beta[:, None], 0), o_t, C, SPLIT)
    # The factors of the right sides' rows stand in the inverse's columns.
    b_inv = (b_inv * b_beta[None, :]).to(tensors.v.dtype.element_ty)

    # Other threads read what was stored above.
    tl.debug_barrier()
    for first in range(0, HEAD_DIM, _CHANNELS):
        o_k = first + tl.arange(0, _CHANNELS)
        in_k = in_chunk[:, None] & (o_k < HEAD_DIM)[None, :]
        _multiply(b_inv, tensors.w, tensors.v, row * HEAD_DIM + o_k[None, :], in_k)


@triton.jit
def _signs(o_t, middle, SPLIT: tl.constexpr):
    """Returns the matrix [C, C] that sums a column from the row after the middle on; before the
    middle sums are negative."""
    signs = tl.where(o_t[:, None] > middle, 1.0, -1.0)
    signs = tl.where(_between(tl.minimum(o_t, middle), tl.maximum(o_t, middle), o_t), signs, 0)
    return signs.to(tl.bfloat16 if SPLIT else tl.float32)


@triton.jit
def _take_channels(at, sums, o_t, o_k, in_chunk, rate, signs, FORM: tl.constexpr):
    """Adds products of pairs of tokens in some channels to `sums`; leaves queries and keys decayed,
    and the channels' decays over the chunk."""
    SPLIT: tl.constexpr = FORM.splits
    b_qk, b_kk, b_own = sums
    p_q, p_k = at.query + o_k[None, :], at.key + o_k[None, :]
    is_k, is_first = o_k < FORM.sizes.shared, o_t < FORM.chunk // 2
    in_k = in_chunk[:, None] & is_k[None, :]
    b_f = tl.load(at.decay_inputs + o_k[None, :], in_k, 0).to(tl.float32)
    b_q = tl.load(p_q, in_k, 0)
    b_k = tl.load(p_k, in_k, 0)
    b_f += tl.load(at.decay_bias + o_k, is_k, 0)[None, :]
    # Log decays, base 2: of each token, of each half of the chunk, and relative to the end of the
    # first half.
    b_a = _log_decays(rate, b_f, in_k, FORM)
    b_before = tl.sum(tl.where(is_first[:, None], b_a, 0), 0)
    b_after = tl.sum(tl.where(is_first[:, None], 0, b_a), 0)
    parts = split(b_a) if SPLIT else (b_a,)
    b_d = _times(signs, parts)
    wide_q, wide_k = b_q.to(tl.float32), b_k.to(tl.float32)
    b_own += tl.sum(wide_q * wide_k, 1)
    if tl.min(tl.minimum(b_before, b_after)) > -FORM.most:
        b_qk, b_kk = _add_mild_pairs(b_q, b_k, b_d, b_qk, b_kk)
    else:
        b_qk, b_kk = _add_pairs(b_q, b_k, parts, o_t, b_qk, b_kk)
    tl.store(at.decay + o_k, tl.exp2(b_before + b_after), is_k)
    from_begin = tl.exp2(b_d + b_before[None, :])
    to_end = tl.exp2(b_after[None, :] - b_d)
    tl.store(p_q, (wide_q * from_begin).to(b_q.dtype), in_k)
    tl.store(p_k, (wide_k * to_end).to(b_k.dtype), in_k)
    tl.store(at.w + o_k[None, :], (wide_k * from_begin).to(b_k.dtype), in_k)
    return b_qk, b_kk, b_own


@triton.jit
def _log_decays(rate, b_f, in_k, FORM: tl.constexpr):
    """Returns log decays of tokens, of base 2, float32. If they are split, they keep the bits that
    both parts hold, so that sums of parts cancel as sums of the whole do."""
    b_a = tl.where(in_k, LOG2_E * log_decays(b_f, rate, FORM.sizes.least_decay), 0)
    if FORM.splits:
        b_a = (b_a.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
    return b_a


@triton.jit
def _multiply(b_inv, w, values, at, in_k):
    """Multiplies `w` and `values` [C, some of K] at `at` by `b_inv` [C, C], in place."""
    b_w = tl.dot(b_inv, tl.load(w + at, in_k, 0), input_precision="ieee")
    b_u = tl.dot(b_inv, tl.load(values + at, in_k, 0), input_precision="ieee")
    tl.store(w + at, b_w.to(w.dtype.element_ty), in_k)
    tl.store(values + at, b_u.to(values.dtype.element_ty), in_k)


@triton.jit
def _between(after, upto, o_t):
    """Returns the mask [C, C] of rows after `after` and up to `upto` [C]."""
    return (o_t[None, :] > after[:, None]) & (o_t[None, :] <= upto[:, None])


@triton.jit
def _times(chosen, parts):
    """Multiplies `chosen` [C, C] by the sum of `parts` [C, K]."""
    if len(parts) == 2:
        return tl.dot(chosen, parts[0], tl.dot(chosen, parts[1]))
    else:
        return tl.dot(chosen, parts[0], input_precision="tf32x3")


@triton.jit
def _add_mild_pairs(b_q, b_k, b_d, b_qk, b_kk):
    """Does `_add_pairs` where exp2 of `b_d`, log decays from the middle of the chunk on, and its
    inverse are representable."""
    down = tl.exp2(b_d)
    right = tl.trans((b_k.to(tl.float32) * tl.exp2(-b_d)).to(b_k.dtype))
    left = (b_q.to(tl.float32) * down).to(b_q.dtype)
    b_qk = tl.dot(left, right, b_qk, input_precision="ieee")
    left = (b_k.to(tl.float32) * down).to(b_k.dtype)
    return b_qk, tl.dot(left, right, b_kk, input_precision="ieee")


@triton.jit
def _add_pairs(b_q, b_k, parts, o_t, b_qk, b_kk):
    """Adds decayed products of some channels of queries and keys to `b_qk` [C, C], and of keys and
    keys to `b_kk`. Entries of later keys are undefined."""
    apart = o_t[:, None] ^ o_t[None, :]
    wide_q, wide_k = b_q.to(tl.float32), b_k.to(tl.float32)
    # A loop, since all sizes at once do not fit the registers.
    for power in range(6):
        # Halves of 2 ** power tokens; their blocks' first halves end with these.
        end = (o_t | ((2 << power) - 1)) - (1 << power)
        is_added = _between(tl.minimum(o_t, end), tl.maximum(o_t, end), o_t)
        factor = tl.exp2(_times(is_added.to(parts[0].dtype), parts))
        right = (wide_k * factor).to(b_k.dtype)
        left = (wide_q * factor).to(b_q.dtype)
        is_pair = (apart >> power) == 1
        products = tl.dot(left, tl.trans(right), input_precision="ieee")
        b_qk += tl.where(is_pair, products, 0)
        products = tl.dot(right, tl.trans(right), input_precision="ieee")
        b_kk += tl.where(is_pair, products, 0)
    return b_qk, b_kk
