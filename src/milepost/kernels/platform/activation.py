"""Triton: the activation between the projections of a feed-forward."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(up, gate, GATED: tl.constexpr, LIMIT: tl.constexpr = 0.0):
    """SiLU(gate) * up, perhaps both within a limit; without gates the square of up's ReLU."""
    if GATED:
        return multiply_within(gate * tl.sigmoid(gate), up, LIMIT)
    else:
        positive = tl.maximum(up, 0.0)
        return positive * positive


@triton.jit
def multiply_within(active, up, LIMIT: tl.constexpr):
    """Multiplies SiLU's outputs by ups: see `norm.silu_mul`."""
    if LIMIT > 0:
        active = tl.minimum(active, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return active * up
