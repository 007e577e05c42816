"""Chunks of the delta rule, before and after their states are known.

`wy_fwd` makes the WY representation of a chunk of the gated delta rule, through the UT transform
(Yang et al., Gated Delta Networks, arXiv 2412.06464, section 3.3): what doesn't depend on the state
before the chunk. u are the values that tokens add for their keys, as if that state were zero; w
times that state is what they then add less. KDA's is in `intra`.

`chunk_fwd_o` computes outputs: what queries read of the state before their chunk, and of the
chunk's own tokens. KDA's products of queries and keys have been decayed before.

Legend: T tokens, C tokens in a chunk, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import sigmoid
from milepost.kernels.recurrent.mixer import MixerSizes
from milepost.kernels.recurrent.portable.gated_delta import log_decays
from milepost.kernels.recurrent.portable.gated_norm import gated_norm
from milepost.kernels.recurrent.structures import ChunkTensors, Mixer, PrefillChunks


def chunk_fwd_o(
    mixer: Mixer, chunk: int, chunks: PrefillChunks, tensors: ChunkTensors, output: Tensor
) -> None:
    """Writes `output` [T, V * W] after the gated norm."""
    sizes = mixer.sizes
    operands = len(output), mixer.inputs.gate, mixer.weights, chunks, tensors, output
    options = {"num_warps": delta_warps(sizes, output), **OVERLAPPED}
    grid = sizes.heads, len(chunks.size)
    _chunk_fwd_o_kernel[grid](*operands, SIZES=sizes, C=chunk, **options)


def delta_warps(sizes: MixerSizes, like: Tensor) -> int:
    """Returns the number of warps of a program that holds a head's keys and values. Products in
    float32 are unrolled, and with wide heads and few threads they take minutes to compile."""
    is_wide = sizes.shared_tile * sizes.own_tile > 128 * 128
    return 16 if is_wide and like.element_size() == 4 else 4


class ChunkHead(NamedTuple):
    """A value head's tokens in a chunk."""

    head: Any
    chunk: Any
    begin: Any
    num_tokens: Any
    """Tokens of the whole prefill."""
    o_t: Any
    in_chunk: Any


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["chunks"])
def _chunk_fwd_o_kernel(
    num_tokens, gate, weights, chunks, tensors, output, SIZES: tl.constexpr, C: tl.constexpr
):
    """Computes a value head's outputs [T, V * W] of a chunk, with the gated norm; those of no
    sequence are zeros."""
    VALUE_DIM: tl.constexpr = SIZES.own
    i_hv, i_t = tl.program_id(0), tl.program_id(1)
    size = tl.load(chunks.size + i_t)
    wait_for_inputs()
    if size == 0:
        return
    begin = tl.load(chunks.begin + i_t).to(tl.int64)
    o_t, o_v = tl.arange(0, C), tl.arange(0, SIZES.own_tile)
    in_chunk, is_v = o_t < tl.abs(size), o_v < VALUE_DIM
    in_v = in_chunk[:, None] & is_v[None, :]
    first = (begin * SIZES.heads + i_hv) * VALUE_DIM
    p_o = output + first + o_t[:, None] * SIZES.width + o_v[None, :]
    if size < 0:
        tl.store(p_o, tl.zeros(p_o.shape, output.dtype.element_ty), in_v)
        return
    own = ChunkHead(i_hv, i_t, begin, tl.cast(num_tokens, tl.int64), o_t, in_chunk)
    b_o = _read_chunk(tensors, own, o_v, is_v, SIZES, C)
    b_weight = tl.load(weights.norm + o_v, is_v, 0)[None, :]
    p_gate = gate.base + begin * gate.stride + i_hv * VALUE_DIM
    b_gate = tl.load(p_gate + o_t[:, None] * gate.stride + o_v[None, :], in_v, 0)
    b_o = gated_norm(b_o, b_weight, b_gate, weights.norm_eps, VALUE_DIM, SIZES)
    tl.store(p_o, b_o.to(output.dtype.element_ty), in_v)


@triton.jit
def _read_chunk(tensors, own, o_v, is_v, SIZES: tl.constexpr, C: tl.constexpr):
    """Returns what queries [C, W] read of the state before their chunk and of the chunk's own
    tokens."""
    KEY_DIM: tl.constexpr = SIZES.shared
    VALUE_DIM: tl.constexpr = SIZES.own
    o_t, o_k = own.o_t, tl.arange(0, SIZES.shared_tile)
    is_k = o_k < KEY_DIM
    in_k = own.in_chunk[:, None] & is_k[None, :]
    query_begin = (own.head // SIZES.group) * own.num_tokens + own.begin
    p_q = tensors.query_key + query_begin * KEY_DIM + o_t[:, None] * KEY_DIM + o_k[None, :]
    b_q = tl.load(p_q, in_k, 0)
    v_begin = own.head * own.num_tokens + own.begin
    if not SIZES.by_channel:
        b_k = tl.load(p_q + SIZES.units * own.num_tokens * KEY_DIM, in_k, 0)
        b_g = tl.load(tensors.decay + v_begin + o_t, own.in_chunk, 0)
    p_h = tensors.h + (own.chunk.to(tl.int64) * SIZES.heads + own.head) * (VALUE_DIM * KEY_DIM)
    o_h = o_k[:, None] * VALUE_DIM + o_v[None, :]
    b_h = tl.load(p_h + o_h, is_k[:, None] & is_v[None, :], 0)

    b_o = tl.dot(b_q, b_h, input_precision="ieee")
    if SIZES.by_channel:
        p_a = tensors.scores + (v_begin + o_t)[:, None] * C + o_t[None, :]
        b_a = tl.load(p_a, own.in_chunk[:, None] & (o_t < C)[None, :], 0)
    else:
        b_o *= tl.exp(b_g)[:, None]
        b_a = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_a = (b_a * pairwise_decay(b_g, o_t, 0)).to(b_k.dtype)
    value_at = o_t[:, None] * VALUE_DIM + o_v[None, :]
    in_v = own.in_chunk[:, None] & is_v[None, :]
    b_v = tl.load(tensors.v + v_begin * VALUE_DIM + value_at, in_v, 0)
    b_o += tl.dot(b_a, b_v, input_precision="ieee")
    return b_o


@triton.jit
def pairwise_decay(decay, row, BELOW: tl.constexpr):
    """Returns [C, C]: the decay from token j to token i if i >= j + BELOW, else 0."""
    is_later = row[:, None] >= row[None, :] + BELOW
    between = tl.where(is_later, decay[:, None] - decay[None, :], 0)
    return tl.where(is_later, tl.exp(between), 0)


def wy_fwd(mixer: Mixer, chunk: int, chunks: PrefillChunks, tensors: ChunkTensors) -> None:
    """Turns `tensors.v` into u; writes `tensors.w` and `tensors.decay`."""
    sizes, like = mixer.sizes, tensors.v
    operands = like.shape[1], mixer.inputs, mixer.weights, chunks, tensors
    options = {"num_warps": delta_warps(sizes, like), **OVERLAPPED}
    grid = sizes.heads, len(chunks.size)
    _wy_fwd_kernel[grid](*operands, SIZES=sizes, C=chunk, SPLIT=splits(like), **options)


def splits(like: torch.Tensor) -> bool:
    """Whether float32 matrices are multiplied as sums of two bfloat16 matrices."""
    return like.is_cuda and like.dtype != torch.float32


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["chunks"])
def _wy_fwd_kernel(
    num_tokens,
    inputs,
    weights,
    chunks,
    tensors,
    SIZES: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Handles one value head of a chunk: replaces values by u [V, T, W], and stores w [V, T, K] and
    the sums of log decays from the chunk's begin [V, T]."""
    KEY_DIM: tl.constexpr = SIZES.shared
    VALUE_DIM: tl.constexpr = SIZES.own
    i_hv, i_t = tl.program_id(0), tl.program_id(1)
    launch_dependents()
    size = tl.load(chunks.size + i_t)
    wait_for_inputs()
    if size <= 0:
        return
    begin = tl.load(chunks.begin + i_t).to(tl.int64)
    tokens = tl.cast(num_tokens, tl.int64)
    o_t = tl.arange(0, C)
    in_chunk = o_t < size
    betas, decays = inputs.strengths, inputs.decays
    p_beta = betas.base + begin * betas.stride + i_hv + o_t * betas.stride
    b_beta = sigmoid(tl.load(p_beta, in_chunk, 0)) * SIZES.max_beta
    rate, bias = tl.load(weights.decay_rate + i_hv), tl.load(weights.decay_bias + i_hv)
    p_decay = decays.base + begin * decays.stride + i_hv + o_t * decays.stride
    b_in = tl.load(p_decay, in_chunk, 0).to(tl.float32)
    b_g = tl.cumsum(tl.where(in_chunk, log_decays(b_in + bias, rate, SIZES.least_decay), 0))
    v_begin = i_hv * tokens + begin
    tl.store(tensors.decay + v_begin + o_t, b_g, in_chunk)

    k_begin = (SIZES.units + i_hv // SIZES.group) * tokens + begin
    o_k, o_v = tl.arange(0, SIZES.shared_tile)[None, :], tl.arange(0, SIZES.own_tile)[None, :]
    in_k = in_chunk[:, None] & (o_k < KEY_DIM)
    in_v = in_chunk[:, None] & (o_v < VALUE_DIM)
    key_at = o_t[:, None] * KEY_DIM + o_k
    b_k = tl.load(tensors.query_key + k_begin * KEY_DIM + key_at, in_k, 0)

    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
    system = b_kk * pairwise_decay(b_g, o_t, 1) * b_beta[:, None]
    b_inv = invert(system, o_t, C, SPLIT)
    p_u = tensors.v + v_begin * VALUE_DIM + o_t[:, None] * VALUE_DIM + o_v
    b_v = tl.load(p_u, in_v, 0)
    # Scaling the inverse's columns scales the rows of the right-hand sides.
    by_value = (b_inv * b_beta[None, :]).to(b_v.dtype)
    by_key = (b_inv * (b_beta * tl.exp(b_g))[None, :]).to(b_k.dtype)
    b_u = tl.dot(by_value, b_v, input_precision="ieee")
    tl.store(p_u, b_u.to(b_v.dtype), in_v)
    b_w = tl.dot(by_key, b_k, input_precision="ieee")
    tl.store(tensors.w + v_begin * KEY_DIM + key_at, b_w.to(b_k.dtype), in_k)


@triton.jit
def invert(lower, row, C: tl.constexpr, SPLIT: tl.constexpr):
    """Returns the inverse of 1 + `lower` [C, C], strictly lower triangular, float32.

    Inverses of diagonal blocks grow to twice their size at each step: [[A, 0], [B, D]] has the
    inverse [[A', 0], [-D' B A', D']]. Unlike a product of powers of `lower` it never forms numbers
    that dwarf the result. Blocks up to 16 are a batch of small products.
    """
    tl.static_assert(C == 64)
    small = tl.arange(0, 16)
    block = tl.arange(0, 4)
    is_diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    blocks = tl.reshape(lower, [4, 16, 4, 16])
    blocks = tl.sum(tl.where(is_diagonal, blocks, 0), 2)
    # Tokens i and j are in one block of size 2 n, but not of size n, iff i ^ j is in [n, 2 n).
    apart = (small[:, None] ^ small[None, :])[None, :, :]
    inverses = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, blocks, 0)
    for power in tl.static_range(1, 4):
        off = tl.where((apart >> power) == 1, blocks, 0)
        moved = _product(off, inverses, SPLIT)
        inverses -= _product(inverses, moved, SPLIT)

    spread = tl.where(is_diagonal, tl.expand_dims(inverses, 2), 0)
    inverse = tl.reshape(spread, [C, C])
    apart = row[:, None] ^ row[None, :]
    for power in tl.static_range(4, 6):
        off = tl.where((apart >> power) == 1, lower, 0)
        moved = _product(off, inverse, SPLIT)
        inverse -= _product(inverse, moved, SPLIT)
    return inverse


@triton.jit
def _product(left, right, SPLIT: tl.constexpr):
    """Returns the matrix product of float32 numbers; with SPLIT each is the sum of two bfloat16
    numbers, which keeps 16 bits and is twice as fast."""
    if SPLIT:
        left_high, left_low = split(left)
        right_high, right_low = split(right)
        product = tl.dot(left_high, right_low)
        product = tl.dot(left_low, right_high, product)
        return tl.dot(left_high, right_high, product)
    else:
        return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def split(wide):
    """Returns two bfloat16 numbers whose sum is nearly `wide`, the first of them cut off."""
    bits = wide.to(tl.int32, bitcast=True) & -65536
    high = bits.to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (wide - high).to(tl.bfloat16)
