"""Numbers in float8_e4m3fn: what they are, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest value of float8_e4m3fn."""
BLOCK = 128
"""Inputs that share a scale, of weights and of activations, in the published block format."""
LEAST_SCALE = 1e-12
"""Of activations that are all zeros, so that nothing is divided by zero."""


def round_fp8(values: Tensor) -> Tensor:
    """To the nearest, ties to even; what is larger than the largest becomes the largest."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)
