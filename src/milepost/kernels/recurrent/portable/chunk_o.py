"""Outputs of the delta rule's chunks: what queries read of the state before their chunk, and of the
chunk's own tokens. KDA's products of queries and keys have been decayed before.

Legend: T tokens, C tokens in a chunk, V value heads, K key_dim, W value_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, quick, wait_for_inputs
from milepost.kernels.recurrent.structures import (
    ChunkTensors,
    Mixer,
    MixerSizes,
    PrefillChunks,
)


def run(
    mixer: Mixer,
    chunk: int,
    chunks: PrefillChunks,
    tensors: ChunkTensors,
    output: Tensor,
) -> None:
    """Writes `output` [T, V * W] after the gated norm."""
    sizes = mixer.sizes
    read = mixer.inputs.gate, mixer.weights, chunks, tensors
    options = {"num_warps": delta_warps(sizes, output), **OVERLAPPED}
    _chunk_fwd_o_kernel[(sizes.heads, len(chunks.size))](
        *(len(output), *read, output),
        SIZES=sizes,
        FINISH=mixer.rule.finish,
        C=chunk,
        **options,
    )


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
    num_tokens,
    gate,
    weights,
    chunks,
    tensors,
    output,
    SIZES: tl.constexpr,
    FINISH: tl.constexpr,
    C: tl.constexpr,
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
    b_o = FINISH(b_o, b_weight, b_gate, weights.norm_eps, VALUE_DIM)
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
