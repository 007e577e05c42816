"""Triton: which experts few tokens chose, in one program's launch.

Legend: T tokens, X experts, N experts of a token, P = T * N routed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from milepost.kernels.launches import quick
from milepost.kernels.overlap import OVERLAPPED, let_next_start, wait_for_inputs
from milepost.kernels.tiles import next_power_of_2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Experts that tokens were routed to, in order; int32."""

    experts: Tensor
    """[X], of which the first `count` are filled."""
    counters: Tensor
    """[X] zeros, beside them, for whoever needs some."""
    count: Tensor
    """[1]"""


def list_chosen(experts: Tensor, num_experts: int) -> Chosen:
    """The experts in `experts` [T, N] int32."""
    num_routed = experts.numel()
    lists = torch.empty(2 * num_experts + 1, dtype=torch.int32, device=experts.device)
    chosen, counters, count = lists.split([num_experts, num_experts, 1])
    _list_kernel[(1,)](
        experts,
        chosen,
        counters,
        count,
        num_routed,
        EXPERTS=num_experts,
        BINS=next_power_of_2(num_experts + 1),
        CHUNK=max(32, next_power_of_2(num_routed)),
        num_warps=8,
        **OVERLAPPED,
    )
    return Chosen(experts=chosen, counters=counters, count=count)


@quick
@triton.jit(do_not_specialize=("num_routed",))
def _list_kernel(
    experts,
    chosen,
    counters,
    count,
    num_routed,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One bin more than experts takes what is no routed token."""
    let_next_start()
    wait_for_inputs()
    o_p, o_x = tl.arange(0, CHUNK), tl.arange(0, BINS)
    b_x = tl.load(experts + o_p, mask=o_p < num_routed, other=EXPERTS)
    is_chosen = (tl.histogram(b_x, BINS) > 0) & (o_x < EXPERTS)
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen + place, o_x, mask=is_chosen)
    tl.store(counters + o_x, 0, mask=o_x < EXPERTS)
    tl.store(count, tl.sum(is_chosen.to(tl.int32)))
