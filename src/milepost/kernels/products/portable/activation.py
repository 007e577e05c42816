"""Triton: what stands between an expert's projections."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def is_gated(up: Tensor, size: int) -> bool:
    """Whether experts of this size are SwiGLU, whose `up` [X, 2 * I, H] holds gates too, or square
    a ReLU of `up` [X, I, H]."""
    return up.shape[1] == 2 * size


@triton.jit
def activate(up, gate, GATED: tl.constexpr):
    """SiLU(gate) * up; without gates the square of up's ReLU."""
    if GATED:
        return gate * tl.sigmoid(gate) * up
    else:
        positive = tl.maximum(up, 0.0)
        return positive * positive
