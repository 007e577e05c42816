"""Triton: chooses each token's experts.

Legend: T tokens, P parts, X experts (`o_e`), N experts for each token (`o_n`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.platform.launches import OVERLAPPED, launch_dependents, quick, wait_for_inputs
from milepost.kernels.platform.tensors import next_power_of_2
from milepost.kernels.products.experts_reference import SOFTMAX, Scores

_LOWEST = tl.constexpr(-(2**31))
"""A number below all keys."""
_MOST_GROUPS = tl.constexpr(32)
"""Groups of experts have a bit each of a number."""


def route(
    logits: Tensor,
    num_chosen: int,
    *,
    normalise: bool,
    num_shared: int = 0,
    scores: Scores = SOFTMAX,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    num_real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Routes as `experts_reference.route`, with experts in int32; the first of equal scores wins.

    `num_real` is int32 and read before the kernel ahead has ended, which must not write it.
    """
    has_gate = num_shared > 0 and scores.gates_shared
    num_tokens, num_experts = logits.shape[0], logits.shape[-1] - has_gate
    width = num_chosen + num_shared
    weights = torch.empty(num_tokens, width, dtype=dtype or logits.dtype, device=logits.device)
    experts = torch.empty(num_tokens, width, dtype=torch.int32, device=logits.device)
    assert scores.num_groups <= _MOST_GROUPS.value, "a group has a bit of 32"
    has_parts = logits.dim() == 3
    is_plain = bias is None and scores.kind == "softmax" and scores.num_groups == 1
    _route_kernel[(num_tokens,)](
        logits,
        num_real,
        weights,
        experts,
        bias,
        logits.stride(0),
        logits.stride(1) if has_parts else 0,
        scores.norm_eps,
        scores.scale,
        PARTS=logits.shape[1] if has_parts else 1,
        EXPERTS=num_experts,
        COLUMNS=next_power_of_2(num_experts),
        CHOSEN=num_chosen,
        NORMALISE=normalise,
        SHARED=num_shared,
        GATED=has_gate,
        SIGMOID=scores.kind == "sigmoid",
        GROUPS=scores.num_groups,
        GROUPS_CHOSEN=scores.num_groups_chosen,
        BY_KEYS=is_plain and weights.dtype.itemsize == 2,
        num_warps=1,
        **OVERLAPPED,
    )
    return weights, experts


@triton.jit
def _add_up(p_logits, part_stride, mask, dtype: tl.constexpr, PARTS: tl.constexpr):
    """Adds up the parts of logits, rounds the sums to `dtype` and returns them in float32."""
    b_logits = tl.load(p_logits, mask=mask).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        b_logits += tl.load(p_logits + part * part_stride, mask=mask)
    return b_logits.to(dtype).to(tl.float32)


@triton.jit
def _choose_by_keys(b_logits, o_e, o_n, is_e, dtype: tl.constexpr, CHOSEN: tl.constexpr):
    """Returns the experts with the largest 16-bit logits, and those logits. Logits become integer
    keys in the same order, ties by column, since a warp finds the greatest integer in one
    instruction."""
    b_bits = (b_logits + 0.0).to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
    b_keys = ((b_bits ^ (b_bits >> 15 & 0x7FFF)) << 16) | (0xFFFF - o_e)
    b_keys = tl.where(is_e, b_keys, _LOWEST)
    b_best = tl.zeros_like(o_n)
    for n in tl.static_range(CHOSEN):
        best = tl.max(b_keys)
        b_keys = tl.where(b_keys == best, _LOWEST, b_keys)
        b_best = tl.where(o_n == n, best, b_best)
    b_bits = b_best >> 16
    b_bits = b_bits ^ (b_bits >> 15 & 0x7FFF)
    b_chosen = b_bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return 0xFFFF - (b_best & 0xFFFF), b_chosen


@triton.jit
def _choose_by_scores(b_scores, is_left, o_e, o_n, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr):
    """Returns the experts with the largest scores among those that are left; of equal scores the
    first wins. Scores become integer keys in the same order, as in `_choose_by_keys`."""
    b_bits = (b_scores + 0.0).to(tl.int32, bitcast=True)
    b_keys = tl.where(is_left, b_bits ^ (b_bits >> 31 & 0x7FFFFFFF), _LOWEST)
    b_experts = tl.zeros_like(o_n)
    for n in tl.static_range(CHOSEN):
        expert = tl.min(tl.where(b_keys == tl.max(b_keys), o_e, EXPERTS - 1))
        b_keys = tl.where(o_e == expert, _LOWEST, b_keys)
        b_experts = tl.where(o_n == n, expert, b_experts)
    return b_experts


@triton.jit
def _source(i_t, num_real):
    """Returns the token whose logits are read: for padding that is the last real one."""
    i_source = i_t
    if num_real is not None:
        i_source = tl.maximum(tl.minimum(i_t, tl.load(num_real) - 1), 0)
    return i_source


@triton.jit
def _store(weights, experts, i_t, o_n, b_weights, b_experts, WIDTH: tl.constexpr):
    """Stores a token's experts and their weights."""
    o_target = i_t * WIDTH + o_n
    tl.store(weights + o_target, b_weights.to(weights.dtype.element_ty), mask=o_n < WIDTH)
    tl.store(experts + o_target, b_experts, mask=o_n < WIDTH)


@quick
@triton.jit(do_not_specialize=["norm_eps", "scale"])
def _route_kernel(
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
    BY_KEYS: tl.constexpr,
):
    """Routes one token: scores its experts, limits them to the best groups if there are GROUPS, and
    takes the largest score that is left CHOSEN times, or the largest logit if BY_KEYS."""
    launch_dependents()
    WIDTH: tl.constexpr = CHOSEN + SHARED
    i_t = tl.program_id(0)
    i_source = _source(i_t, num_real)
    o_e = tl.arange(0, COLUMNS)
    is_e = o_e < EXPERTS
    b_bias = tl.zeros([COLUMNS], tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + o_e, mask=is_e, other=0.0)
    wait_for_inputs()
    p_row = logits + i_source.to(tl.int64) * stride
    rounded: tl.constexpr = tl.float32 if SIGMOID else weights.dtype.element_ty
    b_logits = _add_up(p_row + o_e, part_stride, is_e, rounded, PARTS)
    top, total = 0.0, 1.0
    if not SIGMOID:
        b_logits = tl.where(is_e, b_logits, float("-inf"))
        top = tl.max(b_logits)
        total = tl.sum(tl.exp(b_logits - top))
    o_n = tl.arange(0, triton.next_power_of_2(WIDTH))
    is_chosen = o_n < CHOSEN
    if BY_KEYS:
        b_experts, b_chosen = _choose_by_keys(b_logits, o_e, o_n, is_e, rounded, CHOSEN)
    else:
        b_scores = _score(b_logits, top, SIGMOID) / total + b_bias
        is_left = is_e
        if GROUPS > 1:
            SIZE: tl.constexpr = EXPERTS // GROUPS
            best = _best_groups(
                p_row, bias, part_stride, top, total,
                rounded, PARTS, SIZE, GROUPS, GROUPS_CHOSEN, SIGMOID,
            )  # fmt: skip
            is_left &= (best >> tl.minimum(o_e // SIZE, _MOST_GROUPS - 1) & 1) != 0
        b_experts = _choose_by_scores(b_scores, is_left, o_e, o_n, EXPERTS, CHOSEN)
        # Loading their logits again costs less than a reduction for each.
        b_chosen = _add_up(p_row + b_experts, part_stride, is_chosen, rounded, PARTS)
    b_weights = tl.where(is_chosen, _score(b_chosen, top, SIGMOID), 0.0)
    b_weights /= tl.sum(b_weights) + norm_eps * total if NORMALISE else total
    b_weights *= scale
    if SHARED:
        gate = 1.0
        if GATED:
            gate = tl.sigmoid(_add_up(p_row + EXPERTS, part_stride, None, rounded, PARTS))
        b_weights = tl.where(is_chosen, b_weights, gate)
        b_experts = tl.where(is_chosen, b_experts, EXPERTS + o_n - CHOSEN)
    _store(weights, experts, i_t, o_n, b_weights, b_experts, WIDTH)


@triton.jit
def _score(logits, top, SIGMOID: tl.constexpr):
    """Returns sigmoids, or the numerators of a softmax whose greatest logit is `top`."""
    return tl.sigmoid(logits) if SIGMOID else tl.exp(logits - top)


@triton.jit
def _best_groups(
    p_row,
    bias,
    part_stride,
    top,
    total,
    dtype: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Returns a bit for each of the groups of SIZE experts whose two best ones have the greatest
    sums; of equal sums the first wins. Loading logits by group [G, S] again costs less than finding
    each group's among all."""
    o_g = tl.arange(0, triton.next_power_of_2(GROUPS))
    o_s = tl.arange(0, triton.next_power_of_2(SIZE))
    is_own = (o_g < GROUPS)[:, None] & (o_s < SIZE)[None, :]
    o_own = o_g[:, None] * SIZE + o_s[None, :]
    b_own = _add_up(p_row + o_own, part_stride, is_own, dtype, PARTS)
    b_own = _score(b_own, top, SIGMOID) / total
    if bias is not None:
        b_own += tl.load(bias + o_own, mask=is_own, other=0.0)
    b_own = tl.where(is_own, b_own, float("-inf"))
    best = tl.max(b_own, 1)
    first = tl.min(tl.where(b_own == best[:, None], o_s[None, :], o_s.shape[0]), 1)
    second = tl.max(tl.where(o_s[None, :] == first[:, None], float("-inf"), b_own), 1)
    sums = best + second
    own, other = sums[:, None], sums[None, :]
    is_before = (other > own) | ((other == own) & (o_g[None, :] < o_g[:, None]))
    is_best = tl.sum(is_before.to(tl.int32), 1) < GROUPS_CHOSEN
    return tl.sum(tl.where(is_best, 1 << o_g, 0))
