"""Triton: which experts a token chooses.

Legend: T tokens, P parts, X experts, N experts for each token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.moe.scores import SOFTMAX, Scores
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

_LOWEST = tl.constexpr(-(2**31))


def route(
    logits: Tensor,
    num_chosen: int,
    *,
    normalise: bool,
    num_shared: int,
    scores: Scores = SOFTMAX,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    num_real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.route`, with experts in int32; among equal scores the first expert wins.

    `num_real` is int32 and read before the kernel ahead has ended, which must not write it.
    """
    has_gate = num_shared > 0 and scores.gates_shared
    num_tokens, num_experts = logits.shape[0], logits.shape[-1] - has_gate
    width = num_chosen + num_shared
    weights = torch.empty(num_tokens, width, dtype=dtype or logits.dtype, device=logits.device)
    experts = torch.empty(num_tokens, width, dtype=torch.int32, device=logits.device)
    has_parts = logits.dim() == 3
    tensors = logits, num_real, weights, experts
    strides = logits.stride(0), logits.stride(1) if has_parts else 0
    constants = {
        "PARTS": logits.shape[1] if has_parts else 1,
        "EXPERTS": num_experts,
        "COLUMNS": triton.next_power_of_2(num_experts),
        "CHOSEN": num_chosen,
        "NORMALISE": normalise,
        "SHARED": num_shared,
        "num_warps": 1,
        **OVERLAPPED,
    }
    if scores.is_plain and bias is None:
        _route_kernel[(num_tokens,)](*tensors, *strides, **constants)
        return weights, experts
    _route_scores_kernel[(num_tokens,)](
        *tensors,
        bias,
        *strides,
        scores.norm_eps,
        scores.scale,
        **constants,
        GATED=has_gate,
        SIGMOID=scores.kind == "sigmoid",
        GROUPS=scores.num_groups,
        GROUPS_CHOSEN=scores.num_groups_chosen,
    )
    return weights, experts


@triton.jit
def _add_up(source, part_stride, mask, dtype: tl.constexpr, PARTS: tl.constexpr):
    """Logits as if they had been rounded to `dtype` before they were read."""
    total = tl.load(source, mask=mask).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(source + part * part_stride, mask=mask)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _as_keys(logits, column, dtype: tl.constexpr):
    """Integers in the order of logits of 16 bits, among equal ones the first column the greatest:
    a warp finds the greatest integer in one instruction."""
    bits = (logits + 0.0).to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
    return ((bits ^ (bits >> 15 & 0x7FFF)) << 16) | (0xFFFF - column)


@triton.jit
def _logits_of(keys, dtype: tl.constexpr):
    bits = keys >> 16
    bits = bits ^ (bits >> 15 & 0x7FFF)
    return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _source(token, num_real):
    """The token whose logits are read: padding repeats the last."""
    source = token
    if num_real is not None:
        source = tl.maximum(tl.minimum(token, tl.load(num_real) - 1), 0)
    return source


@triton.jit
def _store(weights, experts, token, place, shares, chosen, WIDTH: tl.constexpr):
    """A token's experts and their weights."""
    target = token * WIDTH + place
    tl.store(weights + target, shares.to(weights.dtype.element_ty), mask=place < WIDTH)
    tl.store(experts + target, chosen, mask=place < WIDTH)


@triton.jit
def _route_kernel(
    logits,
    num_real,
    weights,
    experts,
    stride,
    part_stride,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
):
    """One token: a softmax, and CHOSEN times the largest that is left."""
    let_next_start()
    WIDTH: tl.constexpr = CHOSEN + SHARED
    token = tl.program_id(0)
    source = _source(token, num_real)
    wait_for_inputs()
    column = tl.arange(0, COLUMNS)
    is_expert = column < EXPERTS
    row = logits + source.to(tl.int64) * stride
    dtype: tl.constexpr = weights.dtype.element_ty
    left = _add_up(row + column, part_stride, is_expert, dtype, PARTS)
    left = tl.where(is_expert, left, float("-inf"))
    top = tl.max(left)
    total = tl.sum(tl.exp(left - top))
    place = tl.arange(0, triton.next_power_of_2(WIDTH))
    best_logits = tl.zeros_like(place).to(tl.float32)
    best_experts = tl.zeros_like(place)
    if dtype.primitive_bitwidth == 16:
        keys = tl.where(is_expert, _as_keys(left, column, dtype), _LOWEST)
        best_keys = tl.zeros_like(place)
        for n in tl.static_range(CHOSEN):
            best_key = tl.max(keys)
            keys = tl.where(keys == best_key, _LOWEST, keys)
            best_keys = tl.where(place == n, best_key, best_keys)
        best_experts = 0xFFFF - (best_keys & 0xFFFF)
        best_logits = _logits_of(best_keys, dtype)
    else:
        is_left = is_expert
        for n in tl.static_range(CHOSEN):
            best = tl.max(left)
            # Even among logits of minus infinity no expert is chosen twice.
            expert = tl.min(tl.where((left == best) & is_left, column, COLUMNS - 1))
            is_left &= column != expert
            left = tl.where(column == expert, float("-inf"), left)
            best_logits = tl.where(place == n, best, best_logits)
            best_experts = tl.where(place == n, expert, best_experts)
    is_chosen = place < CHOSEN
    shares = tl.where(is_chosen, tl.exp(best_logits - top), 0.0)
    shares /= tl.sum(shares) if NORMALISE else total
    if SHARED:
        gate = _add_up(row + EXPERTS, part_stride, None, dtype, PARTS)
        shares = tl.where(is_chosen, shares, tl.sigmoid(gate))
        best_experts = tl.where(is_chosen, best_experts, EXPERTS + place - CHOSEN)
    _store(weights, experts, token, place, shares, best_experts, WIDTH)


@triton.jit(do_not_specialize=["norm_eps", "scale"])
def _route_scores_kernel(
    logits,
    num_real,
    weights,
    experts,
    bias,
    stride,
    part_stride,
    norm_eps,
    scale,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
):
    """One token: its scores, perhaps its best groups, and CHOSEN times the largest that is left."""
    let_next_start()
    WIDTH: tl.constexpr = CHOSEN + SHARED
    token = tl.program_id(0)
    source = _source(token, num_real)
    column = tl.arange(0, COLUMNS)
    is_expert = column < EXPERTS
    corrections = tl.zeros([COLUMNS], tl.float32)
    if bias is not None:
        corrections = tl.load(bias + column, mask=is_expert, other=0.0)
    wait_for_inputs()
    row = logits + source.to(tl.int64) * stride
    rounded: tl.constexpr = tl.float32 if SIGMOID else weights.dtype.element_ty
    scores = _add_up(row + column, part_stride, is_expert, rounded, PARTS)
    if SIGMOID:
        scores = tl.sigmoid(scores)
    else:
        scores = tl.where(is_expert, scores, float("-inf"))
        scores = tl.exp(scores - tl.max(scores))
        scores /= tl.sum(scores)
    left = tl.where(is_expert, scores + corrections, float("-inf"))
    is_left = is_expert
    if GROUPS > 1:
        is_left &= _is_in_best_group(left, column, EXPERTS // GROUPS, GROUPS, GROUPS_CHOSEN)
    place = tl.arange(0, triton.next_power_of_2(WIDTH))
    shares = tl.zeros_like(place).to(tl.float32)
    best_experts = tl.zeros_like(place)
    for n in tl.static_range(CHOSEN):
        best = tl.max(tl.where(is_left, left, float("-inf")))
        expert = tl.min(tl.where((left == best) & is_left, column, EXPERTS - 1))
        is_left &= column != expert
        score = tl.sum(tl.where(column == expert, scores, 0.0))
        shares = tl.where(place == n, score, shares)
        best_experts = tl.where(place == n, expert, best_experts)
    if NORMALISE:
        shares /= tl.sum(shares) + norm_eps
    shares *= scale
    if SHARED:
        gate = 1.0
        if GATED:
            gate = tl.sigmoid(_add_up(row + EXPERTS, part_stride, None, rounded, PARTS))
        shares = tl.where(place < CHOSEN, shares, gate)
        best_experts = tl.where(place < CHOSEN, best_experts, EXPERTS + place - CHOSEN)
    _store(weights, experts, token, place, shares, best_experts, WIDTH)


@triton.jit
def _is_in_best_group(
    scores, column, SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_CHOSEN: tl.constexpr
):
    """Of each column: whether it is one of the groups whose two best have the greatest sums."""
    group = tl.arange(0, triton.next_power_of_2(GROUPS))
    sums = tl.full(group.shape, float("-inf"), tl.float32)
    for n in tl.static_range(GROUPS):
        own = tl.where(column // SIZE == n, scores, float("-inf"))
        best = tl.max(own)
        first = tl.min(tl.where(own == best, column, column.shape[0]))
        second = tl.max(tl.where(column == first, float("-inf"), own))
        sums = tl.where(group == n, best + second, sums)
    is_best = column < 0
    is_left = group < GROUPS
    for _ in tl.static_range(GROUPS_CHOSEN):
        best = tl.max(tl.where(is_left, sums, float("-inf")))
        chosen = tl.min(tl.where((sums == best) & is_left, group, GROUPS - 1))
        is_left &= group != chosen
        is_best |= column // SIZE == chosen
    return is_best
