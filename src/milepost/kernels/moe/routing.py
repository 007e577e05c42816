"""Triton: which experts a token chooses.

Legend: T tokens, X experts, N experts for each token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs


def route(
    logits: Tensor, num_chosen: int, *, normalise: bool, has_shared: bool
) -> tuple[Tensor, Tensor]:
    """As `reference.route`, with experts in int32; among equal logits the first expert wins."""
    num_tokens, num_experts = logits.shape[0], logits.shape[1] - has_shared
    width = num_chosen + has_shared
    weights = logits.new_empty(num_tokens, width)
    experts = torch.empty(num_tokens, width, dtype=torch.int32, device=logits.device)
    _route_kernel[(num_tokens,)](
        logits,
        weights,
        experts,
        logits.stride(0),
        EXPERTS=num_experts,
        COLUMNS=triton.next_power_of_2(num_experts),
        CHOSEN=num_chosen,
        NORMALISE=normalise,
        SHARED=has_shared,
        num_warps=1,
        **OVERLAPPED,
    )
    return weights, experts


@triton.jit
def _route_kernel(
    logits,
    weights,
    experts,
    stride,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
):
    """One token: a softmax, and CHOSEN times the largest that is left."""
    let_next_start()
    wait_for_inputs()
    WIDTH: tl.constexpr = CHOSEN + SHARED
    token = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    is_expert = column < EXPERTS
    row = logits + token.to(tl.int64) * stride
    left = tl.load(row + column, mask=is_expert, other=float("-inf")).to(tl.float32)
    top = tl.max(left)
    total = tl.sum(tl.exp(left - top))
    place = tl.arange(0, triton.next_power_of_2(WIDTH))
    best_logits = tl.zeros_like(place).to(tl.float32)
    best_experts = tl.zeros_like(place)
    for n in tl.static_range(CHOSEN):
        best = tl.max(left)
        expert = tl.min(tl.where((left == best) & is_expert, column, COLUMNS - 1))
        left = tl.where(column == expert, float("-inf"), left)
        best_logits = tl.where(place == n, best, best_logits)
        best_experts = tl.where(place == n, expert, best_experts)
    is_chosen = place < CHOSEN
    shares = tl.where(is_chosen, tl.exp(best_logits - top), 0.0)
    shares /= tl.sum(shares) if NORMALISE else total
    if SHARED:
        gate = tl.load(row + EXPERTS).to(tl.float32)
        shares = tl.where(is_chosen, shares, tl.sigmoid(gate))
        best_experts = tl.where(is_chosen, best_experts, EXPERTS)
    target = token * WIDTH + place
    tl.store(weights + target, shares.to(weights.dtype.element_ty), mask=place < WIDTH)
    tl.store(experts + target, best_experts, mask=place < WIDTH)
