"""KDA's outputs, of all chunks at once.

Legend: T tokens, N chunks, C tokens in a chunk, H heads, K head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.gated_delta.triton_shapes import PrefillShapes
from milepost.kernels.kda.triton_intra import ChunkBuffers
from milepost.kernels.kda.weights import KDAWeights
from milepost.kernels.layout.chunks import UNSPECIALISED, ChunkLayout
from milepost.kernels.platform.launches import OVERLAPPED, quick, wait_for_inputs
from milepost.kernels.recurrent.rules.kda import finish


def chunk_o(
    gate: Tensor,
    weights: KDAWeights,
    layout: ChunkLayout,
    shapes: PrefillShapes,
    chunks: ChunkBuffers,
    h: Tensor,
) -> Tensor:
    """Outputs [T, H * K] from states `h` and what tokens add, through the gated norm."""
    output = gate.new_empty(len(gate), shapes.value_heads * shapes.value_dim)
    _chunk_o_kernel[(shapes.value_heads, len(layout.chunk_size))](
        len(gate),
        gate,
        weights.norm,
        weights.norm_eps,
        layout.chunk_begin,
        layout.chunk_size,
        chunks.query_key,
        chunks.values,
        chunks.scores,
        h,
        output,
        HEADS=shapes.value_heads,
        HEAD_DIM=shapes.key_dim,
        C=shapes.chunk,
        BLOCK_K=shapes.blocks["BLOCK_K"],
        num_warps=4,
        **OVERLAPPED,
    )
    return output


@quick
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=UNSPECIALISED)
def _chunk_o_kernel(
    num_tokens,
    gate,
    norm_weight,
    norm_eps,
    chunk_begin,
    chunk_size,
    query_key,
    values,
    scores,
    h,
    output,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One head of a chunk: what queries read from the state before the chunk and from the chunk's
    own new values, through the gated norm into `output` [T, H * K]."""
    i_h, i_t = tl.program_id(0), tl.program_id(1)
    size = tl.load(chunk_size + i_t)
    wait_for_inputs()
    if size == 0:
        return
    begin = tl.load(chunk_begin + i_t).to(tl.int64)
    o_t, o_k = tl.arange(0, C), tl.arange(0, BLOCK_K)
    in_chunk, is_k = o_t < tl.abs(size), o_k < HEAD_DIM
    in_k = in_chunk[:, None] & is_k[None, :]
    o_token = (begin + o_t)[:, None] * (HEADS * HEAD_DIM) + i_h * HEAD_DIM + o_k[None, :]
    if size < 0:
        tl.store(output + o_token, tl.zeros([C, BLOCK_K], output.dtype.element_ty), in_k)
        return

    row = (i_h * tl.cast(num_tokens, tl.int64) + begin + o_t)[:, None]
    b_q = tl.load(query_key + row * HEAD_DIM + o_k[None, :], in_k, 0)
    p_h = h + (i_t.to(tl.int64) * HEADS + i_h) * (HEAD_DIM * HEAD_DIM)
    o_h = o_k[:, None] * HEAD_DIM + o_k[None, :]
    b_h = tl.load(p_h + o_h, is_k[:, None] & is_k[None, :], 0)
    b_o = tl.dot(b_q, b_h, input_precision="ieee")
    b_a = tl.load(scores + row * C + o_t[None, :], in_chunk[:, None] & (o_t < C)[None, :], 0)
    b_v = tl.load(values + row * HEAD_DIM + o_k[None, :], in_k, 0)
    b_o = tl.dot(b_a, b_v, b_o, input_precision="ieee")

    b_weight = tl.load(norm_weight + o_k, is_k, 0)[None, :]
    b_gate = tl.load(gate + o_token, in_k, 0)
    b_o = finish(b_o, b_weight, b_gate, norm_eps, HEAD_DIM)
    tl.store(output + o_token, b_o.to(output.dtype.element_ty), in_k)
