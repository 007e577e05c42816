"""The last launch of an attention whose KV is cut: combines partial results by their LSE.

Legend: T tokens, H heads, E head_dim, P partial results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from milepost.kernels.attention.arguments import AttentionCall
from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.attention.portable.blocks import round_heads
from milepost.kernels.layout.emit import keeps_values
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import BLOCK

_PROGRAMS = 256
"""Few tokens' results are divided among as many programs: long sequences have many partial results,
which are then all loaded at once."""
_LEAST_PART, _NUMBERS = 32, 8192
"""Least dimensions of a program, and numbers that it loads at once."""


def combine(call: AttentionCall, items: AttentionItems) -> None:
    """Writes output rows with partial results, times the sigmoid of their gate, in the forms that
    there is room for."""
    _, num_heads, head_dim = call.partials.base.shape
    block_e = triton.next_power_of_2(head_dim)
    part = block_e
    if not items.batch_invariant:
        part = choose_part(items.num_combined * num_heads, block_e)
    if call.rounded is not None:
        part = max(part, BLOCK)
    _combine_kernel[(items.num_combined, num_heads, block_e // part)](
        call.partials,
        items.bases,
        call.output_gate,
        call.outputs,
        0 if call.rounded is None else call.rounded.scales.stride(0),
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        PART=part,
        STEP=max(32, _NUMBERS // part),
        KEEPS_ROWS=keeps_values(call.rounded),
        HAS_FP8=probe(call.output.device).has_fp8,
        num_warps=4 if part == block_e else 8,
        **OVERLAPPED,
    )


def choose_part(num_results: int, block_e: int) -> int:
    """Returns the number of dimensions of a program, given the number of tokens times heads."""
    parts = 1
    while 2 * parts * num_results <= _PROGRAMS and block_e // (2 * parts) >= _LEAST_PART:
        parts *= 2
    return block_e // parts


@quick
@triton.jit(do_not_specialize=["scales_stride"])
def _combine_kernel(
    partials,
    bases,
    gate,
    output,
    scales_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
    KEEPS_ROWS: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Makes PART dimensions of the result of one token and head: the sum of its partial results,
    weighted by their LSE."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    base = tl.load(bases + token)
    count = tl.load(bases + token + 1) - base
    if output.fp8 is not None:
        launch_dependents()  # an FP8 product follows, and begins with its weights
    wait_for_inputs()
    if count == 0:
        return
    o_e = tl.program_id(2) * PART + tl.arange(0, PART)
    inside = o_e < HEAD_DIM
    step = tl.arange(0, STEP)
    if gate.base is not None:
        p_gate = gate.base + token * gate.stride + (head * HEAD_DIM + o_e) // gate.each
        b_g = tl.load(p_gate, mask=inside, other=0.0)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([PART], tl.float32)
    # Every token sees the beginning of its KV, so the first LSE is finite.
    for done in tl.range(0, count, STEP):
        at = (base + done + step).to(tl.int64) * HEADS + head
        valid = done + step < count
        b_lse = tl.load(partials.lse + at, mask=valid, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(b_lse, 0))
        b_p = tl.exp2(b_lse - m_new)
        shrink = tl.exp2(m - m_new)
        mask = valid[:, None] & inside[None, :]
        b_o = tl.load(partials.base + at[:, None] * HEAD_DIM + o_e[None, :], mask=mask, other=0.0)
        acc = acc * shrink + tl.sum(b_o * b_p[:, None], 0)
        l = l * shrink + tl.sum(b_p, 0)
        m = m_new
    acc = acc / l
    if gate.base is not None:
        acc *= tl.sigmoid(b_g.to(tl.float32))
    at = (token * HEADS + head) * HEAD_DIM + o_e
    b_o = acc.to(output.base.dtype.element_ty)
    if KEEPS_ROWS:
        tl.store(output.base + at, b_o, mask=inside)
    if output.fp8 is not None:
        values, scales = round_heads(b_o[None, :], HAS_FP8)
        tl.store(output.fp8 + at[None, :], values, mask=inside[None, :])
        COUNT: tl.constexpr = scales.shape[1]
        o_d = (head * tl.num_programs(2) + tl.program_id(2)) * COUNT + tl.arange(0, COUNT)
        tl.store(output.scales + o_d[None, :] * scales_stride + token, scales)
