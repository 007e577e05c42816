"""In which type the kernels add up: float32, unless the inputs are float64."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of intermediate sums for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
