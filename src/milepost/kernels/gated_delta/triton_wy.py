"""The WY representation of a chunk of the gated delta rule, through the UT transform (Yang et al.,
Gated Delta Networks, arXiv 2412.06464, section 3.3): what doesn't depend on the state before it.

u are the values that tokens add for their keys, as if the state before the chunk were zero; w times
that state is what they then add less.

Legend: T tokens, C tokens in a chunk, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.gated_delta.triton_parts import log_decay, pairwise_decay
from milepost.kernels.gated_delta.triton_shapes import PrefillShapes
from milepost.kernels.gated_delta.weights import GatedDeltaWeights
from milepost.kernels.layout.chunks import UNSPECIALISED, ChunkLayout
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.numerics import sigmoid


def wy_fwd(
    projected: Tensor,
    weights: GatedDeltaWeights,
    layout: ChunkLayout,
    shapes: PrefillShapes,
    query_key: Tensor,
    values: Tensor,
    w: Tensor,
    g_cumsum: Tensor,
) -> None:
    """Turn `values` [V, T, W] into u; write `w` [V, T, K] and `g_cumsum` [V, T]."""
    _wy_fwd_kernel[(shapes.value_heads, len(layout.chunk_size))](
        projected,
        projected.stride(0),
        len(projected),
        shapes.channels,
        weights.decay_rate,
        weights.decay_bias,
        layout.chunk_begin,
        layout.chunk_size,
        query_key,
        values,
        w,
        g_cumsum,
        **shapes.heads,
        **shapes.blocks,
        MAX_BETA=weights.max_beta,
        SPLIT=projected.is_cuda and projected.dtype != torch.float32,
        num_warps=4,
        **OVERLAPPED,
    )


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def _wy_fwd_kernel(
    projected,
    projected_stride,
    num_tokens,
    channels,
    decay_rate,
    decay_bias,
    chunk_begin,
    chunk_size,
    query_key,
    values,
    w,
    g_cumsum,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MAX_BETA: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One value head of a chunk: `values` become u [V, T, W], `w` [V, T, K], and the sums of log
    decays from the chunk's begin `g_cumsum` [V, T]."""
    i_hv, i_t = tl.program_id(0), tl.program_id(1)
    launch_dependents()
    size = tl.load(chunk_size + i_t)
    wait_for_inputs()
    if size <= 0:
        return
    begin = tl.load(chunk_begin + i_t).to(tl.int64)
    tokens = tl.cast(num_tokens, tl.int64)
    o_t = tl.arange(0, C)
    in_chunk = o_t < size
    gates = projected + begin * projected_stride + channels + VALUE_HEADS * VALUE_DIM + i_hv
    b_beta = sigmoid(tl.load(gates + o_t * projected_stride, in_chunk, 0)) * MAX_BETA
    rate, bias = tl.load(decay_rate + i_hv), tl.load(decay_bias + i_hv)
    inputs = tl.load(gates + o_t * projected_stride + VALUE_HEADS, in_chunk, 0)
    b_g = tl.cumsum(tl.where(in_chunk, log_decay(rate, bias, inputs), 0))
    v_begin = i_hv * tokens + begin
    tl.store(g_cumsum + v_begin + o_t, b_g, in_chunk)

    k_begin = (KEY_HEADS + i_hv // (VALUE_HEADS // KEY_HEADS)) * tokens + begin
    o_k, o_v = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_W)[None, :]
    in_k = in_chunk[:, None] & (o_k < KEY_DIM)
    in_v = in_chunk[:, None] & (o_v < VALUE_DIM)
    key_at = o_t[:, None] * KEY_DIM + o_k
    b_k = tl.load(query_key + k_begin * KEY_DIM + key_at, in_k, 0)

    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
    system = b_kk * pairwise_decay(b_g, o_t, 1) * b_beta[:, None]
    b_inv = invert(system, o_t, C, SPLIT)
    p_u = values + v_begin * VALUE_DIM + o_t[:, None] * VALUE_DIM + o_v
    b_v = tl.load(p_u, in_v, 0)
    # The factors of the right sides' rows stand in the inverse's columns.
    by_value = (b_inv * b_beta[None, :]).to(b_v.dtype)
    by_key = (b_inv * (b_beta * tl.exp(b_g))[None, :]).to(b_k.dtype)
    b_u = tl.dot(by_value, b_v, input_precision="ieee")
    tl.store(p_u, b_u.to(b_v.dtype), in_v)
    b_w = tl.dot(by_key, b_k, input_precision="ieee")
    tl.store(w + v_begin * KEY_DIM + key_at, b_w.to(b_k.dtype), in_k)


@triton.jit
def invert(lower, row, C: tl.constexpr, SPLIT: tl.constexpr):
    """Inverse of 1 + `lower` [C, C], strictly lower triangular, float32.

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
    """Matrix product of float32 numbers; with SPLIT each is the sum of two bfloat16 numbers, which
    keeps 16 bits and is twice as fast."""
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
    """Two bfloat16 numbers whose sum is nearly `wide`, the first of them cut off."""
    bits = wide.to(tl.int32, bitcast=True) & -65536
    high = bits.to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (wide - high).to(tl.bfloat16)
