"""Triton: the activation between an expert's projections."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(up, gate, GATED: tl.constexpr):
    """SiLU(gate) * up; without gates the square of up's ReLU."""
    if GATED:
        return gate * tl.sigmoid(gate) * up
    else:
        positive = tl.maximum(up, 0.0)
        return positive * positive
