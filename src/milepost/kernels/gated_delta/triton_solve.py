"""What of a chunk of the gated delta rule doesn't depend on the state before it.

Legend: T tokens, C tokens in a chunk, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.gated_delta.triton_parts import (
    UNSPECIALISED,
    log_decay,
    pairwise_decay,
    sigmoid,
)
from milepost.kernels.overlap import let_next_start, wait_for_inputs


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def solve(
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
    erase,
    decay_sums,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One value head of a chunk: `values` become new values [V, T, W] as if the state before were
    zero; `erase` [V, T, K] times that state is what they then lose; `decay_sums` [V, T]."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    let_next_start()
    size = tl.load(chunk_size + chunk)
    wait_for_inputs()
    if size <= 0:
        return
    begin = tl.load(chunk_begin + chunk).to(tl.int64)
    tokens = tl.cast(num_tokens, tl.int64)
    row = tl.arange(0, C)
    in_chunk = row < size
    gates = projected + begin * projected_stride + channels + VALUE_HEADS * VALUE_DIM + head
    beta = sigmoid(tl.load(gates + row * projected_stride, in_chunk, 0))
    rate, bias = tl.load(decay_rate + head), tl.load(decay_bias + head)
    inputs = tl.load(gates + row * projected_stride + VALUE_HEADS, in_chunk, 0)
    decay = tl.cumsum(tl.where(in_chunk, log_decay(rate, bias, inputs), 0))
    head_begin = head * tokens + begin
    tl.store(decay_sums + head_begin + row, decay, in_chunk)

    key_begin = (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS)) * tokens + begin
    key_column, value_column = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_W)[None, :]
    in_keys = in_chunk[:, None] & (key_column < KEY_DIM)
    in_values = in_chunk[:, None] & (value_column < VALUE_DIM)
    key_at = row[:, None] * KEY_DIM + key_column
    key = tl.load(query_key + key_begin * KEY_DIM + key_at, in_keys, 0)

    products = tl.dot(key, tl.trans(key), input_precision="ieee")
    system = products * pairwise_decay(decay, row, 1) * beta[:, None]
    inverse = _invert(system, row, C, SPLIT)
    values_at = values + head_begin * VALUE_DIM + row[:, None] * VALUE_DIM + value_column
    value = tl.load(values_at, in_values, 0)
    # The factors of the right sides' rows stand in the inverse's columns.
    by_value = (inverse * beta[None, :]).to(value.dtype)
    by_key = (inverse * (beta * tl.exp(decay))[None, :]).to(key.dtype)
    new_values = tl.dot(by_value, value, input_precision="ieee")
    tl.store(values_at, new_values.to(value.dtype), in_values)
    erased = tl.dot(by_key, key, input_precision="ieee")
    tl.store(erase + head_begin * KEY_DIM + key_at, erased.to(key.dtype), in_keys)


@triton.jit
def _invert(lower, row, C: tl.constexpr, SPLIT: tl.constexpr):
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
        left_high, left_low = _split(left)
        right_high, right_low = _split(right)
        product = tl.dot(left_high, right_low)
        product = tl.dot(left_low, right_high, product)
        return tl.dot(left_high, right_high, product)
    else:
        return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _split(wide):
    """Two bfloat16 numbers whose sum is nearly `wide`, the first of them cut off."""
    bits = wide.to(tl.int32, bitcast=True) & -65536
    high = bits.to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (wide - high).to(tl.bfloat16)
