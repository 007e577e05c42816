"""The last launch of attention where KV is cut: partial results become one, by their LSE.

Legend: T tokens, H heads, E head_dim, P partial results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.attention.items import AttentionItems
from milepost.kernels.attention.triton_parts import round_heads
from milepost.kernels.layout.emit import Fp8Rows, as_arguments, keeps_values
from milepost.kernels.platform.device import probe
from milepost.kernels.platform.launches import (
    OVERLAPPED,
    launch_dependents,
    quick,
    wait_as_padding,
    wait_for_inputs,
)
from milepost.kernels.platform.tensors import BLOCK

_PROGRAMS = 256
"""A result of few tokens is divided among so many: of long sequences they have many partial ones,
all of which are on their way at once."""
_LEAST_PART, _NUMBERS = 32, 8192
"""Dimensions of a program, and numbers that it has on their way."""


def combine(
    partials: Tensor,
    lse: Tensor,
    items: AttentionItems,
    gate: Tensor | None,
    output: Tensor,
    rounded: Fp8Rows | None = None,
) -> None:
    """Write rows of `output` [T, H * E] that have `partials` [P, H, E], times the sigmoid of `gate`
    if there is one; and to room for them `rounded`, if there is some, which may be all there is."""
    _, num_heads, head_dim = partials.shape
    block_e = triton.next_power_of_2(head_dim)
    part = choose_part(items.num_combined * num_heads, block_e)
    if rounded is not None:
        part = max(part, BLOCK)
    _combine_kernel[(items.num_combined, num_heads, block_e // part)](
        partials,
        lse,
        items.bases,
        gate,
        output,
        *as_arguments(rounded),
        0 if gate is None else gate.stride(0),
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        PART=part,
        STEP=max(32, _NUMBERS // part),
        KEEPS_ROWS=keeps_values(rounded),
        HAS_FP8=probe(output.device).has_fp8,
        num_warps=4 if part == block_e else 8,
        **OVERLAPPED,
    )


def choose_part(num_results: int, block_e: int) -> int:
    """Dimensions of a program, for results of so many tokens and heads."""
    parts = 1
    while 2 * parts * num_results <= _PROGRAMS and block_e // (2 * parts) >= _LEAST_PART:
        parts *= 2
    return block_e // parts


@quick
@triton.jit(do_not_specialize=["scales_stride"])
def _combine_kernel(
    partials,
    lse,
    bases,
    gate,
    output,
    rounded,
    row_scales,
    scales_stride,
    gate_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PART: tl.constexpr,
    STEP: tl.constexpr,
    KEEPS_ROWS: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Some dimensions of the result of one token and head: its partial results, each by its share
    by the LSE."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    base = tl.load(bases + token)
    count = tl.load(bases + token + 1) - base
    if rounded is not None:
        launch_dependents()  # a product with float8, which begins with its weights
    if count == 0:
        wait_as_padding()
        return
    wait_for_inputs()
    o_e = tl.program_id(2) * PART + tl.arange(0, PART)
    inside = o_e < HEAD_DIM
    step = tl.arange(0, STEP)
    if gate is not None:
        b_g = tl.load(gate + token * gate_stride + head * HEAD_DIM + o_e, mask=inside, other=0.0)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([PART], tl.float32)
    # Every token sees the beginning of its KV, so the first LSE is finite.
    for done in tl.range(0, count, STEP):
        at = (base + done + step).to(tl.int64) * HEADS + head
        valid = done + step < count
        b_lse = tl.load(lse + at, mask=valid, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(b_lse, 0))
        b_p = tl.exp2(b_lse - m_new)
        shrink = tl.exp2(m - m_new)
        mask = valid[:, None] & inside[None, :]
        b_o = tl.load(partials + at[:, None] * HEAD_DIM + o_e[None, :], mask=mask, other=0.0)
        acc = acc * shrink + tl.sum(b_o * b_p[:, None], 0)
        l = l * shrink + tl.sum(b_p, 0)
        m = m_new
    acc = acc / l
    if gate is not None:
        acc *= tl.sigmoid(b_g.to(tl.float32))
    at = (token * HEADS + head) * HEAD_DIM + o_e
    b_o = acc.to(output.dtype.element_ty)
    if KEEPS_ROWS:
        tl.store(output + at, b_o, mask=inside)
    if rounded is not None:
        values, scales = round_heads(b_o[None, :], HAS_FP8)
        tl.store(rounded + at[None, :], values, mask=inside[None, :])
        COUNT: tl.constexpr = scales.shape[1]
        o_d = (head * tl.num_programs(2) + tl.program_id(2)) * COUNT + tl.arange(0, COUNT)
        tl.store(row_scales + o_d[None, :] * scales_stride + token, scales)
