"""Sums over ranks in plain torch: the definition, given what every rank has.

Legend: T tokens, P partials, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from milepost.kernels import norm


def add_norm(
    hidden: Tensor, partials: Sequence[Tensor], scale: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`hidden` [T, C] and `partials` [T, P, C] of each rank."""
    sent = [each.float().sum(1).to(hidden.dtype) for each in partials]
    return norm.reference.add_norm(hidden.float(), _in_order(sent), scale, eps, multiplier)


def add_up(values: Sequence[Tensor]) -> Tensor:
    """`values` [T, C] of each rank."""
    return _in_order(values).to(values[0].dtype)


def _in_order(values: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(values[0], dtype=torch.float32)
    for each in values:
        total += each.float()
    return total
