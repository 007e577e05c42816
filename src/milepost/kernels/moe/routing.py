"""Triton: which experts a token chooses.

Legend: T tokens, X experts, N experts for each token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs

_ROWS = 4


def route(
    logits: Tensor, num_chosen: int, *, normalise: bool, has_shared: bool
) -> tuple[Tensor, Tensor]:
    """As `reference.route`, with experts in int32; among equal logits the first expert wins."""
    num_tokens, num_experts = logits.shape[0], logits.shape[1] - has_shared
    width = num_chosen + has_shared
    weights = logits.new_empty(num_tokens, width)
    experts = torch.empty(num_tokens, width, dtype=torch.int32, device=logits.device)
    rows = 1 if num_tokens <= 256 else _ROWS
    _route_kernel[(triton.cdiv(num_tokens, rows),)](
        logits,
        weights,
        experts,
        num_tokens,
        logits.stride(0),
        EXPERTS=num_experts,
        COLUMNS=triton.next_power_of_2(num_experts),
        CHOSEN=num_chosen,
        ROWS=rows,
        NORMALISE=normalise,
        SHARED=has_shared,
        num_warps=rows,
        **OVERLAPPED,
    )
    return weights, experts


@triton.jit(do_not_specialize=("num_tokens",))
def _route_kernel(
    logits,
    weights,
    experts,
    num_tokens,
    stride,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    NORMALISE: tl.constexpr,
    SHARED: tl.constexpr,
):
    """A softmax and CHOSEN times the largest that is left, for ROWS tokens."""
    let_next_start()
    wait_for_inputs()
    WIDTH: tl.constexpr = CHOSEN + SHARED
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_token = token < num_tokens
    row = logits + token.to(tl.int64) * stride
    is_expert = column < EXPERTS
    left = tl.load(
        row[:, None] + column[None, :],
        mask=is_token[:, None] & is_expert[None, :],
        other=float("-inf"),
    ).to(tl.float32)
    # Rows that are no token's stay finite: their columns below the last are all -inf.
    left = tl.where(is_token[:, None], left, 0.0)
    top = tl.max(left, 1)
    total = tl.sum(tl.exp(left - top[:, None]), 1)
    WIDE: tl.constexpr = triton.next_power_of_2(WIDTH)
    place = tl.arange(0, WIDE)
    best_logits = tl.zeros([ROWS, WIDE], tl.float32)
    best_experts = tl.zeros([ROWS, WIDE], tl.int32)
    for n in tl.static_range(CHOSEN):
        best = tl.max(left, 1)
        is_best = (left == best[:, None]) & is_expert[None, :]
        expert = tl.min(tl.where(is_best, column[None, :], COLUMNS - 1), 1)
        left = tl.where(column[None, :] == expert[:, None], float("-inf"), left)
        here = place[None, :] == n
        best_logits = tl.where(here, best[:, None], best_logits)
        best_experts = tl.where(here, expert[:, None], best_experts)
    is_chosen = (place < CHOSEN)[None, :]
    shares = tl.where(is_chosen, tl.exp(best_logits - top[:, None]), 0.0)
    shares /= (tl.sum(shares, 1) if NORMALISE else total)[:, None]
    if SHARED:
        gate = tl.load(row + EXPERTS, mask=is_token, other=0.0).to(tl.float32)
        shares = tl.where(is_chosen, shares, tl.sigmoid(gate)[:, None])
        best_experts = tl.where(is_chosen, best_experts, EXPERTS)
    index = token[:, None] * WIDTH + place[None, :]
    is_stored = is_token[:, None] & (place < WIDTH)[None, :]
    tl.store(weights + index, shares.to(weights.dtype.element_ty), mask=is_stored)
    tl.store(experts + index, best_experts, mask=is_stored)
