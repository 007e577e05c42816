"""Norms and activations fused with the operations around them: `add_norm`, `silu_mul`,
`relu_squared` and `gate_heads`.

Callers import the operations from here. `reference` is the definition; on a GPU `triton` computes
norms and `activations` the others.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.norm import reference
from milepost.kernels.norm.reference import norm
from milepost.kernels.platform.tables import fused

__all__ = [
    "add_norm",
    "add_norm_and_multiply",
    "gate_heads",
    "norm",
    "relu_squared",
    "silu_mul",
]

add_norm = fused("norm.triton")(reference.add_norm)
silu_mul = fused("norm.activations")(reference.silu_mul)
relu_squared = fused("norm.activations")(reference.relu_squared)
gate_heads = fused("norm.activations")(reference.gate_heads)


def add_norm_and_multiply(
    hidden: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    eps: float,
    multiplier: float,
    weight: Tensor,
    output: Tensor,
) -> tuple[Tensor, Tensor]:
    """Does `add_norm` of `hidden` [1, H], and writes the norm times `weight` [O, H] to `output` [1,
    O]; only where `products.norms_too` allows."""
    from milepost.kernels.norm import triton

    return triton.add_norm_and_multiply(hidden, delta, scale, eps, multiplier, weight, output)
