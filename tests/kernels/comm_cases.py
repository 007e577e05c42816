"""Ranks whose memory is this process's, and what they have to add up to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from milepost.kernels import norm
from milepost.kernels.comm import NUM_SLOTS, RankBuffers, add_up, one_shot_rows
from milepost.kernels.layout.emit import values_of


def mails(
    size: int, hidden_size: int, dtype: torch.dtype
) -> tuple[list[RankBuffers], list[Tensor]]:
    """Each rank's, and what lies behind its addresses."""
    kept: list[Tensor] = []
    values, signals = [], []
    for _ in range(size):
        values.append(torch.full((2, NUM_SLOTS, hidden_size), torch.nan, dtype=dtype))
        signals.append(torch.zeros(NUM_SLOTS, size, dtype=torch.int32))
    kept += [*values, *signals]
    addresses = [torch.tensor([each.data_ptr() for each in held]) for held in (values, signals)]
    found = [
        RankBuffers(
            rank=rank,
            size=size,
            values=addresses[0],
            signals=addresses[1],
            turns=torch.zeros(NUM_SLOTS, dtype=torch.int32),
            hidden_size=hidden_size,
            num_rows=one_shot_rows(size),
        )
        for rank in range(size)
    ]
    return found, kept


def boxes(
    size: int, num_rows: int, hidden_size: int, dtype: torch.dtype
) -> tuple[list[RankBuffers], list[Tensor]]:
    """The same for many rows, so many of each rank."""
    values = [
        torch.full((2, size, num_rows, hidden_size), torch.nan, dtype=dtype) for _ in range(size)
    ]
    signals = [torch.zeros(2, num_rows, size, dtype=torch.int32) for _ in range(size)]
    addresses = [torch.tensor([each.data_ptr() for each in held]) for held in (values, signals)]
    found = [
        RankBuffers(
            rank=rank,
            size=size,
            values=addresses[0],
            signals=addresses[1],
            turns=torch.zeros(num_rows, dtype=torch.int32),
            hidden_size=hidden_size,
            num_rows=num_rows * size,
        )
        for rank in range(size)
    ]
    return found, [*values, *signals]


def add_norm(
    hidden: Tensor, partials: Sequence[Tensor], scale: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Adds up all ranks' `partials` [T, P, C], each rounded to the dtype of `hidden` first, and
    norms `hidden` [T, C] plus that. This is the definition of what the kernels return."""
    sent = [each.float().sum(1).to(hidden.dtype).float() for each in partials]
    given = hidden.float(), add_up(sent), scale, eps, multiplier
    total, normed = norm.reference.add_norm(*given)
    return total, values_of(normed)
