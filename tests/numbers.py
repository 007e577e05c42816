"""Comparing tensors."""

from __future__ import annotations

from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of `expected`; NaN anywhere stays NaN."""
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return (difference / expected.double().square().mean().sqrt()).item()
