"""Logits to take a nucleus of."""

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
