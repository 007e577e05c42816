"""Triton: which experts a token chooses, and which tokens an expert has.

Legend: T tokens, X experts (the shared one included), N experts for each token, P = T * N choices
(choice t * N + n is the n-th of token t), M rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 4
_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Choices by expert, and the blocks of rows that cover them."""

    order: Tensor
    """Choices [P] int32, by expert and then by number; a row is an index into this."""
    blocks: Tensor
    """[3, capacity] int32: each block's expert (-1 for padding), first row, and end of the
    expert's rows, which may lie beyond the block."""


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


def group(experts: Tensor, num_experts: int, block_rows: int) -> Groups:
    """Group the choices `experts` [T, N] int32 into blocks of M = `block_rows` rows, on the
    device.

    Expert x's blocks stand from x + (its first row) // M on, which leaves room for every
    distribution without knowing how many blocks the others have.
    """
    num_choices = experts.numel()
    capacity = num_experts + num_choices // block_rows
    order = torch.empty(num_choices, dtype=torch.int32, device=experts.device)
    blocks = torch.empty(3, capacity, dtype=torch.int32, device=experts.device)
    chunk = min(_CHUNK, max(32, triton.next_power_of_2(num_choices)))
    _group_kernel[(num_experts,)](
        experts,
        order,
        blocks,
        num_choices,
        capacity,
        ROWS=block_rows,
        CHUNK=chunk,
        num_warps=4 if chunk <= 1024 else 8,
    )
    return Groups(order=order, blocks=blocks)


@triton.jit(do_not_specialize=("num_choices", "capacity"))
def _group_kernel(
    experts, order, blocks, num_choices, capacity, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """One expert: count its rows and those before, then list them. No atomics: always the same."""
    mine = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    before = tl.zeros([CHUNK], tl.int32)
    own = tl.zeros([CHUNK], tl.int32)
    # `while`, because the interpreter cannot take a range's end from a tensor under NumPy 2.4.
    first = 0
    while first < num_choices:
        choice = first + lane
        chosen = tl.load(experts + choice, mask=choice < num_choices, other=1 << 30)
        before += chosen < mine
        own += chosen == mine
        first += CHUNK
    start, count = tl.sum(before), tl.sum(own)
    end = start + count
    first_block, end_block = mine + start // ROWS, mine + 1 + end // ROWS
    begin = first_block
    while begin < end_block:
        block = begin + lane
        row = start + (block - first_block) * ROWS
        is_block = block < end_block
        tl.store(blocks + block, tl.where(row < end, mine, -1), mask=is_block)
        tl.store(blocks + capacity + block, row, mask=is_block)
        tl.store(blocks + 2 * capacity + block, end, mask=is_block)
        begin += CHUNK
    first = 0
    while first < num_choices:
        choice = first + lane
        chosen = tl.load(experts + choice, mask=choice < num_choices, other=-1)
        is_mine = (chosen == mine).to(tl.int32)
        tl.store(order + start + tl.cumsum(is_mine, 0) - 1, choice, mask=is_mine == 1)
        start += tl.sum(is_mine)
        first += CHUNK
