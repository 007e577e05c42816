"""Ranks whose memory is this process's, and what they have to add up to."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.all_reduce import NUM_SLOTS, Mail


def mails(size: int, hidden_size: int, dtype: torch.dtype) -> tuple[list[Mail], list[Tensor]]:
    """Each rank's, and what lies behind its addresses."""
    kept: list[Tensor] = []
    values, signals = [], []
    for _ in range(size):
        values.append(torch.full((2, NUM_SLOTS, hidden_size), torch.nan, dtype=dtype))
        signals.append(torch.zeros(NUM_SLOTS, size, dtype=torch.int32))
    kept += [*values, *signals]
    addresses = [torch.tensor([each.data_ptr() for each in held]) for held in (values, signals)]
    found = [
        Mail(
            rank=rank,
            size=size,
            values=addresses[0],
            signals=addresses[1],
            turns=torch.zeros(NUM_SLOTS, dtype=torch.int32),
            dtype=dtype,
            hidden_size=hidden_size,
        )
        for rank in range(size)
    ]
    return found, kept
