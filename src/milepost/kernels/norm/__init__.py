"""Norms and activations fused with what stands around them: `add_norm`, `silu_mul` and
`relu_squared`.

This is the door to the op: callers import it from here, whatever computes it. `reference` is the
definition; on a GPU `triton` computes it.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from milepost.kernels.device import runs_triton
from milepost.kernels.norm import reference

__all__ = ["add_norm", "relu_squared", "silu_mul"]


def add_norm(
    hidden: Tensor, delta: Tensor | None, scale: Tensor, eps: float, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """See `reference.add_norm`."""
    return _module(hidden).add_norm(hidden, delta, scale, eps, multiplier)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    return _module(gate_up).silu_mul(gate_up)


def relu_squared(hidden: Tensor) -> Tensor:
    """See `reference.relu_squared`."""
    return _module(hidden).relu_squared(hidden)


def _module(tensor: Tensor) -> ModuleType:
    """Triton is imported where it is used: machines without a GPU need not have it."""
    if runs_triton(tensor):
        from milepost.kernels.norm import triton

        return triton
    return reference
