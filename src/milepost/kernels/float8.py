"""Numbers in float8_e4m3fn: what they are, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest value of float8_e4m3fn."""


def round_fp8(values: Tensor) -> Tensor:
    """To the nearest, ties to even; what is larger than the largest becomes the largest."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)
