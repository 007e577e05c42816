"""Norms and activations fused with what stands around them: `add_norm`, `silu_mul`, `relu_squared`
and `gate_heads`.

Callers import the operations from here. `reference` is the definition; on a GPU `triton` computes
norms and `activations` the others.
"""

from __future__ import annotations

from torch import Tensor

from milepost.kernels.layout.emit import Emit, Inputs
from milepost.kernels.norm import reference
from milepost.kernels.platform.device import runs_triton
from milepost.kernels.platform.tables import SumOrder, fused

__all__ = ["add_norm", "add_norm_and_multiply", "gate_heads", "relu_squared", "silu_mul"]

silu_mul = fused("norm.activations")(reference.silu_mul)
relu_squared = fused("norm.activations")(reference.relu_squared)
gate_heads = fused("norm.activations")(reference.gate_heads)


def add_norm(
    hidden: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    eps: float,
    multiplier: float = 1.0,
    *,
    delta_scale: Tensor | None = None,
    emit: Emit = Emit.VALUES,
    order: SumOrder = SumOrder.FREE,
) -> tuple[Tensor, Inputs]:
    """See `reference.add_norm`. The norm is emitted as `emit` asks, and a row is added up in
    `order`; partials have no order of many rows."""
    if runs_triton(hidden):
        from milepost.kernels.norm import triton

        how = {"delta_scale": delta_scale, "emit": emit, "order": order}
        return triton.add_norm(hidden, delta, scale, eps, multiplier, **how)
    return reference.add_norm(hidden, delta, scale, eps, multiplier, delta_scale=delta_scale)


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
