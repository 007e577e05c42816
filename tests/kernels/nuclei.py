"""Logits to take a nucleus of, and the nucleus by definition."""

from __future__ import annotations

import torch
from torch import Tensor


def random_logits(num_rows: int, vocab_size: int, device: str = "cpu") -> Tensor:
    """Rows with maximum 0, some of their logits equal, some impossible."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    logits[:, vocab_size // 2] = logits[:, vocab_size // 3]
    logits[:, 1] = -torch.inf
    return (logits - logits.amax(-1, keepdim=True)).to(device)


def kept_by_sorting(scaled: Tensor, floor: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Which logits stay, [R, V], and what mass is wanted, [R, 1] float64: those not below `floor`
    of which all greater ones weigh less than `share` of all that `floor` leaves."""
    mass = torch.where(scaled >= floor, scaled.double().exp(), 0.0)
    wanted = share * mass.sum(-1, keepdim=True)
    ordered, order = scaled.sort(dim=-1, descending=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    sorted_mass = mass.gather(1, order)
    above = sorted_mass.cumsum(-1) - sorted_mass
    # Equal logits have above them what the first of them has.
    above = torch.where(is_first, above, 0.0).cummax(-1).values
    is_kept = torch.empty_like(is_first).scatter_(1, order, above < wanted)
    return is_kept & (scaled >= floor), wanted
